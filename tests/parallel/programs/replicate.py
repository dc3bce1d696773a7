"""Everything that `unisono.parallel.replicate` promises, on the ranks of one job, against one process and against DDP.

The reference is the same model on this rank alone with the batches of all ranks: its loss is the mean of their losses.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import unisono
from unisono.errors import RankMismatchError, UnisonoError
from unisono.parallel import Replicas, replicate

warnings.simplefilter("error")
unisono.init(sys.argv[1])
RANK, SIZE = unisono.rank(), unisono.world_size()
SMALL = {"bucket_mb": 1e-4, "first_bucket_mb": 1e-4}
"""About a parameter to a bucket, so that the order of buckets matters."""


def drawn(step: int, rank: int, *shape: int) -> Tensor:
    """The batch of a rank in a step; every rank can draw all of them."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def mlp(*widths: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def whole(loss: Callable[[int], Tensor]) -> Tensor:
    return torch.stack([loss(rank) for rank in range(SIZE)]).mean()


def same_gradients(model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), (name, p.grad, q.grad)
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def alike(*tensors: Tensor) -> None:
    for tensor in tensors:
        found = [torch.empty_like(tensor.detach()) for _ in range(SIZE)]
        dist.all_gather(found, tensor.detach().contiguous())
        assert all(torch.equal(found[0], other) for other in found)


def state(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


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
        for step in range(4):
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


class Branches(nn.Module):
    """Uses what a number says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, which: int) -> Tensor:
        x = self.first(x)
        for i, branch in enumerate(self.branches):
            if which >> i & 1:
                x = torch.tanh(branch(x))
        return self.last(x)


def unused_parameters() -> None:
    for options in (SMALL, {}):
        model = Branches()
        reference = copy.deepcopy(model)
        replicas = replicate(model, **options)
        for step in range(40):
            # All ranks alike, then one or the other, then none for long enough to be forgotten, then again.
            which = [(step + 3 * r * (step % 3)) % 8 if not 12 < step < 30 else 1 for r in range(SIZE)]
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


def several_models() -> None:
    nets = {"generator": nn.Sequential(mlp(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)), "judge": nn.Sequential(
        mlp(8, 16, seed=1), nn.BatchNorm1d(16), nn.Linear(16, 1))}  # fmt: skip
    separate = copy.deepcopy(nets)
    together = replicate(nets, **SMALL)
    apart = [replicate(net, buffers="mean") for net in separate.values()]
    for generator, judge in (nets.values(), separate.values()):
        optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (generator, judge)]
        for step in range(4):
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
        for step in range(3):
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
    for counts in ([2 + 3 * r for r in range(SIZE)], [4 - r for r in range(SIZE)], [0, *[2] * (SIZE - 1)], [1] * SIZE):
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
    def train(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for step in range(8):
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
        model = mlp(8, 64, 32, 3)
        wrapped = DistributedDataParallel(copy.deepcopy(model))
        if not name.startswith("bf16"):  # DDP refuses those without NCCL, which they do not need
            wrapped.register_comm_hook(powers(None)[0] if name == "PowerSGD" else state_, hook)
        replicas = replicate(model, comm_hook=hook if state_ is None else (state_, hook))
        for p, q in zip(train(model), train(wrapped), strict=True):
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
        (lambda s, b: 3, "comm_hook gave a int"),
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


def compiled() -> None:
    model = mlp(4, 8, 2)
    reference = copy.deepcopy(model)
    replicas = replicate(model, **SMALL)
    fast = torch.compile(model, backend="aot_eager")
    for step in range(3):
        for m in (model, reference):
            m.zero_grad()
        fast(drawn(step, RANK, 3, 4)).square().mean().backward()
        whole(lambda r, s=step, m=reference: m(drawn(s, r, 3, 4)).square().mean()).backward()
        same_gradients(model, reference)
    replicas.close()


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


def late_ranks() -> None:
    model = mlp(4, 8, 2)
    replicas = replicate(model, timeout=1.5)
    if RANK == 0:
        with pytest.raises(
            RuntimeError, match=r"(?s)bucket 1 of 1 with .* '0.weight' did not come .* \d ranks.*join\(\)"
        ):
            model(drawn(0, RANK, 3, 4)).sum().backward()
        with pytest.raises(UnisonoError, match="an earlier backward pass failed on this rank"):
            model(drawn(0, RANK, 3, 4)).sum().backward()
    dist.barrier()
    replicas.close()


for check in (like_one_process, bits_of_ddp, unused_parameters, accumulation, kept_gradients_keep_their_values,
              checkpointing, several_models, frozen_and_changed, types_and_layouts, sparse_gradients, buffers,
              uneven_batches, hooks, compiled, penalties_on_gradients, groups, failures, wrong_models,
              late_ranks):  # fmt: skip
    if len(sys.argv) > 2 and check.__name__ not in sys.argv[2:]:
        continue
    check()
    print(check.__name__, flush=True)
