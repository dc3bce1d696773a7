"""`unisono.data.loader` in a user's loop: every sample once, on every rank as many steps, resumed anywhere."""

from __future__ import annotations

import itertools
import random
import warnings
from pathlib import Path

import numpy
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from unisono.data import DistributedSampler, loader
from unisono.errors import DataError

SIZES = ((8, 9, 11, 16, 17, 37, 64, 66), (4, 5, 8, 16), (1, 2, 3, 4))
CASES = [
    pytest.param(n, b, w, marks=() if (i + j + k) % 4 == 0 else pytest.mark.soak)
    for (i, n), (j, b), (k, w) in itertools.product(*map(enumerate, SIZES))
]
"""Samples, size of a batch, ranks: every two sizes of two kinds together, and all three among the long tests."""


class Counting(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


class Noisy(Dataset):
    def __init__(self, n=37):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return torch.rand(()).double() + random.random() + index


def ranks(dataset, batch_size, world_size, **options):
    return [loader(dataset, batch_size, rank=r, world_size=world_size, **options) for r in range(world_size)]


def epoch(batches):
    """The samples of one iteration, step by step."""
    return [batch.tolist() for batch in batches]


def numbers(n):
    return list(range(n))


# What a rank gets.


@pytest.mark.parametrize(("n", "batch_size", "world_size"), CASES)
def test_every_sample_once_and_on_every_rank_as_many_steps_none_of_them_empty(n, batch_size, world_size):
    loaders = ranks(numbers(n), batch_size, world_size)
    for _ in range(2):
        parts = [epoch(batches) for batches in loaders]
        assert {len(part) for part in parts} == {len(loaders[0])}
        assert all(share for part in parts for share in part)
        assert sorted(i for part in parts for share in part for i in share) == list(range(n))
        for shares in zip(*parts, strict=True):
            sizes = [len(share) for share in shares]
            assert max(sizes) - min(sizes) <= 1
            assert sum(sizes) <= batch_size + world_size


@pytest.mark.parametrize(("n", "batch_size", "world_size"), CASES)
def test_a_stream_is_dealt_like_a_list_in_its_own_order(n, batch_size, world_size):
    def seen(batches):
        return [(b.tolist(), batches.size, batches.weight, batches.indices, batches.state_dict()) for b in batches]

    lists = ranks(numbers(n), batch_size, world_size, shuffle=False)
    streams = ranks(Counting(n), batch_size, world_size)
    for a, b in zip(lists, streams, strict=True):
        there = [(*rest, {**state, "num_samples": None}) for *rest, state in seen(a)]
        assert there == seen(b)


def test_deals_as_cards_are_dealt():
    assert [epoch(b)[0] for b in ranks(numbers(9), 9, 3, shuffle=False)] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_has_the_order_of_the_sampler_of_the_same_seed():
    for rank, batches in enumerate(ranks(numbers(37), 8, 3, seed=5)):
        sampler = DistributedSampler(numbers(37), 3, rank, seed=5)
        for number in range(3):
            sampler.set_epoch(number)
            assert list(itertools.chain(*epoch(batches))) == list(sampler)


def test_a_small_last_batch_is_evened_out_with_the_one_before():
    batches = loader(numbers(66), 32, rank=0, world_size=4)
    assert len(batches) == 3
    assert [batches.size for _ in batches] == [32, 17, 17]


def test_drop_last_leaves_out_the_last_smaller_batch_and_other_samples_each_epoch():
    batches = loader(numbers(37), 8, drop_last=True, rank=0, world_size=1)
    assert len(batches) == 4
    epochs = [set(itertools.chain(*epoch(batches))) for _ in range(8)]
    assert {len(seen) for seen in epochs} == {32}
    assert set.union(*epochs) == set(range(37))


def test_weights_make_the_average_over_ranks_that_of_the_global_batch():
    torch.manual_seed(0)
    x, y = torch.randn(18, 3).double(), torch.randn(18).double()
    data, w = TensorDataset(x, y), torch.zeros(3).double().requires_grad_()
    loaders = ranks(data, 5, 3)
    for parts in zip(*loaders, strict=True):
        losses = [F.mse_loss(x @ w, y) * b.weight for (x, y), b in zip(parts, loaders, strict=True)]
        (average,) = torch.autograd.grad(torch.stack(losses).mean(), w)
        indices = [i for b in loaders for i in b.indices]
        (whole,) = torch.autograd.grad(F.mse_loss(x[indices] @ w, y[indices]), w)
        torch.testing.assert_close(average, whole)
        assert sum(b.weight for b in loaders) == pytest.approx(3)


@pytest.mark.parametrize("dataset", [numbers(2), Counting(2)], ids=["list", "stream"])
def test_a_rank_for_which_there_is_no_sample_borrows_one_with_weight_0(dataset):
    for rank, batches in enumerate(ranks(dataset, 8, 3, shuffle=False)):
        if rank == 2:
            with pytest.warns(
                UserWarning, match="rank 2 has no sample of the last batch of epoch 0, which has 2 for 3"
            ):
                assert epoch(batches) == [[1]]
            assert batches.weight == 0
        else:
            assert epoch(batches) == [[rank]]
            assert batches.weight == 1.5


# Epochs.


def test_each_iteration_is_an_epoch_with_an_order_of_its_own():
    batches = loader(numbers(40), 8, rank=0, world_size=1)
    first, second = epoch(batches), epoch(batches)
    assert first != second
    assert batches.epoch == 2
    batches.set_epoch(0)
    assert epoch(batches) == first
    again = loader(numbers(40), 8, rank=0, world_size=1)
    again.set_epoch(1)
    assert epoch(again) == second
    assert epoch(loader(numbers(40), 8, seed=1, rank=0, world_size=1)) != first


def test_a_look_at_one_batch_takes_no_epoch_but_leaving_early_does():
    batches = loader(numbers(40), 8, rank=0, world_size=1)
    look = next(iter(batches)).tolist()
    first = epoch(itertools.islice(batches, 3))
    assert first[0] == look
    second = epoch(batches)
    assert len(second) == 5
    assert second[0] != look


def test_an_iterator_cannot_go_on_after_a_newer_one_has_begun():
    batches = loader(numbers(40), 8, rank=0, world_size=1)
    old = iter(batches)
    next(old)
    next(iter(batches))
    with pytest.raises(DataError, match="a newer iteration over this loader has begun"):
        next(old)


# Resuming.


@pytest.mark.parametrize("kind", ["list", "stream"])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1), (2, 4)])
def test_resumes_in_mid_epoch_on_any_number_of_ranks(kind, before, after):
    def make(world_size):
        return ranks(numbers(50) if kind == "list" else Counting(50), 8, world_size)

    for stop in range(1, 7):
        loaders = make(before)
        for batches in loaders:
            epoch(batches)
        done = [share for b in loaders for share in epoch(itertools.islice(b, stop))]
        states = [b.state_dict() for b in loaders]
        assert all(state == states[0] for state in states)
        resumed = make(after)
        for batches in resumed:
            batches.load_state_dict(states[0])
            assert batches.epoch == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            left = [epoch(b) for b in resumed]
        assert len({len(part) for part in left}) == 1
        everything = [*itertools.chain(*done), *itertools.chain(*itertools.chain(*left))]
        assert sorted(everything) == list(range(50))
        assert {b.epoch for b in resumed} == {2}
        assert [len(epoch(b)) for b in resumed] == [len(make(after)[0]) if kind == "list" else 7] * after


