"""How a dataset is dealt out and read: exactly once, the same in worker processes, and quickly found out when wrong."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from unisono.data.map_loader import MapLoader, TrainerLoaderSettings
from unisono.data.stream_loader import StreamLoader
from unisono.errors import DataError
from unisono.plan import rank_block


def settings(*, rank=0, world_size=1, **options):
    defaults = {"batch_size": 8, "virtual_ranks": 4, "seed": 0, "shuffle": True}
    virtual_ranks = options.get("virtual_ranks", defaults["virtual_ranks"])
    block = rank_block(rank, world_size=world_size, virtual_ranks=virtual_ranks)
    return TrainerLoaderSettings(**{**defaults, "block": block, **options})


def dealt(loader, epoch=0, first_step=0):
    """(step, virtual rank) → indices and items of its micro-batches."""
    return {
        (batch.step, share.virtual_rank): [(list(m.indices), m.items) for m in share.micro_batches]
        for batch in loader.batches(epoch=epoch, first_step=first_step)
        for share in batch.shares
    }


class Squares(Dataset):
    def __init__(self, n=37):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return torch.tensor(index**2)


class Noisy(Squares):
    def __getitem__(self, index):
        return torch.rand(()).double() + random.random() + index


class Counting(IterableDataset):
    def __init__(self, n=37):
        self.n, self.epochs = n, []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        return (torch.tensor(float(i)) + torch.rand(()) for i in range(self.n))


@pytest.mark.parametrize("n", [1, 7, 8, 37, 20_000])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_together_have_what_one_rank_has(n, world_size):
    batch_size = 8 if n < 1000 else 1000
    data = TensorDataset(torch.arange(n) ** 2)
    alone = dealt(MapLoader(data, settings(batch_size=batch_size)))
    together = {}
    for rank in range(world_size):
        part = dealt(MapLoader(data, settings(rank=rank, world_size=world_size, batch_size=batch_size)))
        assert not together.keys() & part.keys()
        together |= part
    assert together.keys() == alone.keys()
    assert all([i for i, _ in together[key]] == [i for i, _ in alone[key]] for key in alone)
    seen = [index for parts in alone.values() for indices, _ in parts for index in indices]
    assert sorted(seen) == list(range(n))
    for parts in alone.values():
        for indices, (items,) in parts:
            assert items.tolist() == [i**2 for i in indices]


def test_from_a_step_on_is_the_rest_of_the_whole():
    loader = MapLoader(Squares(), settings())
    whole, rest = dealt(loader, epoch=3), dealt(loader, epoch=3, first_step=2)
    assert rest.keys() == {key for key in whole if key[0] >= 2}
    assert all([i for i, _ in rest[key]] == [i for i, _ in whole[key]] for key in rest)


def test_micro_batches_cut_a_share_in_order():
    whole = dealt(MapLoader(Squares(), settings(batch_size=20)))
    cut = dealt(MapLoader(Squares(), settings(batch_size=20, micro_batch_size=2)))
    for key, parts in cut.items():
        assert all(1 <= len(indices) <= 2 for indices, _ in parts)
        assert [i for indices, _ in parts for i in indices] == whole[key][0][0]


def test_drop_last_leaves_out_the_last_smaller_batch_only():
    loader = MapLoader(Squares(37), settings(drop_last=True))
    assert (loader.steps, loader.num_samples) == (4, 32)
    assert len({i for parts in dealt(loader).values() for indices, _ in parts for i in indices}) == 32


def test_drop_last_leaves_out_other_samples_in_every_epoch():
    loader = MapLoader(Squares(37), settings(drop_last=True))
    seen = [{i for parts in dealt(loader, e).values() for indices, _ in parts for i in indices} for e in range(8)]
    assert all(len(epoch) == 32 for epoch in seen)
    assert set.union(*seen) == set(range(37))


def test_a_tensor_dataset_and_its_subsets_are_read_as_a_whole_with_the_same_result():
    data = TensorDataset(torch.arange(50), torch.arange(50.0).view(50, 1))
    subset = Subset(Subset(data, range(10, 50)), list(range(39, -1, -1)))

    class Plain(Dataset):  # the same samples, one by one
        def __len__(self):
            return len(subset)

        def __getitem__(self, index):
            return subset[index]

    fast, slow = dealt(MapLoader(subset, settings())), dealt(MapLoader(Plain(), settings()))
    assert fast.keys() == slow.keys()
    for key in fast:
        for (fast_indices, fast_items), (slow_indices, slow_items) in zip(fast[key], slow[key], strict=True):
            assert fast_indices == slow_indices
            assert type(fast_items) is type(slow_items)
            assert all(torch.equal(a, b) for a, b in zip(fast_items, slow_items, strict=True))


def test_random_numbers_belong_to_seed_epoch_and_sample():
    def values(**options):
        loader = MapLoader(Noisy(), settings(**{k: v for k, v in options.items() if k != "epoch"}))
        return {
            i: x.item()
            for parts in dealt(loader, epoch=options.get("epoch", 0)).values()
            for indices, items in parts
            for i, x in zip(indices, items, strict=True)
        }

    reference = values()
    assert values(batch_size=20, virtual_ranks=3) == reference  # whatever the batches
    assert values(shuffle=False) == reference
    assert all(values(epoch=1)[i] != reference[i] for i in reference)
    assert all(values(seed=1)[i] != reference[i] for i in reference)
    assert all(values(stream="evaluate")[i] != reference[i] for i in reference)


def test_getitems_is_asked_for_whole_micro_batches():
    class Batched(Squares):
        def __getitems__(self, indices):
            return [torch.tensor(-i) for i in indices]

    for parts in dealt(MapLoader(Batched(), settings())).values():
        for indices, items in parts:
            assert items.tolist() == [-i for i in indices]


WORKERS = """
import sys; sys.path.insert(0, {folder!r})
from test_map_loader import *
if __name__ == "__main__":
    def printed(dataset, kind, workers, **options):
        loader = kind(dataset, settings(workers=workers, **options))
        for epoch in (0, 1, 1):  # workers stay over epochs, and an epoch may be left early
            next(loader.batches(epoch=5))
            print([(key, [(i, x.tolist()) for i, x in parts]) for key, parts in dealt(loader, epoch=epoch).items()])
    for workers in map(int, sys.argv[1:]):
        printed(Noisy(), MapLoader, workers)
        printed(Noisy(), MapLoader, workers, micro_batch_size=1, rank=1, world_size=3)
        printed(Counting(), StreamLoader, workers, shuffle=False)
