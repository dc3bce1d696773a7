"""Orders of samplers: the same bits on any number of ranks and after a resume, and nothing else than what is meant."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import unisono
from refusals import check_refused, each_case
from unisono.errors import DataError

PROGRAM = Path(__file__).parent / "programs" / "sampled.py"
DATA = TensorDataset(torch.arange(20.0).view(20, 1))


@pytest.fixture(scope="module")
def on_one_rank(fork_python) -> list[str]:
    found = fork_python(PROGRAM, "none", "auto", 0)
    assert len(found) == 9
    return found


@pytest.mark.parametrize(
    ("n", "engine"),
    [(3, "collective"), *(pytest.param(*each, marks=pytest.mark.soak) for each in [(2, "shared"), (4, "auto")])],
)
def test_the_number_of_ranks_changes_no_bit(fork_ranks, on_one_rank, n, engine):
    assert fork_ranks(n, PROGRAM, "none", engine, 0).lines() == on_one_rank


@pytest.mark.parametrize(
    "names",
    [["generator", "random", "lazy", "lengths"], pytest.param([], marks=pytest.mark.soak)],
    ids=["some", "all"],
)
def test_a_resume_in_mid_epoch_goes_on_in_the_same_order(fork_ranks, fork_python, tmp_path, on_one_rank, names):
    """Of orders that the epoch, a generator of their own or that of the loop decides, and with data workers."""
    fork_ranks(3, PROGRAM, tmp_path, "auto", 3, *names)
    fork_python(PROGRAM, tmp_path, "auto", 6, *names)
    expected = [line for line in on_one_rank if not names or line.partition(" = ")[0] in names]
    assert fork_ranks(2, PROGRAM, tmp_path, "collective", 0, *names).lines() == expected


def make_trainer(**options):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return unisono.Trainer(model, optimizer, virtual_ranks=2, progress=False, **options)


def loss(model, batch):
    return model(batch[0]).squeeze(1)


def indices_of(batches):
    """The samples of each global batch, in the order of the sampler, for one rank with two virtual ranks."""
    found = []
    for batch in batches:
        own = [[i for m in share.micro_batches for i in m.indices] for share in batch.shares]
        found.append([own[p % 2][p // 2] for p in range(batch.size)])
    return found


def test_batches_are_cut_from_a_sampler_as_dataloader_cuts_them():
    trainer = make_trainer()
    assert indices_of(trainer.batches(DATA, batch_size=4, sampler=range(19, 9, -1))) == [
        [19, 18, 17, 16],
        [15, 14, 13, 12],
        [11, 10],
    ]
    assert indices_of(trainer.batches(DATA, batch_size=4, sampler=[5] * 6, drop_last=True)) == [[5] * 4]
    lists = [[3], [1, 2, 3], list(range(20))]
    assert indices_of(trainer.batches(DATA, batch_sampler=lists)) == lists


def test_each_epoch_has_an_order_of_its_own_which_follows_from_the_seed():
    def orders(**options):
        trainer = make_trainer(**options)
        return [indices_of(trainer.batches(DATA, batch_size=5, sampler=SubsetRandomSampler(range(20)))) for _ in "ab"]

    torch.manual_seed(5)
    first, second = orders()
    torch.manual_seed(6)
    assert orders() == [first, second]
    assert first != second
    assert all(sorted(i for batch in order for i in batch) == list(range(20)) for order in (first, second))
    assert orders(seed=1)[0] != first


def test_what_a_sampler_draws_changes_nothing_of_the_loop():
    trainer = make_trainer()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    trainer.batches(DATA, batch_size=5, sampler=RandomSampler(DATA))
    assert torch.equal(torch.rand(2), expected)


def test_each_occurrence_of_a_sample_has_random_numbers_of_its_own():
    class Noise(torch.utils.data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return torch.rand(())

    trainer = make_trainer()
    values = [
        x for batch in trainer.batches(Noise(), batch_size=4, sampler=[1] * 8) for m in batch.micro_batches for x in m
    ]
    assert len({value.item() for value in values}) == 8


def test_the_number_of_batches_that_are_left_is_known():
    trainer = make_trainer()
    for _ in trainer.epochs(2, max_steps=7):
        batches = trainer.batches(DATA, batch_size=4)
        lengths = [len(batches)]
        for batch in batches:
            trainer.step(loss, batch)
            lengths.append(len(batches))
        assert lengths == ([5, 4, 3, 2, 1, 0] if trainer.steps_done == 5 else [2, 1, 0])

    class Unknown(IterableDataset):
        def __iter__(self):
            yield from DATA

    batches = make_trainer().batches(Unknown(), batch_size=4)
    with pytest.raises(TypeError, match="has no __len__, so the steps of an epoch are not known"):
        len(batches)
    assert len(list(batches)) == 5


def test_fit_takes_samplers():
    trainer = make_trainer()
    trainer.fit(loss, DATA, epochs=2, batch_sampler=[[1, 2], [3]], validation=DATA)
    trainer.fit(loss, DATA, epochs=3, batch_size=2, sampler=[1, 2, 3])
    assert trainer.steps_done == 6


def test_an_epoch_does_not_go_on_in_another_order(tmp_path):
    def begun(weights, steps):
        trainer = make_trainer(directory=tmp_path)
        sampler = WeightedRandomSampler(weights, 20)
        for _ in trainer.epochs(1, max_steps=steps):
            for batch in trainer.batches(DATA, batch_size=4, sampler=sampler):
                trainer.step(loss, batch)
        return trainer

    begun(torch.ones(20), 2)
    with pytest.raises(ValueError, match=r"before step 2, with order=[0-9a-f]{16}; the epoch cannot go on with"):
        begun(torch.arange(1.0, 21), 4)
    trainer = make_trainer(directory=tmp_path)
    with pytest.raises(ValueError, match=r"cannot go on with order=None, shuffle=True"):
        trainer.batches(DATA, batch_size=4)
    assert begun(torch.ones(20), 5).steps_done == 5


class Endless:
    def __iter__(self):
        while True:
            yield 1


class Failing:
    def __iter__(self):
        yield 1
        raise LookupError("the sampler's own")


def batches(dataset=DATA, **options):
    return make_trainer().batches(dataset, **{"batch_size": 4, **options})


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1)


REFUSED = [
    ({"batch_size": None}, TypeError, "batch_size is missing: the number of samples of a batch over all ranks"),
    ({"sampler": range(4), "shuffle": True}, ValueError, "shuffle=True and a sampler are two orders"),
    ({"sampler": range(4), "batch_sampler": [[1]]}, ValueError, "sampler and batch_sampler are two ways"),
    ({"batch_sampler": [[1]]}, ValueError, "batch_size=4 is for the batch sampler to decide"),
    ({"batch_sampler": [[1]], "batch_size": None, "drop_last": True}, ValueError, "drop_last=True is for the batch"),
    ({"batch_sampler": [[1]], "batch_size": None, "shuffle": True}, ValueError, "shuffle=True is for the batch"),
    ({"sampler": [1, 20, 2]}, DataError, "yielded index 20 at position 1 of epoch 0, and the dataset has 20 samples"),
    ({"sampler": [1, -1]}, DataError, "yielded index -1 at position 1 of epoch 0"),
    ({"sampler": [2**80]}, TypeError, "an int; it should yield indices"),
    (
        {"sampler": [[1], [2]]},
        TypeError,
        "the sampler yielded [1], a list; it should yield indices. A sampler of lists",
    ),
    ({"sampler": [0.5]}, TypeError, "the sampler yielded 0.5, a float; it should yield indices"),
    ({"sampler": []}, DataError, "the sampler (list) yielded nothing in epoch 0"),
    ({"sampler": [1, 2], "drop_last": True}, DataError, "fewer than batch_size=4"),
    ({"sampler": iter([1, 2])}, TypeError, "which is used up after one epoch"),
    ({"sampler": RandomSampler}, TypeError, "sampler is the class RandomSampler, not called"),
    ({"sampler": 3}, TypeError, "sampler is an int; give an object that yields indices"),
    ({"sampler": Endless()}, DataError, "has yielded 1000000 indices for 20 samples, and goes on"),
    ({"sampler": Failing()}, LookupError, "the sampler's own"),
    ({"sampler": DistributedSampler(DATA, 2, 0)}, ValueError, "is a DistributedSampler for 2 ranks"),
    ({"sampler": range(4), "dataset": Stream()}, TypeError, "Stream is an iterable dataset, whose samples have no"),
    ({"batch_sampler": range(4), "batch_size": None}, TypeError, "the batch_sampler yielded 0, an int; it should"),
    ({"batch_sampler": [[1], []], "batch_size": None}, DataError, "yielded an empty list as batch 1"),
    (
        {"batch_sampler": [["a"]], "batch_size": None},
        TypeError,
        "the batch_sampler yielded 'a', a str; it should yield",
    ),
    (
        {"batch_sampler": BatchSampler(DistributedSampler(DATA, 2, 0), 4, False), "batch_size": None},
        ValueError,
        "is a DistributedSampler for 2 ranks",
    ),
]


@each_case({batches: REFUSED})
def test_what_a_sampler_cannot_mean_is_refused(call, options, error, words):
    check_refused(call, options, error, words)


DIFFERENT = """
def attempt(**options):
    try:
        trainer.batches(data, **options)
    except Exception as error:
        say(type(error).__name__, error)

