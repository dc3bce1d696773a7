"""Several datasets in one step: the first one leads, the others go round, and the number of ranks changes no bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import unisono
from refusals import check_refused, each_case
from unisono.errors import DataError

PROGRAM = Path(__file__).parent / "programs" / "joined.py"
DATASETS = {"a": TensorDataset(torch.arange(10)), "b": TensorDataset(torch.arange(7))}


@pytest.fixture(scope="module")
def on_one_rank(fork_python, tmp_path_factory) -> list[str]:
    found = fork_python(PROGRAM, tmp_path_factory.mktemp("alone"), "auto", 0)
    assert len(found) == 3
    return found


@pytest.mark.parametrize(
    ("n", "engine"),
    [(3, "collective"), *(pytest.param(*each, marks=pytest.mark.soak) for each in [(2, "shared"), (4, "auto")])],
)
def test_the_number_of_ranks_changes_no_bit(fork_ranks, tmp_path, on_one_rank, n, engine):
    assert fork_ranks(n, PROGRAM, tmp_path, engine, 0).lines() == on_one_rank


def test_a_resume_in_mid_epoch_goes_on_with_the_same_batches(fork_ranks, fork_python, tmp_path, on_one_rank):
    fork_ranks(2, PROGRAM, tmp_path, "auto", 1)
    fork_python(PROGRAM, tmp_path, "auto", 5)
    assert fork_ranks(3, PROGRAM, tmp_path, "auto", 0).lines() == on_one_rank


def make_trainer(**options):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return unisono.Trainer(model, optimizer, **{"virtual_ranks": 2, "progress": False, **options})


def dealt(trainer, epochs, datasets=DATASETS, **options):
    """For each epoch and batch, the samples of each dataset."""
    options = {"batch_size": {"a": 4, "b": 3}, **options}
    return [
        [
            {name: sorted(i for m in batch.micro_batches for i in m[name][0].tolist()) for name in datasets}
            for batch in trainer.batches(datasets, **options)
        ]
        for _ in range(epochs)
    ]


def test_the_first_dataset_leads_and_the_others_go_round():
    epochs = dealt(make_trainer(), 4)
    assert [[len(batch["a"]) for batch in epoch] for epoch in epochs] == [[4, 4, 2]] * 4
    assert all(sorted(i for batch in epoch for i in batch["a"]) == list(range(10)) for epoch in epochs)
    others = [batch["b"] for epoch in epochs for batch in epoch]
    assert [len(batch) for batch in others] == [3] * 12
    for first, second in zip(others[::2], others[1::2], strict=True):  # a pass over 7 samples has two batches of 3
        assert len({*first, *second}) == 6
    assert len({*Counter(map(tuple, others))}) > 6
    in_order = dealt(make_trainer(), 2, shuffle=False)
    assert [batch["b"] for epoch in in_order for batch in epoch] == [[0, 1, 2], [3, 4, 5]] * 3


def test_datasets_of_one_length_have_orders_of_their_own():
    (epoch,) = dealt(make_trainer(), 1, {"a": DATASETS["a"], "b": DATASETS["a"]}, batch_size={"a": 5, "b": 5})
    assert all(batch["a"] != batch["b"] for batch in epoch)


def test_a_virtual_rank_without_a_sample_of_the_first_dataset_computes_nothing():
    trainer = make_trainer(virtual_ranks=4)
    *_, last = trainer.batches(DATASETS, batch_size={"a": 4, "b": 7})
    assert (last.size, len(last), [len(m["b"][0]) for m in last.micro_batches]) == (2, 2, [2, 2])


def test_fit_takes_several_datasets():
    trainer = make_trainer()
    trainer.fit(
        lambda model, batch: model(batch["a"][0].float().unsqueeze(1)).squeeze(1).square() / 100,
        DATASETS,
        batch_size={"a": 5, "b": 2},
        epochs=2,
        validation=DATASETS["a"],
        metrics={"length": lambda model, batch: torch.ones(len(batch[0]))},
    )
    assert trainer.steps_done == 4


def test_an_epoch_does_not_go_on_with_another_second_dataset(tmp_path):
    def begun(datasets, steps):
        trainer = make_trainer(directory=tmp_path)
        for _ in trainer.epochs(1, max_steps=steps):
            for batch in trainer.batches(datasets, batch_size={"a": 4, "b": 2}):
                trainer.step(lambda model, m: model(m["a"][0].float().unsqueeze(1)).squeeze(1) / 100, batch)

    begun(DATASETS, 1)
    with pytest.raises(
        ValueError, match=r"order=a with b \(2 of 7\); the epoch cannot go on with order=a with b \(2 of 9"
    ):
        begun({**DATASETS, "b": TensorDataset(torch.arange(9))}, 2)
    begun(DATASETS, 3)


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1)


def batches(dataset=DATASETS, **options):
    return make_trainer().batches(dataset, **{"batch_size": {"a": 4, "b": 2}, **options})


REFUSED = [
    ({"dataset": DATASETS["a"]}, TypeError, "batch_size is a dict, which is for several datasets by name, and dataset"),
    (
        {"batch_size": 4},
        TypeError,
        "the dataset is a dict with the keys 'a', 'b': give one of its values, or, to train",
    ),
    ({"batch_size": {"a": 4}}, ValueError, "the datasets are 'a', 'b', and batch_size is given for 'a': give one for"),
    ({"batch_size": {}}, ValueError, "batch_size is given for none"),
    ({"batch_size": {"a": 4, "b": "2"}}, TypeError, "batch_size['b']='2' must be a whole number"),
    ({"batch_size": {"a": 4, "b": 0}}, ValueError, "batch_size['b']=0 must be at least 1"),
    ({"batch_size": {"a": 4, "b": 1}}, ValueError, "batch_size=1 is smaller than virtual_ranks=2"),
    ({"batch_size": {"a": 4, "b": 8}}, DataError, "the dataset 'b' has 7 samples, fewer than its batch_size=8"),
    ({"micro_batch_size": 1}, ValueError, "micro_batch_size=1 is for a single dataset"),
    ({"sampler": [1]}, ValueError, "sampler=[1] is for a single dataset"),
    ({"sharded": True}, ValueError, "sharded=True is for a single dataset"),
    ({"dataset": {**DATASETS, "b": Stream()}}, TypeError, "a Stream is no map-style dataset"),
    ({"dataset": {**DATASETS, "b": []}}, DataError, "the dataset (list) is empty"),
]


@each_case({batches: REFUSED})
def test_what_cannot_be_joined_is_refused(call, options, error, words):
    check_refused(call, options, error, words)


DIFFERENT = """
trainer = make_trainer(engine="auto")
for names in (("a", "b"), ("a", "c"))[R], ("a", "b"):
    try:
        sizes = {name: 8 for name in names}
        for batch in trainer.batches({name: data for name in names}, batch_size=sizes):
            trainer.step(lambda model, m: loss(model, m["a"]), batch)
    except Exception as error:
        say(type(error).__name__, error)
say(trainer.steps_done)
"""


def test_ranks_with_different_datasets_are_told_so_and_go_on(run_alone):
    zero, one = (out.splitlines() for out in run_alone(2, DIFFERENT))
    assert zero == one
    assert zero[0].startswith("RankMismatchError")
    assert "trainer.batches() of 'a', 'b'" in zero[0]
    assert zero[-1] == "8"
