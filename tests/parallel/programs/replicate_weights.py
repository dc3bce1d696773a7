"""With the loader, gradients are those of the mean over the global batch: equal to one process that has all of it."""

from __future__ import annotations

import copy
import gc
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from replicate_common import RANK, SIZE, SMALL, alike, mlp, same_gradients
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import unisono
from unisono.data import RankLoader, loader
from unisono.errors import PeerError, RankMismatchError
from unisono.parallel import replicate

EXACT = {"rtol": 0.0, "atol": 1e-12}
DATA = torch.randn(200, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


class Mixed(nn.Module):
    """Has a large parameter, small ones, sparse rows, branches, and a layer that a nested backward reaches first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.rows = nn.Embedding(8, 6, sparse=True)
        self.large, self.last = nn.Linear(6, 11000), nn.Linear(11000, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.double()

    def forward(self, x: Tensor, which: int = 3, again: bool = False) -> Tensor:
        x = torch.tanh(x + self.rows(x[:, 0].mul(4).long() % 8))
        for i, branch in enumerate(self.branches):
            if which >> i & 1:
                x = torch.tanh(branch(x))
        x = self.last(torch.tanh(self.large(x))) / 10
        if again:
            x = x + checkpoint(self.branches[0], x, use_reentrant=True)
        return x.square().mean()


def uneven(count: int = 20) -> RankLoader:
    """A loader of batches whose size no number of ranks divides: 7 samples each, and fewer at the end."""
    return loader(list(DATA[:count]), batch_size=7)


def shares(batches: RankLoader) -> list[tuple[Tensor, float]]:
    """The batch of each rank, and its weight."""
    return [(DATA[indices], weight) for indices, weight in unisono.comm.all_gather((batches.indices, batches.weight))]


def whole_batch(batches: RankLoader) -> Tensor:
    return torch.cat([x for x, weight in shares(batches) if weight])


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.to_dense().clone() for name, p in model.named_parameters() if p.grad is not None}


def same(model: nn.Module, reference: nn.Module) -> None:
    ours, theirs = gradients(model), gradients(reference)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, msg=lambda m, n=name: f"{n}: {m}", **EXACT)
    alike(torch.cat([gradient.flatten() for gradient in ours.values()]))


def weighted_by_the_loader() -> None:
    seen = set()
    for options in (SMALL, {}, {"overlap": False}, {"comm_hook": allreduce_hook}):
        model, batches = Mixed(), uneven(13)
        reference, by_hand = copy.deepcopy(model), copy.deepcopy(model)
        handles = [replicate(model, loader=batches, **options), replicate(by_hand, **options)]
        optimizers = [torch.optim.SGD(m.parameters(), 0.5) for m in (model, reference, by_hand)]
        for x in batches:
            seen.add(batches.weight)
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(x).backward()
            (by_hand(x) * batches.weight).backward()
            reference(whole_batch(batches)).backward()
            same(model, reference)
            same(by_hand, reference)
            for optimizer in optimizers:
                optimizer.step()
        handles[0].check()
        for handle in handles:
            handle.close()
        model.zero_grad()
        model(x).backward()  # nobody weighs any more
        torch.testing.assert_close(model.last.bias.grad, torch.autograd.grad(model(x), model.last.bias)[0])
    assert len(seen) > 1
    several()


def several() -> None:
    """Two networks with one loader, in float32: as with the loss multiplied."""
    batches = uneven()
    nets = [mlp(6, 16, 6), mlp(6, 8, 1, seed=1)]
    others = copy.deepcopy(nets)
    handles = [replicate(nets, loader=batches, **SMALL), replicate(others, **SMALL)]
    for x in batches:
        for (make, judge), weight in ((nets, 1.0), (others, batches.weight)):
            for net in (make, judge):
                net.zero_grad()
            fake = make(x.float())
            (judge(fake.detach()).square().mean() * weight).backward()
            (judge(fake).mean() * weight).backward()
        for net, other in zip(nets, others, strict=True):
            same_gradients(net, other, rtol=1e-5, atol=1e-6)
    for handle in handles:
        handle.close()


def borrowed_samples_count_as_nothing() -> None:
    batches = loader(list(DATA[: SIZE - 1]), batch_size=SIZE)
    for options in (SMALL, {"comm_hook": allreduce_hook}):
        model = Mixed()
        reference = copy.deepcopy(model)
        replicas = replicate(model, loader=batches, **options)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "rank . has no sample of the last batch")
            steps = iter(batches)
            x = next(steps)
        factor = 1.0 if batches.weight else float("nan")
        reference(whole_batch(batches)).backward()
        for kept in (nullcontext, replicas.no_sync):
            model.zero_grad()
            with kept():
                (model(x) * factor).backward()
            replicas.synchronize()
            same(model, reference)
        model.zero_grad()
        (model(x, again=True) * factor).backward()  # a parameter gets two gradients
        assert all(g.isfinite().all() for g in gradients(model).values())
        replicas.close()


def weights_of_kept_gradients() -> None:
    model, batches = Mixed(), uneven(40)
    reference = copy.deepcopy(model)
    replicas = replicate(model, loader=batches, **SMALL)
    steps = forever(batches)
    both = list(zip(model.parameters(), reference.parameters(), strict=True))

    def clear() -> None:
        model.zero_grad()
        reference.zero_grad()

    for _ in range(2):
        # A batch in parts, or in two passes over one graph, of which the first is kept or not.
        for kept in (replicas.no_sync, nullcontext):
            clear()
            x = next(steps)
            loss, half = model(x), len(x) // 2
            with kept():
                (model(x[:half]) * half / len(x)).backward()
                (model(x[half:]) * (len(x) - half) / len(x)).backward()
            with kept():
                (loss * 0.25).backward(retain_graph=True)
            (loss * 0.75).backward()
            (reference(whole_batch(batches)) * 2).backward()
            same(model, reference)
        # Several batches, each with weights of its own; what p.grad holds already is the mean of the last two passes.
        for i in range(4):
            with replicas.no_sync() if i < 3 else nullcontext():
                model(next(steps)).backward()
            reference(whole_batch(batches)).backward()
        same(model, reference)
        # The same without a last pass.
        clear()
        for _ in range(3):
            with replicas.no_sync():
                model(next(steps)).backward()
            reference(whole_batch(batches)).backward()
        replicas.synchronize()
        same(model, reference)
        replicas.synchronize()  # once more: what is there is a mean already
        same(model, reference)
        clear()
        # torch.autograd.grad gives this rank's gradients, whatever is in p.grad, and leaves that as it is.
        x = next(steps)
        before = gradients(model)
        own = torch.autograd.grad(model(x), [p for p, _ in both[1:]])
        for p, g, expected in zip(
            list(model.parameters())[1:], own, torch.autograd.grad(reference(x), [q for _, q in both[1:]]), strict=True
        ):
            torch.testing.assert_close(g, expected, **EXACT)
            p.grad = g
        assert not before
        replicas.synchronize()
        for (_, q), g in zip(
            both[1:],
            torch.autograd.grad(reference(whole_batch(batches)), [q for _, q in both[1:]]),
            strict=True,
        ):
            q.grad = g
        same(model, reference)
        before = gradients(model)
        x = next(steps)
        for g, expected in zip(
            torch.autograd.grad(model(x), [p for p, _ in both]),
            torch.autograd.grad(reference(x), [q for _, q in both]),
            strict=True,
        ):
            torch.testing.assert_close(g.to_dense(), expected.to_dense(), **EXACT)
        assert all(torch.equal(g, before[name]) for name, g in gradients(model).items())
        # Kept gradients that are thrown away leave no weight behind.
        with replicas.no_sync():
            model(next(steps)).backward()
    replicas.close()
    nested_backwards(forever(batches), batches)
    anything(batches)


def forever(batches: RankLoader) -> Iterator[Tensor]:
    while True:
        yield from batches


def nested_backwards(steps: Iterator[Tensor], batches: RankLoader) -> None:
    """A parameter that gets two gradients in one backward, the second after its bucket was sent."""
    model = Mixed()
    replicas = replicate(model, loader=batches, **SMALL)
    for _ in range(2):
        x = next(steps)
        model.zero_grad()
        model(x, again=True).backward()
        expected: dict[str, Tensor] = {}
        for theirs, weight in shares(batches):
            reference = copy.deepcopy(model)
            reference.zero_grad()
            (reference(theirs, again=True) * weight / SIZE).backward()
            for name, gradient in gradients(reference).items():
                expected[name] = expected.get(name, 0) + gradient
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, expected[name], **EXACT)
    replicas.close()


def anything(batches: RankLoader) -> None:
    """Random passes: kept or not, over the same batch or another, with branches that differ between ranks."""
    chance, steps = random.Random(5), forever(batches)
    torch.manual_seed(1)
    model = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)).double()
    replicas = replicate(model, loader=batches, **SMALL)

    def loss(m: nn.Module, x: Tensor, path: list[int]) -> Tensor:
        for i in path:
            x = torch.tanh(m[i](x))
        return x.square().mean()

    total: dict[str, Tensor] = {}
    x, everyone = next(steps), shares(batches)
    for _ in range(16):
        if chance.random() < 0.2:
            model.zero_grad(set_to_none=chance.random() < 0.7)
            total = {name: torch.zeros_like(g) for name, g in gradients(model).items()}
        if chance.random() < 0.7:
            x, everyone = next(steps), shares(batches)
        kept = chance.random() < 0.5
        paths = [[i for i in range(4) if i == 0 or chance.random() < 0.6] for _ in range(SIZE)]
        with replicas.no_sync() if kept else nullcontext():
            loss(model, x, paths[RANK]).backward()
        for (theirs, weight), path in zip(everyone, paths, strict=True):
            reference = copy.deepcopy(model)
            reference.zero_grad()
            (loss(reference, theirs, path) * weight / SIZE).backward()
            for name, gradient in gradients(reference).items():
                total[name] = total.get(name, 0) + gradient
        if not kept:
            found = gradients(model)
            assert found.keys() >= total.keys()  # and zeros, for kept gradients that were thrown away
            for name, gradient in found.items():
                expected = total.get(name, torch.zeros_like(gradient))
                torch.testing.assert_close(gradient, expected, **EXACT)
    replicas.close()


def loaders_that_do_not_fit() -> None:
    model, batches = mlp(6, 4), uneven()

    def refused(error: type[Exception], message: str, make: Callable[[], object], rank: int | None = None) -> None:
        """An error on all ranks, or on one, of which the others are told."""
        if rank is not None and rank != RANK:
            error, message = PeerError, rf"rank {rank}, with {error.__name__}"
        with pytest.raises(error, match=message):
            make()

    refused(
        ValueError,
        rf"rank 0 of 1, and here replicate trains rank {RANK} of {SIZE}",
        lambda: replicate(model, loader=loader(list(DATA), 7, rank=0, world_size=1)),
    )
    refused(
        TypeError, "loader is a DataLoader, which has no weights", lambda: replicate(model, loader=DataLoader(DATA))
    )
    refused(ValueError, "average=False and a loader", lambda: replicate(model, loader=batches, average=False))
    refused(
        TypeError, "is a generator", lambda: replicate(model, loader=iter(batches) if RANK == 1 else batches), rank=1
    )
    other = loader(list(DATA), 8 + RANK, rank=RANK, world_size=SIZE)  # ranks compare nothing here
    refused(RankMismatchError, r"'batch_size': 9.*on rank 1", lambda: replicate(model, loader=other))
    refused(RankMismatchError, "loader=None on rank 1", lambda: replicate(model, loader=None if RANK == 1 else batches))


def weights_and_the_life_of_a_model() -> None:
    model, batches = mlp(6, 4).double(), uneven()
    replicas = replicate(model, loader=batches)
    with pytest.raises(ValueError, match=r"join\(\) is for ranks with unequal"), replicas.join():
        raise AssertionError
    for x in batches:
        model.zero_grad()
        model(x).square().mean().backward()
    freed = weakref.ref(model[0].weight)
    del model, replicas  # dropped without close()
    gc.collect()
    assert freed() is None


def compiled() -> None:
    model, batches = mlp(6, 8, 2).double(), uneven(14)
    reference = copy.deepcopy(model)
    fast = torch.compile(model, backend="aot_eager", dynamic=True)
    for options in ({"loader": batches}, SMALL):
        replicas = replicate(model, **options)
        for x in batches:
            for m in (model, reference):
                m.zero_grad()
            fast(x).square().mean().backward()
            if options is SMALL:
                torch.stack([reference(theirs).square().mean() for theirs, _ in shares(batches)]).mean().backward()
            else:
                reference(whole_batch(batches)).square().mean().backward()
            same(model, reference)
        replicas.close()
    freed = weakref.ref(model[0].weight)
    del model, replicas, fast
    gc.collect()
    assert freed() is None