trainer = make_trainer(engine="auto")
attempt(batch_size=4, sampler=[1, 2, 3, 4, 5, 6 + R, 7, 8])
attempt(batch_size=4, sampler=range(8 + R))
attempt(batch_sampler=[[1, 2, 3], [4], [5]] if R else [[1, 2, 3], [4, 5]])
attempt(batch_sampler=[[1], [2, 3, 4]] if R else [[1, 2, 3], [4]])
attempt(batch_size=4, sampler=range(8) if R else range(55, 63))
for batch in trainer.batches(data, batch_size=4, sampler=range(8)):
    trainer.step(loss, batch)
say(trainer.steps_done)
"""


def test_ranks_with_different_orders_are_told_where_and_go_on(run_alone):
    zero, one = (out.splitlines() for out in run_alone(2, DIFFERENT))
    common = "RankMismatchError the sampler's order of epoch 0 differs"
    assert zero[0].startswith(
        f"{common} at position 5: sample 6 on rank 0, sample 7 on rank 1. Every rank must get the"
    )
    assert zero[1].startswith(f"{common}: 8 indices in 2 batches on rank 0, 9 indices in 3 batches on rank 1. ")
    assert zero[2].startswith(f"{common}: 5 indices in 2 batches on rank 0, 5 indices in 3 batches on rank 1. ")
    assert zero[3].startswith("RankMismatchError batch 0 of the sampler's epoch 0 ends at position 3 on rank 0, at pos")
    assert zero[4].startswith("DataError the sampler yielded index 60 at position 5 of epoch 0, and the dataset has 60")
    assert zero[:4] == one[:4]
    assert one[4].startswith("PeerError")
    assert "index 60" in one[4]
    assert zero[5:] == one[5:] == ["2"]
