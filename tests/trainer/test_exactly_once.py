"""What a loop does between its batches and epochs is done once in the life of a run, wherever it is stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "between.py"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, list[str]]:
    """The last two lines of runs that nobody stopped, by their arguments."""
    return {}


def finish(fork_ranks, directory: Path, *args: object) -> list[str]:
    return fork_ranks(1, PROGRAM, directory, *args).lines()


@pytest.mark.parametrize(
    ("stop", "begins", "args"),
    [
        # The loop stands before an evaluation, is in it, or has done it: what it did is not saved, but done again.
        ("error:evaluation:3", "0 3", []),
        pytest.param("error:stepped:6", "1 6", [], marks=pytest.mark.soak),
        ("term:stepped:3", "0 3", ["--every", 1]),
        ("error:loss:4", "1 4", []),
        # After a step the rest of the body is waited for, if there is somebody who waits.
        pytest.param("error:body:4", "1 3", ["--teacher"], marks=pytest.mark.soak),
        ("int:body:4", "1 4", ["--teacher"]),
        ("term:loss:4", "1 5", ["--teacher"]),
        ("main-term:body:5", "1 5", ["--teacher"]),
        # What happens to a teacher is not known: nothing is saved in the middle of what may be done to it.
        ("error:loss:4", "1 3", ["--teacher"]),
        ("int:end:6", "2 6", ["--teacher"]),
    ],
)
def test_a_run_that_is_stopped_between_goes_on_to_the_same_bits(fork_ranks, tmp_path, undisturbed, stop, begins, args):
    key = str(args)
    if key not in undisturbed:
        undisturbed[key] = finish(fork_ranks, tmp_path / "calm", *args)[-2:]
    code = {"error": 1, "int": 130, "term": 143, "main-term": 143}[stop.partition(":")[0]]
    hurt = fork_ranks(2, PROGRAM, tmp_path / "hurt", "--stop", stop, *args, code=None)
    assert hurt.code == code, hurt.err
    lines = finish(fork_ranks, tmp_path / "hurt", *args)
    assert lines[0] == f"begins at {begins}"
    assert lines[-2:] == undisturbed[key]
    events = [json.loads(line) for line in (tmp_path / "hurt" / "events.jsonl").read_text().splitlines()]
    lost = [event["message"] for event in events if "were not saved" in event.get("message", "")]
    assert bool(lost) == (stop.startswith("error") and bool(args))
    if lost:
        assert "steps after 3 were not saved" in lost[0]


def test_steps_end_a_run_without_what_ends_an_epoch(fork_ranks, tmp_path, undisturbed):
    """In mid-epoch the loop's end of an epoch runs, but is no part of the run; at an epoch's end it is."""
    if "[]" not in undisturbed:
        undisturbed["[]"] = finish(fork_ranks, tmp_path / "calm")[-2:]
    for steps, begins in ((2, "0 0"), (3, "0 2"), (7, "1 3"), (9, "2 7")):
        lines = finish(fork_ranks, tmp_path / "hurt", "--steps", steps)
        assert lines[0] == f"begins at {begins}"
    assert lines[-2:] == undisturbed["[]"]


START = """
import gc, os, sys
from pathlib import Path
import torch, unisono
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(60, 6), torch.arange(60) % 3)
def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")
"""
FUNCTION = """
def main(stop, where, alone, directory):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    trainer = unisono.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=4, directory=directory, progress=False,
        engine=ENGINE,
    )
    def body():
        for batch in trainer.batches(data, batch_size=12):
            if where == "before" and trainer.steps_done == 2:
                return end(stop)
            trainer.step(loss, batch)
            if where == "after" and trainer.steps_done == 2:
                return end(stop)
    for _ in [0] if alone else trainer.epochs(1):
        if body():
            break

def end(stop):
    if stop == "error":
        raise OSError("the user's")
    if stop == "exit":
        sys.exit(3)
    return True

for stop in ("error", "exit", "break"):
    for where in ("before", "after"):
        for alone in (False, True):
            directory = Path(sys.argv[1], f"{stop}-{where}-{alone}")
            try:
                main(stop, where, alone, directory)
            except (OSError, SystemExit):
                pass
            gc.collect()
"""


@pytest.mark.parametrize(
    ("n", "engine"), [(1, "auto"), (2, "shared"), pytest.param(2, "collective", marks=pytest.mark.soak)]
)
def test_a_trainer_that_a_function_drops_saves_its_steps_or_says_that_they_are_lost(fork_ranks, tmp_path, n, engine):
    start = 'dist.init_process_group("gloo")\n' if n > 1 else ""
    fork_ranks(n, f"{START}{start}ENGINE = {engine!r}\n{FUNCTION}", tmp_path / "runs")
    folders = sorted((tmp_path / "runs").iterdir())
    assert len(folders) == 12
    for folder in folders:
        saved = [each.name for each in (folder / "checkpoints").glob("step-*")]
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        lost = [event["message"] for event in events if "were not saved" in event.get("message", "")]
        if "before" in folder.name:
            assert (saved, lost) == (["step-000000002"], []), folder.name
        else:
            assert saved == [], folder.name
            (message,) = lost
            assert message.startswith("steps after 0 were not saved: the loop was left after a step"), folder.name


TWICE = """
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
options = dict(virtual_ranks=4, directory=sys.argv[1], progress=False)
first = unisono.Trainer(model, optimizer, **options)
for batch in first.batches(data, batch_size=12):
    if first.steps_done == 2:
        break
    first.step(loss, batch)
assert unisono.Trainer(model, optimizer, **options).steps_done == 2
"""


def test_a_later_trainer_goes_on_after_the_last_step_of_one_that_was_left(fork_ranks, tmp_path):
    fork_ranks(1, START + TWICE, tmp_path / "runs")
