import inspect
import itertools
import os

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from unisono.data.sampler import DistributedSampler
from unisono.errors import DataError
from unisono.plan import permute

CASES = [(n, w) for n in (1, 2, 3, 7, 8, 10, 16, 17, 100, 8191, 20_000) for w in (1, 2, 3, 4, 8, 13)]


class Numbers(Dataset):
    """A dataset of any size that costs nothing; sample i is i."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        assert 0 <= index < self.length
        return index


def samplers(num_samples, world_size, **settings):
    return [DistributedSampler(Numbers(num_samples), world_size, rank, **settings) for rank in range(world_size)]


def deal(ranks):
    """All indices in the order of their positions: first the first of each rank, and so on."""
    rounds = itertools.zip_longest(*ranks)
    return [index for turn in rounds for index in turn if index is not None]


# What torch's class does, too.


def test_takes_the_place_of_torchs_class():
    ours = inspect.signature(DistributedSampler.__init__).parameters
    theirs = inspect.signature(TorchDistributedSampler.__init__).parameters
    assert [(p.name, p.default) for p in theirs.values()] == [(p.name, p.default) for p in ours.values()][: len(theirs)]
    sampler = DistributedSampler(Numbers(8), 2, 1)
    assert isinstance(sampler, TorchDistributedSampler)
    assert isinstance(sampler, Sampler)
    assert vars(sampler).keys() >= vars(TorchDistributedSampler(Numbers(8), 2, 1)).keys()


@pytest.mark.parametrize(("num_samples", "world_size"), [(9, 3), (8, 1), (8, 2), (64, 8), (8191 * 3, 3), (20_000, 4)])
def test_deals_as_torchs_class_when_samples_divide(num_samples, world_size):
    for rank, ours in enumerate(samplers(num_samples, world_size, shuffle=False)):
        theirs = TorchDistributedSampler(Numbers(num_samples), world_size, rank, shuffle=False)
        assert list(ours) == list(theirs)
        assert (len(ours), ours.num_samples, ours.total_size) == (len(theirs), theirs.num_samples, theirs.total_size)


def test_deals_as_cards_are_dealt():
    assert [list(s) for s in samplers(9, 3, shuffle=False)] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


@pytest.mark.parametrize(("num_samples", "world_size"), CASES)
def test_pads_as_torchs_class_does_if_asked(num_samples, world_size):
    for rank, ours in enumerate(samplers(num_samples, world_size, shuffle=False, pad=True)):
        theirs = TorchDistributedSampler(Numbers(num_samples), world_size, rank, shuffle=False)
        assert list(ours) == list(theirs)
        assert (len(ours), ours.num_samples, ours.total_size) == (len(theirs), theirs.num_samples, theirs.total_size)


@pytest.mark.parametrize(("num_samples", "world_size"), [(n, w) for n, w in CASES if n >= w])
def test_drops_the_tail_as_torchs_class_does_if_asked(num_samples, world_size):
    for rank, ours in enumerate(samplers(num_samples, world_size, shuffle=False, drop_last=True)):
        theirs = TorchDistributedSampler(Numbers(num_samples), world_size, rank, shuffle=False, drop_last=True)
        assert list(ours) == list(theirs)
        assert (len(ours), ours.num_samples, ours.total_size) == (len(theirs), theirs.num_samples, theirs.total_size)


# What it does better.


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("num_samples", "world_size"), CASES)
def test_every_sample_exactly_once(num_samples, world_size, shuffle):
    ranks = [list(s) for s in samplers(num_samples, world_size, shuffle=shuffle)]
    assert sorted(itertools.chain(*ranks)) == list(range(num_samples))
    lengths = [len(rank) for rank in ranks]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == [len(s) for s in samplers(num_samples, world_size)]


@pytest.mark.parametrize("num_samples", [10, 20_000])
def test_the_order_is_that_of_the_plan_on_any_number_of_ranks(num_samples):
    expected = permute(torch.arange(num_samples), num_samples=num_samples, seed=5, epoch=3).tolist()
    for world_size in (1, 2, 3, 7):
        ranks = samplers(num_samples, world_size, seed=5)
        for sampler in ranks:
            sampler.set_epoch(3)
        assert deal(ranks) == expected


def test_orders_of_epochs_and_seeds_differ_and_repeat():
    orders = {}
    for seed, epoch in itertools.product(range(4), range(4)):
        sampler = DistributedSampler(Numbers(50), 1, 0, seed=seed)
        sampler.set_epoch(epoch)
        orders[seed, epoch] = tuple(sampler)
        assert tuple(sampler) == orders[seed, epoch]
        sampler.set_epoch(epoch)
        assert tuple(sampler) == orders[seed, epoch]
    assert len(set(orders.values())) == 16


def test_a_huge_dataset_costs_nothing_to_start(monkeypatch):
    asked = []

    def counted(positions, **name):
        asked.append(len(positions))
        return permute(positions, **name)

    monkeypatch.setattr("unisono.data.sampler.permute", counted)
    sampler = DistributedSampler(Numbers(10**9), 3, 2)
    assert len(sampler) == 333_333_333
    iterator = iter(sampler)
    assert asked == []
    first = [next(iterator) for _ in range(256)]
    assert len(asked) == 1
    assert asked[0] <= 2**14
    assert len(set(first)) == 256
    assert max(first) > 10**8


def test_two_iterators_at_once_do_not_disturb_each_other():
    sampler = DistributedSampler(Numbers(20), 2, 1)
    pairs = list(zip(sampler, sampler, strict=True))
    assert [left for left, _ in pairs] == [right for _, right in pairs] == list(sampler)


# In a DataLoader.


def flat(batches):
    return [int(index) for batch in batches for index in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader_reads_every_sample_once(workers):
    loaders = [DataLoader(s.dataset, batch_size=4, sampler=s, num_workers=workers) for s in samplers(50, 3)]
    read = [flat(loader) for loader in loaders]
    assert sorted(itertools.chain(*read)) == list(range(50))
    assert read == [list(s) for s in samplers(50, 3)]


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 4},
        {"batch_size": 4, "num_workers": 2},
        {"batch_size": 4, "num_workers": 2, "prefetch_factor": 5, "persistent_workers": True},
    ],
    ids=["no worker", "workers", "workers far ahead"],
)
@pytest.mark.parametrize("trained", [0, 1, 3, 6])
def test_data_loader_resumes_after_the_batch_that_was_trained(settings, trained):
    sampler = DistributedSampler(Numbers(50), 2, 0, seed=9)
    sampler.set_epoch(2)
    expected = list(sampler)
    batches = iter(DataLoader(sampler.dataset, sampler=sampler, **settings))
    done = flat(next(batches) for _ in range(trained))
    state = sampler.state_dict(consumed=trained * 4)
    del batches
    fresh = DistributedSampler(Numbers(50), 2, 0, seed=9)
    fresh.load_state_dict(state)
    assert done + flat(DataLoader(fresh.dataset, sampler=fresh, **settings)) == expected


def test_state_without_help_is_exact_if_nothing_is_read_ahead():
    sampler = DistributedSampler(Numbers(50), 2, 0)
    loader = DataLoader(sampler.dataset, sampler=sampler, batch_size=4)
    for number, _ in enumerate(loader, start=1):
        assert sampler.state_dict() == sampler.state_dict(consumed=number * 4)


@pytest.mark.parametrize("workers", [0, 1])
def test_place_survives_iterators_that_are_never_used(workers):
    # With batch_size=None and workers torch asks for two iterators, and uses the second.
    sampler = DistributedSampler(Numbers(20), 1, 0, shuffle=False)
    sampler.load_state_dict({**sampler.state_dict(), "position": 15})
    iter(sampler)
    loader = DataLoader(sampler.dataset, sampler=sampler, batch_size=None, num_workers=workers)
    assert [int(i) for i in loader] == [15, 16, 17, 18, 19]


# Resuming.


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("num_samples", [17, 50, 9000])
def test_resumes_on_any_number_of_ranks_with_every_sample_once(num_samples, shuffle):
    (whole,) = samplers(num_samples, 1, shuffle=shuffle, seed=4)
    whole.set_epoch(6)
    expected = list(whole)
    for world_sizes in itertools.product((1, 2, 3, 5), repeat=3):
        done, state = [], {**whole.state_dict(), "position": 0}
        for world_size, turns in zip(world_sizes, (2, 1, num_samples), strict=True):
            ranks = samplers(num_samples, world_size, shuffle=shuffle, seed=4)
            for sampler in ranks:
                sampler.load_state_dict(state)
            done += deal([list(itertools.islice(sampler, turns)) for sampler in ranks])
            state = ranks[0].state_dict()
            assert state["position"] == len(done)
        assert done == expected


def test_state_is_a_position_of_the_epoch():
    sampler = DistributedSampler(Numbers(100), 4, 1, seed=3)
    sampler.set_epoch(7)
    iterator = iter(sampler)
    for _ in range(5):
        next(iterator)
    assert sampler.state_dict() == {"epoch": 7, "position": 20, "seed": 3, "num_samples": 100, "shuffle": True}


def test_resumed_epoch_is_left_out_of_the_next():
    sampler = DistributedSampler(Numbers(10), 1, 0, shuffle=False)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 4, "position": 7})
    assert sampler.epoch == 4
    sampler.set_epoch(4)  # as a loop does that starts at the epoch it has loaded
    assert len(sampler) == 10
    assert list(sampler) == [7, 8, 9]
    assert list(sampler) == list(range(10))
    sampler.load_state_dict({**sampler.state_dict(), "position": 7})
    sampler.set_epoch(5)
    assert list(sampler) == list(range(10))


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_an_epoch_that_was_done_has_nothing_left(world_size):
    ranks = samplers(10, world_size)
    for sampler in ranks:
        list(sampler)
    states = [sampler.state_dict(consumed=consumed) for sampler in ranks for consumed in (None, 12)]
    assert states[0] == states[1]
    assert states[0]["position"] == 10
    resumed = DistributedSampler(Numbers(10), 2, 0)
    resumed.load_state_dict(states[0])
    assert list(resumed) == []
    resumed.set_epoch(1)
    assert len(list(resumed)) == 5


def test_a_rank_with_one_sample_less_does_not_run_ahead():
    # Rank 3 of 4 has 2 of 10 samples. With both handed out it cannot know that ranks 0 and 1 have had their third.
    sampler = DistributedSampler(Numbers(10), 4, 3)
    iterator = iter(sampler)
    assert len(list(itertools.islice(iterator, 2))) == 2
    assert sampler.state_dict()["position"] == 8
    assert next(iterator, None) is None
    assert sampler.state_dict()["position"] == 8


@pytest.mark.parametrize("settings", [{"pad": True}, {"drop_last": True}])
@pytest.mark.parametrize("position", [0, 1, 6, 9, 10])
def test_what_is_left_has_equal_lengths_if_asked(settings, position):
    ranks = samplers(10, 4, shuffle=False, **settings)
    for sampler in ranks:
        sampler.load_state_dict({**sampler.state_dict(), "position": position})
    left = [list(sampler) for sampler in ranks]
    assert len({len(indices) for indices in left}) == 1
    dealt, rest = deal(left), list(range(position, 10))
    if "pad" in settings:
        assert dealt[: len(rest)] == rest
        assert len(dealt) - len(rest) < 4
    else:
        assert dealt == rest[: len(rest) // 4 * 4]
    assert all(sampler.state_dict()["position"] == 10 for sampler in ranks)


def test_setting_another_epoch_ends_the_old_iteration():
    sampler = DistributedSampler(Numbers(10), 1, 0, shuffle=False)
    iterator = iter(sampler)
    next(iterator)
    sampler.set_epoch(1)
    next(iterator)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (1, 0)


def test_works_under_a_batch_sampler():
    sampler = DistributedSampler(Numbers(10), 2, 1, shuffle=False)
    assert list(BatchSampler(sampler, 2, drop_last=False)) == [[1, 3], [5, 7], [9]]


# Where the rank comes from.


@pytest.fixture
def environment(monkeypatch):
    for name in [n for n in os.environ if n.startswith(("SLURM_", "OMPI_", "PMI_"))] + ["RANK", "WORLD_SIZE"]:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def placed(sampler):
    return sampler.rank, sampler.num_replicas


def test_one_process_by_itself_has_everything(environment):
    assert placed(DistributedSampler(Numbers(10))) == (0, 1)


def test_rank_comes_from_the_environment(environment):
    environment.setenv("RANK", "2")
    environment.setenv("WORLD_SIZE", "3")
    assert placed(DistributedSampler(Numbers(10))) == (2, 3)
    assert placed(DistributedSampler(Numbers(10), 5, 1)) == (1, 5)
    assert placed(DistributedSampler(Numbers(10), rank=0)) == (0, 3)


def test_torch_distributed_goes_before_the_environment(environment):
    environment.setenv("RANK", "2")
    environment.setenv("WORLD_SIZE", "3")
    environment.setattr("torch.distributed.is_initialized", lambda: True)
    environment.setattr("torch.distributed.get_rank", lambda: 4)
    environment.setattr("torch.distributed.get_world_size", lambda: 6)
    assert placed(DistributedSampler(Numbers(10))) == (4, 6)


# Errors.


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (7, 3)])
def test_bad_rank_is_named(rank, world_size):
    with pytest.raises(ValueError, match=rf"rank={rank} is outside \[0, {world_size}\)"):
        DistributedSampler(Numbers(10), world_size, rank)


@pytest.mark.parametrize("world_size", [0, -3])
def test_bad_number_of_ranks_is_named(world_size):
    with pytest.raises(ValueError, match=f"num_replicas={world_size} must be at least 1"):
        DistributedSampler(Numbers(10), world_size, 0)


def test_empty_dataset_is_refused():
    with pytest.raises(DataError, match=r"the dataset \(Numbers\) is empty"):
        DistributedSampler(Numbers(0), 1, 0)


def test_dataset_without_length_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(TypeError, match="Stream has no __len__"):
        DistributedSampler(Stream(), 1, 0)


def test_dropping_everything_is_refused():
    with pytest.raises(DataError, match="3 samples, fewer than num_replicas=4"):
        DistributedSampler(Numbers(3), 4, 0, drop_last=True)


def test_padding_and_dropping_at_once_is_refused():
    with pytest.raises(ValueError, match="pad=True and drop_last=True"):
        DistributedSampler(Numbers(3), 1, 0, drop_last=True, pad=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_samples": 11}, "a dataset of 11 samples, and this one has 10"),
        ({"seed": 1}, "saved with seed=1, and this sampler has seed=0"),
        ({"shuffle": False}, "saved with shuffle=False, and this sampler has shuffle=True"),
        ({"position": 11}, r"position=11, outside \[0, 10\]"),
        ({"position": -1}, r"position=-1, outside \[0, 10\]"),
    ],
)
def test_state_of_another_order_is_refused(change, message):
    sampler = DistributedSampler(Numbers(10), 1, 0)
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict({**sampler.state_dict(), **change})


def test_seed_does_not_matter_without_shuffling():
    sampler = DistributedSampler(Numbers(10), 1, 0, shuffle=False)
    sampler.load_state_dict({**sampler.state_dict(), "seed": 5, "position": 9})
    assert list(sampler) == [9]


def test_state_of_something_else_is_refused():
    with pytest.raises(ValueError, match="has no position, seed, num_samples, shuffle; it has epoch, yielded"):
        DistributedSampler(Numbers(10), 1, 0).load_state_dict({"epoch": 1, "yielded": 4})


@pytest.mark.parametrize("consumed", [2.0, True, "3"])
def test_consumed_is_a_whole_number(consumed):
    with pytest.raises(TypeError, match=f"consumed={consumed!r} must be a whole number"):
        DistributedSampler(Numbers(100), 2, 1).state_dict(consumed=consumed)


@pytest.mark.parametrize("consumed", [-1, 6])
def test_more_consumed_than_handed_out_is_refused(consumed):
    sampler = DistributedSampler(Numbers(100), 2, 1)
    iterator = iter(sampler)
    for _ in range(5):
        next(iterator)
    with pytest.raises(ValueError, match=rf"consumed={consumed} is outside \[0, 5\]: rank 1"):
        sampler.state_dict(consumed=consumed)
