"""Iterable datasets in shards: a rank reads its own alone, and the bits are those of any number of ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import unisono
from refusals import check_refused, each_case
from unisono.errors import DataError

PROGRAM = Path(__file__).parent / "programs" / "sharded.py"


def digests(lines: list[str]) -> list[str]:
    return [line for line in lines if re.match(r"\w+ = [0-9a-f]{64} after \d+ steps$", line)]


@pytest.fixture(scope="module")
def on_one_rank(fork_python, tmp_path_factory) -> list[str]:
    return fork_python(PROGRAM, tmp_path_factory.mktemp("alone"), "auto", 0)


def test_an_epoch_ends_where_a_shard_has_nothing_left_for_a_batch(on_one_rank):
    sizes = dict(re.findall(r"^(\w+) sizes (.*)$", "\n".join(on_one_rank), re.MULTILINE))
    assert sizes["even"] == str([16] * 4 * 2)
    # Shares are of 3, 3, 2 and 2 samples: shards 0 and 1 have one left after 4 steps, and shards 2 and 3 five.
    assert sizes["tail"] == str(([10] * 4 + [6]) * 2)
    assert sizes["uneven"] == str([8] * 6 * 2)
    assert sizes["dropped"] == str([12] * 4 * 2)
    assert on_one_rank[-1] == "opened [0, 1, 2, 3]"


@pytest.mark.parametrize(
    ("n", "engine"),
    [(3, "collective"), *(pytest.param(*each, marks=pytest.mark.soak) for each in [(2, "shared"), (4, "auto")])],
)
def test_a_rank_opens_its_own_shards_alone_and_the_number_of_ranks_changes_no_bit(
    fork_ranks, tmp_path, on_one_rank, n, engine
):
    job = fork_ranks(n, PROGRAM, tmp_path, engine, 0)
    assert digests(job.lines()) == digests(on_one_rank)
    assert len(digests(on_one_rank)) == 5
    opened = [eval(job.lines(rank)[-1].removeprefix("opened ")) for rank in range(n)]
    assert sorted(sum(opened, [])) == [0, 1, 2, 3]  # noqa: RUF017


def test_a_resume_in_mid_epoch_goes_on_in_the_shards(fork_ranks, fork_python, tmp_path, on_one_rank):
    fork_ranks(3, PROGRAM, tmp_path, "auto", 2)
    fork_python(PROGRAM, tmp_path, "auto", 7)
    assert digests(fork_ranks(2, PROGRAM, tmp_path, "auto", 0).lines()) == digests(on_one_rank)


class Shards(IterableDataset):
    def __init__(self, lengths):
        self.lengths = lengths

    def __iter__(self):
        return (torch.zeros(1) for _ in range(sum(self.lengths)))

    def shard(self, num_shards, index):
        return [torch.zeros(1)] * self.lengths[index]


class Plain(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1)


def batches(dataset, **options):
    model = nn.Linear(1, 1)
    trainer = unisono.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=2, progress=False, seed=1
    )
    return list(trainer.batches(dataset, **{"batch_size": 4, "sharded": True, **options}))


class Changing(Shards):
    def shard(self, num_shards, index):
        self.lengths = self.lengths[index : index + 1]
        return self


REFUSED = [
    ({"dataset": Changing([4, 4])}, TypeError, "Changing.shard returned the dataset itself"),
    ({"dataset": Plain()}, TypeError, "an IterableDataset with a method shard(num_shards, index), and Plain is none"),
    ({"dataset": TensorDataset(torch.zeros(8, 1))}, TypeError, "and TensorDataset is none: leave it out"),
    ({"dataset": Shards([4, 4]), "sharded": 1}, TypeError, "sharded=1 must be True or False"),
    ({"dataset": Shards([4, 4]), "shuffle": True}, ValueError, "shuffle=True cannot be done for Shards"),
    ({"dataset": Shards([4, 4]), "sampler": [1]}, ValueError, "sharded=True is for iterable datasets"),
    ({"dataset": Shards([4, 0])}, DataError, "shard 1 of 2 of the iterable dataset yielded nothing in epoch 0"),
    ({"dataset": Shards([4])}, IndexError, "list index out of range"),
]


@each_case({batches: REFUSED})
def test_what_cannot_be_read_in_shards_is_refused(call, options, error, words):
    check_refused(call, options, error, words)


def test_the_last_batch_has_what_is_left_in_every_shard():
    assert [len(batch) for batch in batches(Shards([7, 9]))] == [4, 4, 4, 3]
    assert [len(batch) for batch in batches(Shards([7, 9]), drop_last=True)] == [4, 4, 4]


FAILING = """
from torch.utils.data import IterableDataset

class Failing(IterableDataset):
    def shard(self, num_shards, index):
        def samples():
            for i in range(20):
                if index == 3 and i == 9:
                    raise LookupError("the shard's own")
                yield torch.randn(6), i % 3
        return samples()

    def __iter__(self):
        yield from ()

trainer = make_trainer(engine="auto")
try:
    for batch in trainer.batches(Failing(), batch_size=4, sharded=True):
        trainer.step(loss, batch)
except Exception as error:
    say(type(error).__name__, error)
try:
    for batch in trainer.batches(Failing(), batch_size=4, sharded=R == 0):
        trainer.step(loss, batch)
except Exception as error:
    say(type(error).__name__, error)
trainer = make_trainer(engine="auto")
try:
    for batch in trainer.batches(Failing(), batch_size=4, sharded=True):
        trainer.step(loss, batch)
        if R:
            break
    trainer.evaluate(loss, data)
except Exception as error:
    say(type(error).__name__, error)
"""


def test_a_shard_that_fails_or_a_rank_that_leaves_is_an_error_on_all_ranks(run_alone):
    zero, one = (out.splitlines() for out in run_alone(2, FAILING))
    assert one[0] == "LookupError the shard's own"
    assert zero[0].startswith("PeerError")
    assert "the shard's own" in zero[0]
    assert zero[1] == one[1]
    assert zero[1].startswith("RankMismatchError")
    assert "shards" in zero[1]
    assert "RankMismatchError" in zero[2] and "RankMismatchError" in one[2]
    assert "reading shards of a dataset" in zero[2] and "trainer.evaluate" in zero[2]