@pytest.mark.parametrize("seed", range(20))
def test_every_sample_once_however_often_a_run_is_stopped_and_its_ranks_are_changed(seed):
    draw = random.Random(seed)
    n, batch_size = draw.randrange(8, 300), draw.randrange(6, 40)
    state, seen, first_epoch = None, {}, draw.randrange(3)
    while state is None or state["epoch"] < first_epoch + 2:
        loaders = ranks(numbers(n), batch_size, draw.randrange(1, 7), seed=seed)
        for batches in loaders:
            batches.set_epoch(first_epoch) if state is None else batches.load_state_dict(state)
        epoch_here, steps = loaders[0].epoch, draw.randrange(1, 8)
        for batches in loaders:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "rank . has no sample")
                for batch in itertools.islice(batches, steps):
                    if batches.weight:
                        seen.setdefault(epoch_here, []).extend(batch.tolist())
        states = [batches.state_dict() for batches in loaders]
        assert all(s == states[0] for s in states)
        state = states[0]
    for number in (first_epoch, first_epoch + 1):
        assert sorted(seen[number]) == numbers(n)


def test_resumes_with_the_same_batches_on_as_many_ranks():
    whole, stopped = loader(numbers(66), 16, rank=1, world_size=4), loader(numbers(66), 16, rank=1, world_size=4)
    expected = epoch(whole)
    for number, _ in enumerate(stopped, start=1):
        again = loader(numbers(66), 16, rank=1, world_size=4)
        again.load_state_dict(stopped.state_dict())
        if number < len(whole):
            assert epoch(again) == expected[number:]
    assert again.epoch == 1  # the state of the last batch is the start of the next epoch
    assert sorted(itertools.chain(*epoch(again))) != sorted(itertools.chain(*expected))


