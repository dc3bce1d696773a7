"""Runs in which no rank can be replaced alone say why, and end or start again as a whole."""

from __future__ import annotations

import pytest

PROGRAM = """
import os, signal, sys, time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

import unisono

RANK, CASE, ENGINE, FOLDER = int(os.environ["RANK"]), *sys.argv[1:3], Path(sys.argv[3])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(64, 6), torch.arange(64) % 3)
options = {}


def die():
    died = FOLDER / "died"
    if RANK == 1 and trainer.steps_done == 5 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def loss(model, batch):
    die()
    x, y = batch
    if CASE == "batch":
        x.mul_(0.5)
    return F.cross_entropy(model(x), y, reduction="none")


class Shards(IterableDataset):
    def shard(self, num_shards, index):
        return [data[i] for i in range(index, len(data), num_shards)]

    def __iter__(self):
        return iter(data)


def play(model):
    return torch.randn(4, 6), torch.arange(4) % 3


def deal():
    if CASE == "rollouts":
        return trainer.rollouts(play, steps=4)
    if CASE == "shards":
        return trainer.batches(Shards(), batch_size=16, shuffle=False, sharded=True)
    return trainer.batches(data, batch_size=16)


def accuracy(model, batch):
    return (model(batch[0]).argmax(1) == batch[1]).float()


if CASE == "group":
    dist.init_process_group("gloo")
if CASE == "before":
    unisono.init()
    unisono.comm.all_reduce(torch.ones(3))
if CASE == "carried":
    hidden = unisono.Carried(lambda: torch.zeros(2))
    options["stateful"] = {"hidden": hidden}
if CASE == "saved":
    options["directory"] = FOLDER / "run"
trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, engine=ENGINE, progress=False, **options)
if CASE in ("group", "before", "carried") and ENGINE == "shared":
    # Where recovery is impossible from the start, nothing is paid for it.
    assert not any(runner._engine._protects for runner in trainer._parts.runners.values())
if CASE == "several":
    other = nn.Linear(2, 2)
    unisono.Trainer(other, torch.optim.SGD(other.parameters(), lr=0.1), virtual_ranks=4, engine=ENGINE, progress=False)
if CASE == "path" and not trainer.recovered:
    trainer.evaluate(accuracy, data)
if CASE == "alone":
    for _ in range(2):
        for batch in trainer.batches(data, batch_size=16):
            trainer.step(loss, batch)
else:
    for epoch in trainer.epochs(2):
        for batch in deal():
            trainer.step(loss, batch)
            if CASE == "between":
                dist.all_reduce(torch.ones(3))
            if CASE == "saved":
                unisono.comm.barrier()
                time.sleep(0.5 * (RANK == 0 and trainer.steps_done == 5))
            if CASE == "comm":
                unisono.comm.all_reduce(torch.ones(3))
        if CASE == "late" and not trainer.recovered:
            trainer.evaluate(accuracy, data)
        if CASE == "predict":
            for _ in trainer.predict(accuracy, data, to="iterator"):
                pass
print(trainer.digest(), flush=True)
"""

REASONS = {
    "between": "ranks call collectives of torch.distributed or unisono.comm between the Trainer's calls",
    "comm": "ranks call collectives of torch.distributed or unisono.comm between the Trainer's calls",
    "before": "the script has called collectives of its own before it made the Trainer",
    "group": "the script has made the process group itself, with torch.distributed",
    "carried": "the state that virtual ranks carry dies with the rank that computes them",
    "several": "the script makes several Trainers, and a new rank would begin with the first one again",
    "rollouts": "ranks make the batches of an epoch together, and a new rank cannot go on with them",
    "shards": "ranks make the batches of an epoch together, and a new rank cannot go on with them",
    "alone": "a new rank cannot know how far the script has come that loops without trainer.epochs",
    "path": "a new rank that runs the script from its top comes to trainer.batches() where the others have called "
    "trainer.evaluate(",
    "predict": "the script reads outputs from an iterator of trainer.predict, which are not kept",
}


@pytest.mark.parametrize("case", REASONS)
def test_what_keeps_a_rank_from_being_replaced_is_said(run_ranks, tmp_path, case):
    engine = "collective" if case in ("comm", "alone", "path") else "shared"
    job = run_ranks(2, PROGRAM, case, engine, tmp_path, code=137)
    assert job.said.count(f"no rank can be replaced alone: {REASONS[case]}") == 1
    assert "; replaced" not in job.said
    assert not job.out


def test_a_batch_that_the_loss_function_has_written_to_is_not_computed_again(run_ranks, tmp_path):
    job = run_ranks(2, PROGRAM, "batch", "collective", tmp_path, code=137)
    assert "no rank can be replaced alone: the loss function writes to the tensors of its batch" in job.said
    assert "; replaced" not in job.said
    assert not job.out


ANOTHER_WAY = """
import os, signal, sys
import torch, unisono
from torch import nn
from torch.utils.data import TensorDataset

model = nn.Linear(4, 2)
trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=4, progress=False)
data = TensorDataset(torch.randn(32, 4))
if sys.argv[1] == "early" and trainer.recovered:
    sys.exit()
for epoch in trainer.epochs(1):
    steps = 0
    for batch in trainer.batches(data, batch_size=8):
        trainer.step(lambda model, batch: model(batch[0]).sum(1), batch)
        steps += 1
        if trainer.steps_done == 2 and trainer.rank == 1 and not trainer.recovered:
            os.kill(os.getpid(), signal.SIGKILL)
    if steps == 4 or sys.argv[1] != "count":
        trainer.evaluate(lambda model, batch: model(batch[0]).sum(1), data)
"""


@pytest.mark.parametrize(
    ("case", "code", "told"),
    [
        ("early", 137, "rank 1, which took the place of one that died, ended before it met the others: if the script"),
        ("count", 1, "rank 1, a new process, began the script anew in mid-run: if the script went another way"),
    ],
)
def test_a_script_that_goes_another_way_in_a_new_process_is_told_so(run_ranks, case, code, told):
    job = run_ranks(2, ANOTHER_WAY, case, code=code)
    assert told in job.said and "`unisono drill` tries the script" in job.said
    assert ("rank 1 ended while rank 0 still needed it" in job.said) == (case == "count")


@pytest.mark.parametrize("case", ["batch", *(pytest.param(case, marks=pytest.mark.soak) for case in ("path", "late"))])
def test_a_job_whose_ranks_cannot_be_replaced_starts_again_as_a_whole(run_ranks, tmp_path, case):
    (tmp_path / "died").touch()
    expected = run_ranks(2, PROGRAM, case, "shared", tmp_path).lines()
    (tmp_path / "died").unlink()
    job = run_ranks(2, PROGRAM, case, "shared", tmp_path, flags=["--max-restarts", "1"])
    assert "starting all 2 ranks again (restart 1 of 1)" in job.said
    assert [job.lines(rank)[-1:] for rank in range(2)] == [expected] * 2


def test_a_job_that_starts_again_is_not_said_to_end(run_ranks, tmp_path):
    """Rank 0 gets SIGTERM in the body of its loop, from the launcher."""
    job = run_ranks(2, PROGRAM, "saved", "shared", tmp_path, flags=["--max-restarts", "1"])
    assert "starting all 2 ranks again (restart 1 of 1)" in job.said
    assert "SIGTERM" not in job.said
