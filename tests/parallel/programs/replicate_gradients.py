"""Gradients are those of one process and of DDP: unused and frozen parameters, accumulation, checkpoints, dtypes."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from replicate_common import RANK, SIZE, SMALL, Branches, alike, drawn, mlp, same_gradients, state, whole
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from unisono.parallel import replicate


def like_one_process() -> None:
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(RANK)  # replicate makes them equal
    for options in (SMALL, {}, {"overlap": False}, {"static_graph": True, **SMALL}):
        replicas = replicate(model, **options)
        alike(*model.parameters())
        assert not any("module." in name for name in model.state_dict())
        reference = copy.deepcopy(model)
        optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, reference)]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=step % 2 == 0)
            model(drawn(step, RANK, 3, 6)).square().mean().backward()
            whole(lambda r, s=step, m=reference: m(drawn(s, r, 3, 6)).square().mean()).backward()
            same_gradients(model, reference)
            for optimizer in optimizers:
                optimizer.step()
        replicas.check()
        replicas.close()
    model(drawn(0, RANK, 3, 6)).sum().backward()  # nobody watches any more


def bits_of_ddp() -> None:
    model = nn.Sequential(mlp(8, 64, 64), nn.BatchNorm1d(64), nn.Linear(64, 3))
    wrapped = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.01)
    replicas = replicate(model, bucket_mb=0.01, first_bucket_mb=0.01)
    pairs = [(m, torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)) for m in (model, wrapped)]
    for step in range(6):
        for m, optimizer in pairs:
            optimizer.zero_grad()
            m(drawn(step, RANK, 5, 8)).square().mean().backward()
            optimizer.step()
        alike(*state(model))
        for p, q in zip(model.parameters(), wrapped.parameters(), strict=True):
            # Two numbers have one sum; of three and more, buckets of other sizes may be added in another order.
            assert torch.equal(p, q) if SIZE == 2 else torch.allclose(p, q, atol=1e-5)
    replicas.close()


def unused_parameters() -> None:
    for options in (SMALL, {}):
        model = Branches()
        reference = copy.deepcopy(model)
        replicas = replicate(model, **options)
        for step in range(23):
            # All ranks alike, then one or the other, then none for long enough to be forgotten, then again.
            which = [(step + 3 * r * (step % 3)) % 8 if not 6 < step < 16 else 1 for r in range(SIZE)]
            for m in (model, reference):
                m.zero_grad()
            model(drawn(step, RANK, 3, 4), which[RANK]).square().mean().backward()
            whole(lambda r, s=step, w=which, m=reference: m(drawn(s, r, 3, 4), w[r]).square().mean()).backward()
            same_gradients(model, reference)
        assert model.never.grad is None
        # What nobody used keeps the gradient that it has.
        kept = model.never.grad = torch.full((3,), float(RANK))
        model(drawn(0, RANK, 3, 4), 7).sum().backward()
        assert model.never.grad is kept
        assert kept.tolist() == [RANK] * 3
        replicas.close()


def accumulation() -> None:
    for average in (True, False):
        model = mlp(4, 8, 2)
        reference = copy.deepcopy(model)
        replicas = replicate(model, average=average, **SMALL)
        total = 1 if average else SIZE
        for quietly in (True, False):  # the last way sends every time, and must not add anything up twice
            for m in (model, reference):
                m.zero_grad()
            for micro in range(3):
                with replicas.no_sync() if quietly and micro < 2 else nullcontext():
                    model(drawn(micro, RANK, 3, 4)).square().mean().backward()
                whole(lambda r, s=micro, m=reference: m(drawn(s, r, 3, 4)).square().mean()).mul(total).backward()
            same_gradients(model, reference)
        # Used only where nothing was sent, then reduced without a backward.
        for m in (model, reference):
            m.zero_grad()
        with replicas.no_sync(), replicas.no_sync():
            if RANK == 0:
                model(drawn(0, 0, 3, 4)).square().mean().backward()
        replicas.synchronize()
        reference(drawn(0, 0, 3, 4)).square().mean().mul(total / SIZE).backward()
        same_gradients(model, reference)
        # A graph that is kept goes backward twice.
        for m in (model, reference):
            m.zero_grad()
        loss = model(drawn(1, RANK, 3, 4)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        whole(lambda r, m=reference: m(drawn(1, r, 3, 4)).square().mean()).mul(2 * total).backward()
        same_gradients(model, reference)
        replicas.close()


def sums_survive_autograd_grad() -> None:
    model = mlp(4, 8, 2)
    replicas = replicate(model, average=False, **SMALL)
    model(drawn(0, RANK, 3, 4)).square().mean().backward()
    before = [p.grad.clone() for p in model.parameters()]
    torch.autograd.grad(model(drawn(1, RANK, 3, 4)).sum(), list(model.parameters()))
    assert all(torch.equal(p.grad, sums) for p, sums in zip(model.parameters(), before, strict=True))
    replicas.close()


def kept_gradients_keep_their_values() -> None:
    model = mlp(4, 8, 2)
    replicas = replicate(model)
    kept: list[tuple[list[Tensor], list[Tensor]]] = []
    for step in range(4):
        model.zero_grad()
        model(drawn(step, RANK, 3, 4)).square().mean().backward()
        gradients = [p.grad for p in model.parameters()]
        kept.append((gradients, [g.clone() for g in gradients]))
    for gradients, copies in kept:
        assert all(torch.equal(g, c) for g, c in zip(gradients, copies, strict=True))
    for group in (list(model.parameters()),):
        torch.nn.utils.clip_grad_norm_(group, 0.1)
        alike(*(p.grad for p in group))
    replicas.close()


class Blocks(nn.Module):
    """Runs one layer three times, checkpointed or not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.middle, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, reentrant: bool | None) -> Tensor:
        def block(z: Tensor) -> Tensor:
            return torch.tanh(self.middle(z))

        x = self.first(x)
        for _ in range(3):
            x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        return self.last(x)