def test_the_state_is_that_of_the_sampler():
    batches = loader(numbers(40), 8, rank=0, world_size=2)
    head = next(iter(batches)).tolist()
    sampler = DistributedSampler(numbers(40), 2, 0)
    whole = list(sampler)
    sampler.load_state_dict(batches.state_dict())
    assert head + list(sampler) == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_samples": 41}, "a dataset of 41 samples, and this one has 40"),
        ({"seed": 7}, "Make the loader with seed=7"),
        ({"shuffle": False}, "Make the loader with shuffle=False"),
        ({"position": 41}, r"position=41, outside \[0, 40\]"),
    ],
)
def test_a_state_of_another_order_is_refused(change, message):
    batches = loader(numbers(40), 8, rank=0, world_size=1)
    with pytest.raises(ValueError, match=message):
        batches.load_state_dict({**batches.state_dict(), **change})


# Random numbers.


def test_what_the_dataset_draws_belongs_to_the_sample_and_disturbs_no_loop():
    by_sample = {}
    for world_size, batch_size in ((1, 8), (3, 5)):
        torch.manual_seed(3)
        random.seed(3)
        drawn = []
        for batches in ranks(Noisy(), batch_size, world_size):
            for batch in batches:
                drawn.append((torch.rand(()).item(), random.random()))
                for index, value in zip(batches.indices, batch.tolist(), strict=True):
                    assert by_sample.setdefault(index, value) == value
        torch.manual_seed(3)
        random.seed(3)
        assert drawn == [(torch.rand(()).item(), random.random()) for _ in drawn]


WORKERS = """
import sys; sys.path.insert(0, {folder!r})
from test_rank_loader import *
if __name__ == "__main__":
    for workers, dataset in itertools.product((0, 2), (Noisy(), Counting(37))):
        batches = loader(dataset, 8, workers=workers, rank=1, world_size=3)
        next(iter(batches))
        print(list(itertools.islice(batches, 2)))  # workers have read ahead, and are stopped in mid-epoch
        again = loader(dataset, 8, workers=workers, rank=0, world_size=2)
        again.load_state_dict(batches.state_dict())
        for _ in range(2):
            print([(again.epoch, again.size, again.indices, batch.tolist()) for batch in again])
"""


def test_worker_processes_change_nothing(fork_python, tmp_path):
    script = tmp_path / "workers.py"
    script.write_text(WORKERS.format(folder=str(Path(__file__).parent)))
    lines = fork_python(script)
    assert len(lines) == 2 * 6
    assert lines[:6] == lines[6:]


