"""Checkpoints of workers that train on their own (sync=): each rank writes and reads what its own workers have."""

from __future__ import annotations

import pytest

from tests.checkpoint_writers import writers
from tests.printed import lines_of_all

PROGRAM = """
import os, pathlib, sys
import torch, torch.nn.functional as F
import unisono
from unisono.state.open_checkpoint import OpenCheckpoint
from unisono.state.part_writing import PartWriter
folder, sync, optimizer, steps, width = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
todo = sys.argv[6]
torch.manual_seed(3)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(6, width), torch.nn.BatchNorm1d(width)
        self.last = torch.nn.Linear(width, 6)
        self.tied = self.last.weight
        self.columns = torch.nn.Parameter(torch.randn(6, width).t())  # not contiguous
        self.unused = torch.nn.Parameter(torch.randn(5))
    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(x) + x @ self.columns
model = Model()
optimizer = eval(f"torch.optim.{optimizer}")(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(48, 6), torch.randint(0, 6, (48,)))
if todo == "apart" and os.environ["RANK"] == "1":  # as if it were on another host
    for each in (PartWriter, OpenCheckpoint):
        make = each.__init__
        each.__init__ = lambda self, path, *more, make=make: make(self, path / "of another host", *more)
once = pathlib.Path(folder, "died")
if todo == "die" and os.environ["RANK"] == "1" and not once.exists():
    write = PartWriter.write
    def die(writer, ranges, files):
        if trainer.steps_done == 5:
            once.touch()
            os.kill(os.getpid(), 9)
        write(writer, ranges, files)
    PartWriter.write = die
def read():
    return int(pathlib.Path("/proc/self/io").read_text().split()[1])
before = read()
trainer = unisono.Trainer(
    model, optimizer, virtual_ranks=4, seed=5, directory=folder, progress=False,
    sync=eval(f"unisono.{sync}") if sync else None,
    checkpoints=unisono.Checkpoints(every_steps=1, every_minutes=None, keep=50),
)
if todo == "read":
    print("read", read() - before)
print("after", trainer.steps_done)
for epoch in trainer.epochs(2, max_steps=steps):
    if not trainer.steps_done:
        trainer.save(tag="start")
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"), batch)
        if trainer.steps_done == 3:
            trainer.save(tag="third")
        if trainer.steps_done == 5:
            trainer.save()
            trainer.save()
print(trainer.digest())
"""
SYNC, ADAM = "DiLoCo(every=3)", "AdamW"