def checkpointing() -> None:
    for reentrant in (False, True):
        model = Blocks()
        reference = copy.deepcopy(model)
        replicas = replicate(model, **SMALL)
        for step in range(4):
            for m in (model, reference):
                m.zero_grad()
            # In the last step the layer's gradient comes once, not three times, and then again.
            model(drawn(step, RANK, 3, 4), reentrant if step < 3 else None).square().mean().backward()
            whole(lambda r, s=step, m=reference: m(drawn(s, r, 3, 4), None).square().mean()).backward()
            same_gradients(model, reference)
        # Only inside the outermost layer is there anything to reduce.
        for m in (model, reference):
            m.zero_grad()
        x = drawn(9, RANK, 3, 8).requires_grad_()
        checkpoint(model.middle, x, use_reentrant=reentrant).square().mean().backward()
        whole(lambda r, m=reference: m.middle(drawn(9, r, 3, 8)).square().mean()).backward()
        same_gradients(model, reference)
        assert x.grad is not None
        replicas.close()


def types_and_layouts() -> None:
    torch.manual_seed(7)
    model = nn.Module()
    for name, value in {
        "float32": torch.randn(5),
        "float16": torch.randn(5, dtype=torch.float16),
        "bfloat16": torch.randn(4, 3, dtype=torch.bfloat16),
        "float64": torch.randn((), dtype=torch.float64),
        "complex64": torch.randn(3, dtype=torch.complex64),
        "image": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "turned": torch.randn(4, 3).t(),
        "empty": torch.randn(0, 3),
    }.items():
        model.register_parameter(f"of_{name}", nn.Parameter(value))
    model.register_parameter("count", nn.Parameter(torch.tensor([3]), requires_grad=False))
    for options in (SMALL, {}):
        replicas = replicate(model, **options)
        for _ in range(3):
            model.zero_grad()
            sum((p * p * (RANK + 1)).sum().abs().float() for p in model.parameters() if p.requires_grad).backward()
            for name, p in model.named_parameters():
                if p.requires_grad:
                    own = torch.autograd.grad((p * p).sum().abs().float(), p)[0]
                    torch.testing.assert_close(p.grad, own * ((SIZE + 1) / 2), rtol=1e-2, atol=1e-2)
                    assert (p.grad.dtype, p.grad.stride()) == (p.dtype, p.stride()), name
        replicas.close()


def sparse_gradients() -> None:
    torch.manual_seed(8)
    model = nn.ModuleDict({"table": nn.Embedding(20, 3, sparse=True), "bag": nn.EmbeddingBag(9, 3, sparse=True),
                           "top": nn.Linear(3, 1)})  # fmt: skip
    reference = copy.deepcopy(model)
    replicas = replicate(model, **SMALL)

    def loss(m: nn.Module, step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        rows = m["table"](torch.randint(20, (2 + rank,), generator=generator)).sum(0)
        if rank == SIZE - 1 and step != 2:  # only one rank uses the other table, or none does
            rows = rows + m["bag"](torch.randint(9, (1, 4), generator=generator))[0]
        return m["top"](rows).square().sum()

    for step in range(4):
        for m in (model, reference):
            m.zero_grad()
        loss(model, step, RANK).backward()
        whole(lambda r, s=step: loss(reference, s, r)).backward()
        assert model["table"].weight.grad.is_sparse
        assert (model["bag"].weight.grad is None) == (step == 2)
        for name in ("table", "bag", "top"):
            p, q = model[name].weight, reference[name].weight
            if q.grad is not None:
                torch.testing.assert_close(p.grad.to_dense(), q.grad.to_dense())
    replicas.close()
    plain = nn.Embedding(5, 2)
    replicas = replicate(plain)
    with pytest.warns(UserWarning, match="'weight' is sparse, but no module with sparse=True"):
        F.embedding(torch.tensor([RANK]), plain.weight, sparse=True).sum().backward()
    expected = torch.zeros(5, 2)
    expected[:SIZE] = 1 / SIZE
    torch.testing.assert_close(plain.weight.grad, expected)
    replicas.close()