# Mistakes.


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="batch_size=3 is smaller than the number of ranks, 4"):
        loader(numbers(40), 3, rank=0, world_size=4)
    with pytest.raises(ValueError, match="workers=-1"):
        loader(numbers(40), 8, workers=-1, rank=0, world_size=1)
    with pytest.raises(ValueError, match=r"rank=2 is outside \[0, 2\) \(as given\)"):
        loader(numbers(40), 8, rank=2, world_size=2)
    with pytest.raises(TypeError, match="a DataLoader is no map-style dataset"):
        loader(DataLoader(numbers(40)), 8, rank=0, world_size=1)
    with pytest.raises(DataError, match=r"the dataset \(list\) is empty"):
        loader([], 8, rank=0, world_size=1)
    with pytest.raises(DataError, match="7 samples, fewer than batch_size=8, and drop_last=True"):
        loader(numbers(7), 8, drop_last=True, rank=0, world_size=1)
    with pytest.raises(DataError, match="7 samples, fewer than batch_size=8, and drop_last=True"):
        next(iter(loader(Counting(7), 8, drop_last=True, rank=0, world_size=1)))
    with pytest.raises(ValueError, match="shuffle=True cannot be done for Counting"):
        loader(Counting(40), 8, shuffle=True, rank=0, world_size=1)
    with pytest.raises(DataError, match="yielded nothing in epoch 0"):
        next(iter(loader(Counting(0), 8, rank=0, world_size=1)))
    for name, wrong in [("batch_size", 4.0), ("batch_size", True), ("seed", "a"), ("workers", 1.5), ("rank", "1")]:
        with pytest.raises(TypeError, match=rf"{name}={wrong!r} must be a whole number"):
            loader(numbers(40), **{"batch_size": 8, "rank": 0, "world_size": 2, name: wrong})
    batches = loader(numbers(40), numpy.int64(8), seed=numpy.int32(3), rank=0, world_size=1)
    with pytest.raises(TypeError, match=r"epoch=1\.5 must be a whole number"):
        batches.set_epoch(1.5)
    with pytest.raises(TypeError, match="position='x' must be a whole number"):
        batches.load_state_dict({**batches.state_dict(), "position": "x"})
    with pytest.raises(TypeError, match="has no __len__, so the steps"):
        len(loader(Counting(40), 8, rank=0, world_size=1))


# Ranks that have met.

JOB = """
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from unisono.data import loader
from unisono.errors import DataError, GroupError, PeerError, RankMismatchError

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x, y = torch.randn(66, 4), torch.randn(66, 1)
data = TensorDataset(x, y)
try:
    loader(data, 16 + rank)
except RankMismatchError as error:
    print(error)
for wrong in ([], None):  # one rank's alone: the others hear of it, and the group works afterwards
    try:
        loader(wrong if rank == 1 else data, 16)
    except (DataError, TypeError, PeerError) as error:
        print(f"{type(error).__name__}: {error}")
pair = dist.new_group([0, 2])
if rank != 1:
    batches = loader(data, 66, group=pair, shuffle=False)
    next(iter(batches))
    print(batches.indices[:3], len(batches.indices))
else:
    try:
        loader(data, 66, group=pair)
    except GroupError as error:
        print(error)

model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = loader(data, 16)
steps = 0
for epoch in range(2):
    for a, b in batches:  # 16, 16, 16, 16, 2 of 66: DDP would hang if a rank had no batch
        loss = F.mse_loss(model(a), b) * batches.weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
torch.manual_seed(0)
torch.randn(66, 4), torch.randn(66, 1)
alone = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
whole = [loader(data, 16, rank=r, world_size=3) for r in range(3)]
for epoch in range(2):
    for parts in zip(*whole):
        a, b = (torch.cat(tensors) for tensors in zip(*parts))
        loss = F.mse_loss(alone(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
for theirs, ours in zip(model.module.parameters(), alone.parameters()):
    torch.testing.assert_close(theirs, ours)
print(steps, "steps as on one rank")
dist.destroy_process_group()
"""


def test_under_ddp_training_is_that_of_one_rank_also_in_the_tail(fork_ranks):
    job = fork_ranks(3, JOB)
    for rank in range(3):
        lines = job.lines(rank)
        assert "the dataset's batch_size differs between ranks: 16 on rank 0, 17 on rank 1, 18 on rank 2" in lines[0]
        assert lines[-1] == "10 steps as on one rank"
        wrong = [("DataError", "the dataset (list) is empty"), ("TypeError", "a NoneType is no map-style dataset")]
        for line, (kind, said) in zip(lines[1:3], wrong, strict=True):
            failed = f"PeerError: unisono.data.loader was not done, for it failed on rank 1, with {kind}"
            assert line.startswith(f"{kind if rank == 1 else failed}: {said}")
    assert job.lines(0)[3] == "[0, 2, 4] 33"
    assert "this rank is not in the group" in job.lines(1)[3]
    assert job.lines(2)[3] == "[1, 3, 5] 33"
