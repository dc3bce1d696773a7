"""Ways to use it: several models, changed models, buffers, uneven batches, hooks, subgroups."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from replicate_common import RANK, SIZE, SMALL, Branches, alike, drawn, mlp, same_gradients, state, whole
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import unisono
from unisono.errors import RankMismatchError, UnisonoError
from unisono.parallel import replicate


def several_models() -> None:
    nets = {"generator": nn.Sequential(mlp(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)), "judge": nn.Sequential(
        mlp(8, 16, seed=1), nn.BatchNorm1d(16), nn.Linear(16, 1))}  # fmt: skip
    separate = copy.deepcopy(nets)
    together = replicate(nets, **SMALL)
    apart = [replicate(net, buffers="mean") for net in separate.values()]
    for generator, judge in (nets.values(), separate.values()):
        optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (generator, judge)]
        for step in range(3):
            real, noise = drawn(step, RANK, 6, 8), drawn(step, RANK + 50, 6, 4)
            optimizers[1].zero_grad()
            fake = generator(noise)
            # Two forward passes of one network, and a backward for each: DDP refuses that with BatchNorm.
            on_real, on_fake = judge(real), judge(fake.detach())
            F.softplus(-on_real).mean().backward()
            F.softplus(on_fake).mean().backward()
            alike(*(p.grad for p in judge.parameters()))
            optimizers[1].step()
            optimizers[0].zero_grad()
            F.softplus(-judge(fake)).mean().backward()
            optimizers[0].step()
            alike(*state(generator), *state(judge))
    together.check()
    for replicas in (together, *apart):
        replicas.close()


def frozen_and_changed() -> None:
    model = mlp(4, 8, 8, 2)
    model[2].requires_grad_(False)
    replicas = replicate(model, **SMALL)
    for phase in range(3):
        reference = copy.deepcopy(model)
        for step in range(2):
            for m in (model, reference):
                m.zero_grad()
            model(drawn(step, RANK, 3, 4)).square().mean().backward()
            whole(lambda r, s=step, m=reference: m(drawn(s, r, 3, 4)).square().mean()).backward()
            same_gradients(model, reference)
        if phase == 0:
            model[2].requires_grad_(True)
        elif phase == 1:
            model[4] = nn.Linear(8, 3)  # each rank has other values, until update
            with pytest.raises(UnisonoError, match=r"'4.weight' was put into the model after replicate.*update\(\)"):
                for _ in range(64):
                    model(drawn(0, RANK, 3, 4)).sum().backward()
            replicas.update()
            alike(*model.parameters())
    replicas.close()
    model = mlp(4, 8, 2)
    replicas = replicate(model)
    model.double()
    with pytest.raises(UnisonoError, match=r"gradient of torch.float64, and was of torch.float32.*update\(\)"):
        model(drawn(0, RANK, 3, 4).double()).sum().backward()
    replicas.update()
    model(drawn(0, RANK, 3, 4).double()).sum().backward()
    alike(*(p.grad for p in model.parameters()))
    replicas.close()


class Counting(nn.Module):
    """Has buffers that a forward pass changes, by writing and by replacing, and a large one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("still", torch.zeros(1000))
        self.register_buffer("written", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flag", torch.zeros(3, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        self.written += x.detach().mean(0)
        self.replaced = self.replaced + x.detach().mean(0).double()
        self.count += -(2**40) * (RANK + 1)
        self.flag[RANK % 3] = True
        return (x * self.weight).sum()


def buffers() -> None:
    for mode in ("broadcast", "mean", None):
        model = Counting()
        replicas = replicate(model, buffers=mode)
        sums = [torch.zeros(2) for _ in range(SIZE)]
        for step in range(3):
            model(drawn(step, RANK, 4, 2)).backward()
            now = [drawn(step, r, 4, 2).mean(0) for r in range(SIZE)]
            if mode is None:
                sums[RANK] += now[RANK]
                torch.testing.assert_close(model.written, sums[RANK])
                continue
            before = sums[0]
            sums = [before + (now[0] if mode == "broadcast" else sum(now) / SIZE)] * SIZE
            torch.testing.assert_close(model.written, sums[0])
            torch.testing.assert_close(model.replaced, sums[0].double())
            assert (model.count.item(), model.flag.tolist()) == (-(2**40) * (step + 1), [True, False, False])
            alike(*state(model))
        replicas.close()
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).eval()
    replicas = replicate(model)
    with torch.no_grad():
        model[1].running_mean.data.fill_(RANK)  # behind torch's back
    model(drawn(0, RANK, 4, 2)).sum().backward()
    assert model[1].running_mean.tolist() == [RANK] * 3  # nothing changed it in evaluation, so nothing travelled
    with pytest.raises(
        RankMismatchError, match=r"1 of 7 tensors of rank 1 differ from those of rank 0: '1.running_mean'"
    ):
        replicas.check()
    replicas.update()
    replicas.check()
    replicas.close()


def batches(counts: list[int]) -> Iterator[Tensor]:
    for step in range(counts[RANK]):
        yield drawn(step, RANK, 4, 3)