"""


def test_worker_processes_change_nothing(fork_python, tmp_path):
    script = tmp_path / "workers.py"
    script.write_text(WORKERS.format(folder=str(Path(__file__).parent)))
    lines = fork_python(script, 0, 1, 3)
    assert len(lines) == 3 * 9
    assert lines[:9] == lines[9:18] == lines[18:]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 8, 37])
def test_a_stream_is_dealt_like_an_unshuffled_dataset(n, world_size):
    for rank in range(world_size):
        place = {"rank": rank, "world_size": world_size, "shuffle": False}
        stream = dealt(StreamLoader(Counting(n), settings(**place)))
        mapped = dealt(MapLoader(Squares(n), settings(**place)))
        assert {k: [i for i, _ in v] for k, v in stream.items()} == {k: [i for i, _ in v] for k, v in mapped.items()}
        for parts in stream.values():
            for positions, items in parts:
                assert [int(x) for x in items] == positions


def test_a_stream_resumes_at_a_step_and_learns_the_epoch():
    dataset = Counting()
    loader = StreamLoader(dataset, settings(shuffle=False))
    whole, rest = dealt(loader, epoch=4), dealt(loader, epoch=4, first_step=3)
    assert dataset.epochs == [4, 4]
    assert rest.keys() == {key for key in whole if key[0] >= 3}
    assert all(torch.equal(rest[key][0][1], whole[key][0][1]) for key in rest)
    assert loader.steps is None
    assert dealt(StreamLoader(Counting(37), settings(shuffle=False, drop_last=True))).keys() == {
        (step, v) for step in range(4) for v in range(4)
    }


class Sized(Counting):
    def __len__(self):
        return self.n


@pytest.mark.parametrize(("n", "drop_last", "steps", "num_samples"), [(37, True, 4, 32), (37, False, 5, 37)])
def test_a_stream_with_a_length_knows_how_many_batches_come(n, drop_last, steps, num_samples):
    loader = StreamLoader(Sized(n), settings(shuffle=False, drop_last=drop_last))
    assert (loader.steps, loader.num_samples) == (steps, num_samples)
    assert len([*loader.batches(epoch=0)]) == steps
    assert [*loader.batches(epoch=0, first_step=steps)] == []


def test_a_stream_without_a_batch_says_why():
    def read(n, *, first_step=0, **options):
        loader = StreamLoader(Counting(n), settings(shuffle=False, **options))
        return [*loader.batches(epoch=0, first_step=first_step)]

    with pytest.raises(DataError, match="yielded nothing in epoch 0"):
        read(0)
    with pytest.raises(DataError, match="has 7 samples, fewer than batch_size=8, and drop_last=True"):
        read(7, drop_last=True)
    with pytest.raises(DataError, match="yielded 16 samples in epoch 0, and the run has already done 3 steps of it"):
        read(16, first_step=3)
    assert read(16, first_step=2) == []
    with pytest.raises(DataError, match="has 7 samples, fewer than batch_size=8, and drop_last=True"):
        StreamLoader(Sized(7), settings(shuffle=False, drop_last=True))


def test_an_error_in_the_dataset_names_its_own_line(tmp_path):
    class Broken(Squares):
        def __getitem__(self, index):
            raise OSError("disk of the user's")

    with pytest.raises(OSError, match="disk of the user's"):
        next(MapLoader(Broken(), settings()).batches(epoch=0))