@pytest.fixture
def start(fork_ranks, tmp_path):
    """Run the program on ranks; return the job."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def start(ranks, folder, sync=SYNC, optimizer=ADAM, steps=8, *, width=16, todo="", **options):
        return fork_ranks(
            ranks, tmp_path / "program.py", tmp_path / folder, sync, optimizer, steps, width, todo, **options
        )

    return start


@pytest.fixture
def run(start):
    """Run the program, and return what each of its ranks prints: where it began, and a digest."""

    def run(ranks, *args, **options):
        return lines_of_all(start(ranks, *args, **options), ranks)

    return run


@pytest.mark.parametrize(
    ("ranks", "sync", "optimizer"),
    [
        (2, "DiLoCo(every=4, workers=2)", "SGD"),
        (3, SYNC, ADAM),
        (4, "LocalSGD(every=2)", "Adafactor"),
        pytest.param(2, SYNC, ADAM, marks=pytest.mark.soak),
        pytest.param(4, SYNC, "Rprop", marks=pytest.mark.soak),
    ],
)
def test_ranks_write_the_files_that_one_process_would_write(run, tmp_path, ranks, sync, optimizer):
    assert run(1, "one", sync, optimizer) == run(ranks, "run", sync, optimizer)
    found = sorted((tmp_path / "one").glob("checkpoints/*"))
    assert [path.name for path in found] == [*(f"step-{step:09}" for step in range(1, 9)), "tag-start", "tag-third"]
    for path in found:
        checkpoint = tmp_path / "run" / "checkpoints" / path.name
        for name in ("model.safetensors", "sync.safetensors", "optimizer.safetensors", "state.json"):
            assert (checkpoint / name).read_bytes() == (path / name).read_bytes(), f"{path.name}/{name}"
        written = writers(checkpoint)
        assert written["model"] == {*range(ranks)}
        assert written["sync"] == ({0} if path.name == "tag-start" else {*range(ranks)})
    assert sorted(each.name for each in (tmp_path / "run" / "checkpoints").iterdir()) == [each.name for each in found]


def test_any_number_of_ranks_goes_on_from_the_parts_of_workers(run):
    (_, sha) = run(1, "one")
    assert run(2, "run", steps=2)[0] == "after 0"
    assert run(3, "run", steps=4)[0] == "after 2"
    assert run(1, "run", steps=5)[0] == "after 4"
    assert run(4, "run") == ["after 5", sha]


def test_a_rank_reads_the_workers_that_it_trains_alone(start, tmp_path):
    start(1, "run", steps=2, width=40_000)
    start(2, "run", steps=2, width=40_000, todo="read")
    job = start(2, "run", steps=2, width=40_000, todo="read")
    newest = max((tmp_path / "run").glob("checkpoints/step-*"))
    total = sum(file.stat().st_size for file in newest.iterdir())
    assert total > 40e6
    for rank in range(2):
        nbytes = int(job.lines(rank)[0].removeprefix("read "))
        assert 0.4 * total < nbytes < 0.65 * total


def test_a_part_of_a_worker_that_is_damaged_sends_all_ranks_to_an_older_checkpoint(start, run, tmp_path):
    (_, sha) = run(1, "one")
    run(2, "run", steps=5)
    file = tmp_path / "run" / "checkpoints" / "step-000000005" / "sync.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    job = start(3, "run")
    assert [job.lines(rank) for rank in range(3)] == [["after 4", sha]] * 3
    assert f"warning: {file}" in job.err
    assert "which rank 1 wrote: the file was changed or the disk is failing" in job.err
    assert "Resuming from step 4 instead" in job.err


def test_ranks_that_do_not_see_the_directory_let_rank_0_write(start, run, tmp_path):
    (_, sha) = run(1, "one")
    start(2, "apart", steps=4, todo="apart")
    found = sorted((tmp_path / "apart").glob("checkpoints/*"))
    assert [path.name for path in found] == [*(f"step-{step:09}" for step in range(1, 5)), "tag-start", "tag-third"]
    for path in found:
        assert not any(writers(path).values())
        for name in ("model.safetensors", "sync.safetensors", "state.json"):
            assert path.joinpath(name).read_bytes() == (tmp_path / "one/checkpoints" / path.name / name).read_bytes()
    assert run(2, "apart", todo="apart") == ["after 4", sha]


def test_a_rank_that_dies_while_it_writes_leaves_the_older_checkpoints(run_ranks, run, tmp_path):
    (_, sha) = run(1, "one")
    arguments = (tmp_path / "program.py", tmp_path / "run", SYNC, ADAM, 8, 16, "die")
    job = run_ranks(2, *arguments, flags=["--max-restarts", "1"])
    assert [job.lines(rank)[-2:] for rank in range(2)] == [["after 4", sha]] * 2
    assert not [*(tmp_path / "run" / "checkpoints").glob(".tmp-*")]


@pytest.mark.parametrize(
    ("sync", "said"),
    [
        ("DiLoCo(every=3, workers=2)", "the run has 4 workers and rounds of 3 steps, and sync= says 2 and 3"),
        ("DiLoCo(every=4)", "the run has 4 workers and rounds of 3 steps, and sync= says 4 and 4"),
        ("", "give it the same scheduler, autocast and stateful objects"),
    ],
)
def test_other_workers_than_before_are_refused_on_all_ranks(start, run, sync, said):
    run(2, "run", steps=2)
    job = start(2, "run", sync, code=1)
    assert said in job.err


REPLACED = """
import sys
import torch, torch.nn.functional as F
import unisono
folder, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(3)
model = torch.nn.Linear(6, 6)
data = torch.utils.data.TensorDataset(torch.randn(48, 6), torch.randint(0, 6, (48,)))
trainer = unisono.Trainer(
    model, torch.optim.AdamW(model.parameters(), lr=0.01), virtual_ranks=4, seed=5, directory=folder, progress=False,
    sync=unisono.DiLoCo(every=3),
)
for epoch in trainer.epochs(2, max_steps=steps):
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"), batch)
        if trainer.steps_done == 4:  # within a round
            with torch.no_grad():
                model.weight.mul_(0.5)
print(trainer.digest())
"""


def test_weights_that_were_replaced_within_a_round_begin_another_one_after_a_resume(fork_ranks, tmp_path):
    (tmp_path / "replaced.py").write_text(REPLACED)
    whole = fork_ranks(1, tmp_path / "replaced.py", tmp_path / "whole", 8)
    fork_ranks(2, tmp_path / "replaced.py", tmp_path / "run", 4)
    resumed = fork_ranks(2, tmp_path / "replaced.py", tmp_path / "run", 8)
    assert {*resumed.lines(0), *resumed.lines(1)} == {*whole.lines(0)}