def uneven_batches() -> None:
    torch.manual_seed(9)
    nets = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), mlp(3, 2, seed=4)]
    reference = copy.deepcopy(nets[1])
    replicas = replicate(nets, **SMALL)
    optimizers = [torch.optim.Adam(net.parameters(), 0.05) for net in nets]
    reference_optimizer = torch.optim.Adam(reference.parameters(), 0.05)
    for counts in ([1 + 2 * r for r in range(SIZE)], [4 - r for r in range(SIZE)], [0, *[2] * (SIZE - 1)], [1] * SIZE):
        with replicas.join(*optimizers):
            for batch in batches(counts):
                for net, optimizer in zip(nets, optimizers, strict=True):
                    optimizer.zero_grad()
                    with replicas.no_sync():
                        net(batch).square().mean().mul(0.5).backward()
                    net(batch).square().mean().mul(0.5).backward()
                    optimizer.step()
        for step in range(max(counts)):  # the mean is over the ranks that had a batch
            there = [r for r in range(SIZE) if counts[r] > step]
            reference_optimizer.zero_grad()
            for r in there:
                reference(drawn(step, r, 4, 3)).square().mean().div(len(there)).backward()
            reference_optimizer.step()
        replicas.check()
        for p, q in zip(nets[1].parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        alike(*(v for o in optimizers for s in o.state.values() for v in s.values()))
    model = mlp(3, 2)
    replicas.close()
    replicas = replicate(model)
    with pytest.raises(ZeroDivisionError), replicas.join():
        raise ZeroDivisionError  # an error is not waited for
    replicas.close()


def hooks() -> None:
    def train(model: nn.Module, steps: int) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for step in range(steps):
            optimizer.zero_grad()
            model(drawn(step, RANK, 5, 8)).square().mean().backward()
            optimizer.step()
        alike(*model.parameters())
        return [p.detach().clone() for p in model.parameters()]

    def powers(group: dist.ProcessGroup | None) -> tuple[object, Callable]:
        state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=3, min_compression_rate=0.5)
        return state, powerSGD_hook.powerSGD_hook

    cases: dict[str, tuple[object, Callable]] = {
        "all_reduce": (None, default_hooks.allreduce_hook),
        "fp16": (None, default_hooks.fp16_compress_hook),
        "bf16": (None, default_hooks.bf16_compress_hook),
        "bf16 around": (None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
        "PowerSGD": powers(None),
    }
    for name, (state_, hook) in cases.items():
        model = mlp(8, 32, 16, 3)
        wrapped = DistributedDataParallel(copy.deepcopy(model))
        if not name.startswith("bf16"):  # DDP refuses those without NCCL, which they do not need
            wrapped.register_comm_hook(powers(None)[0] if name == "PowerSGD" else state_, hook)
        replicas = replicate(model, comm_hook=hook if state_ is None else (state_, hook))
        steps = 5 if name == "PowerSGD" else 2  # it compresses from the fourth on
        for p, q in zip(train(model, steps), train(wrapped, steps), strict=True):
            torch.testing.assert_close(p, q, rtol=2e-2, atol=4e-3, msg=lambda m, n=name: f"{n}: {m}")
        replicas.close()
    model = Branches()
    reference = copy.deepcopy(model)
    replicas = replicate(model, comm_hook=default_hooks.allreduce_hook, **SMALL)
    for step in range(5):
        which = (RANK + step) % 8
        for m in (model, reference):
            m.zero_grad()
        model(drawn(step, RANK, 3, 4), which).square().mean().backward()
        whole(lambda r, s=step, m=reference: m(drawn(s, r, 3, 4), (r + s) % 8).square().mean()).backward()
        same_gradients(model, reference)
    replicas.close()
    for wrong, message in (
        (lambda s, b: 3, "comm_hook gave an int"),
        (lambda s, b: _future(torch.ones(1)), "gave 1 elements"),
    ):
        model = mlp(3, 2)
        replicas = replicate(model, comm_hook=wrong)
        with pytest.raises((TypeError, ValueError), match=message):
            model(drawn(0, RANK, 2, 3)).sum().backward()
        replicas.close()


def _future(value: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


def penalties_on_gradients() -> None:
    model = mlp(4, 8, 1)
    reference = copy.deepcopy(model)
    replicas = replicate(model, **SMALL)

    def loss(m: nn.Module, rank: int) -> Tensor:
        x = drawn(0, rank, 3, 4).requires_grad_()
        (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    loss(model, RANK).backward()
    whole(lambda r: loss(reference, r)).backward()
    same_gradients(model, reference)
    model.zero_grad()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model(drawn(0, RANK, 3, 4)).sum().backward(create_graph=True)
    assert any("has a graph of its own" in str(w.message) for w in seen)
    alike(*(p.grad for p in model.parameters()))
    # Gradients that come without a backward.
    model.zero_grad()
    used = list(model.parameters())[:-1]  # a slope does not depend on the last bias
    for p, g in zip(used, torch.autograd.grad(loss(model, RANK), used), strict=True):
        p.grad = g
    replicas.synchronize()
    same_gradients(model, reference)
    # And a backward of some parameters only.
    for m in (model, reference):
        m.zero_grad()
    loss(model, RANK).backward(inputs=[model[0].weight])
    whole(lambda r: loss(reference, r)).backward(inputs=[reference[0].weight])
    same_gradients(model, reference)
    replicas.close()


def groups() -> None:
    if SIZE < 3:
        return
    pair = unisono.subgroup([0, SIZE - 1])
    if unisono.rank() in (0, SIZE - 1):
        model = mlp(4, 8, 2)
        with torch.no_grad():
            model[0].weight.add_(RANK)
        replicas = replicate(model, pair)
        assert replicas.world_size == 2
        reference = copy.deepcopy(model)
        model(drawn(0, RANK, 3, 4)).square().mean().backward()
        sum(reference(drawn(0, r, 3, 4)).square().mean() / 2 for r in (0, SIZE - 1)).backward()
        same_gradients(model, reference)
        replicas.close()
    else:
        with pytest.raises(UnisonoError, match="not in"):
            replicate(mlp(4, 2), pair)
