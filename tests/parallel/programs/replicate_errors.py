"""What goes wrong: a backward that fails, models that differ, ranks that are late."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from replicate_common import RANK, SIZE, SMALL, Branches, alike, drawn, mlp, same_gradients, whole
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from unisono.errors import PeerError, RankMismatchError, UnisonoError
from unisono.parallel import Replicas, replicate


class Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise FloatingPointError("by order")


def failures() -> None:
    # Before anything was sent, on all ranks alike: the next backward is as any other.
    model = mlp(4, 8, 2)
    reference = copy.deepcopy(model)
    replicas = replicate(model)
    with pytest.raises(FloatingPointError, match="by order"):
        model[2](Fails.apply(model[0](drawn(0, RANK, 3, 4)))).sum().backward()
    model.zero_grad()
    model(drawn(1, RANK, 3, 4)).square().mean().backward()
    whole(lambda r, m=reference: m(drawn(1, r, 3, 4)).square().mean()).backward()
    same_gradients(model, reference)
    replicas.close()
    # On one rank, which goes on: the ranks find that they are not at the same backward.
    replicas = replicate(model)
    if RANK == SIZE - 1:
        with pytest.raises(FloatingPointError, match="by order"):
            model[2](Fails.apply(model[0](drawn(0, RANK, 3, 4)))).sum().backward()
    with pytest.raises(RankMismatchError, match=r"is in backward pass \d of this model while this rank is in pass \d"):
        model(drawn(1, RANK, 3, 4)).square().mean().backward()
    replicas.close()
    # After buckets were sent there is no going on.
    model = mlp(4, 80, 2)
    replicas = replicate(model, **SMALL)
    with pytest.raises(FloatingPointError, match="by order"):
        model[2](Fails.apply(model[0](drawn(0, RANK, 3, 4)))).sum().backward()
    with pytest.raises(UnisonoError, match=r"after \d of \d buckets of its gradients had been sent"):
        model(drawn(1, RANK, 3, 4)).sum().backward()
    replicas.close()
    # Promises that are broken.
    model = Branches()
    replicas = replicate(model, static_graph=True)
    model(drawn(0, RANK, 3, 4), 1).sum().backward()
    with pytest.raises(RankMismatchError, match=r"static_graph=True, but after 1 backward.*'branches\.1\.weight'"):
        model(drawn(0, RANK, 3, 4), 3 if RANK == 0 else 1).sum().backward()
    replicas.close()
    # Frozen and unfrozen again on all ranks, and then on one.
    model = mlp(4, 8, 2)
    replicas = replicate(model)
    for frozen in (False, True, False, True):
        model[0].weight.requires_grad_(not frozen)
        model(drawn(0, RANK, 3, 4)).sum().backward()
    model[0].weight.requires_grad_(RANK == 1)
    others = "rank 0" if SIZE == 2 else r"ranks 0, 2.*"
    message = rf"requires_grad of '0\.weight' is False on {others} and True on rank 1, so the mean"
    with pytest.raises(RankMismatchError, match=message):
        model(drawn(0, RANK, 3, 4)).sum().backward()
    replicas.close()


def wrong_models() -> None:
    widths = [nn.Linear(3, 4), nn.Linear(3, 4 + (RANK == 1)), nn.Linear(3, 4, bias=RANK != 1)]
    with pytest.raises(
        RankMismatchError, match=r"'weight' is float32 \[4, 3\] on rank 0 and float32 \[5, 3\] on rank 1"
    ):
        replicate(widths[1])
    with pytest.raises(RankMismatchError, match=r"rank 0 has 'bias' \(2 in all\), which rank 1 has not \(1 in all\)"):
        replicate(widths[2])
    replicas = replicate(widths[0])
    with pytest.raises(ValueError, match=r"'0\.weight' is watched by another replicate"):
        replicate(nn.Sequential(widths[0]))
    replicas.close()
    with pytest.raises(UnisonoError, match="closed: call replicate"):
        replicas.update()
    shared = nn.Linear(3, 3)
    replicas = replicate([nn.Sequential(shared, nn.Linear(3, 2)), nn.Sequential(shared)])
    shared(torch.ones(1, 3)).sum().backward()
    alike(*(p.grad for p in shared.parameters()))
    replicas.close()
    frozen: Replicas = replicate(nn.Linear(2, 2).requires_grad_(False))
    frozen.close()


def wrong_arguments() -> None:
    model = nn.Linear(3, 4)
    error, message = (
        (TypeError, "models is an int") if RANK == 1 else (PeerError, r"replicate was not done.*rank 1, with")
    )
    with pytest.raises(error, match=message):
        replicate(3 if RANK == 1 else model)
    everyone = r"replicate\(\) got other arguments on some ranks: .*on rank"
    with pytest.raises(RankMismatchError, match=everyone + r"s? 0.*average=False on rank 1"):
        replicate(model, average=RANK != 1)
    with pytest.raises(RankMismatchError, match=everyone):
        replicate([model, nn.Linear(1, 1)] if RANK == 1 else [model])
    with pytest.raises(RankMismatchError, match=r"comm_hook='fp16_compress_hook' on rank 1"):
        replicate(model, comm_hook=fp16_compress_hook if RANK == 1 else None)
    replicas = replicate(model)
    with pytest.raises(TypeError, match=r"join\(\) was given an int"), replicas.join(3):  # type: ignore[arg-type]
        pass
    model(torch.full((1, 3), RANK + 1.0)).sum().backward()
    alike(*(p.grad for p in model.parameters()))
    replicas.close()


def late_ranks() -> None:
    model = mlp(4, 8, 2)
    replicas = replicate(model, timeout=3)
    if RANK == 0:
        with pytest.raises(
            RuntimeError, match=r"(?s)bucket 1 of 1 with .* '0.weight' did not come .* \d ranks.*join\(\)"
        ):
            model(drawn(0, RANK, 3, 4)).sum().backward()
        with pytest.raises(UnisonoError, match="an earlier backward pass failed on this rank"):
            model(drawn(0, RANK, 3, 4)).sum().backward()
    dist.barrier()
    replicas.close()
