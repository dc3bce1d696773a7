"""Checkpoints of tables that are divided over ranks: each rank writes and reads a part, or rank 0 all of it."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoint_writers import writers
from tests.printed import lines_of_all
from unisono.state.checkpoint_store import CheckpointStore
from unisono.state.digest import digest

PROGRAM = """
import errno, os, pathlib, sys
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import unisono
import unisono.trainer.table_parts as table_parts
from unisono.embedding import Adagrad, RowwiseAdam, Table, Tables, dense_parameters
from unisono.state.open_checkpoint import OpenCheckpoint
from unisono.state.part_writing import PartWriter
folder, steps, rows, todo = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].split(",")
rank = int(os.environ.get("RANK", 0))
torch.manual_seed(3)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        tables = Tables(
            {
                "words": Table(rows=rows, dim=8, optimizer=RowwiseAdam(lr=0.1), init_std=0.1),
                "few": Table(rows=30, dim=5, optimizer=Adagrad(lr=0.1), init_std=0.1),
            },
            divided=True,
        )
        self.words, self.few = tables["words"], tables["few"]
        self.again = nn.ModuleList([self.words])
        self.frozen = nn.Embedding(40_001, 8)
        self.frozen.requires_grad_(False)
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.tied, self.beside = self.last.weight, nn.Linear(5, 3)
    def forward(self, x):
        y = self.words(x).mean(1) + self.frozen(x[:, 0] % 40_001)
        return self.last(self.norm(y)) + self.beside(self.few(x[:, 1] % 30))
model = Model()
optimizer = torch.optim.AdamW(dense_parameters(model), lr=0.01)
generator = torch.Generator().manual_seed(1)
data = TensorDataset((rows * torch.rand(96, 3, generator=generator) ** 3).long(), torch.arange(96) % 3)
if "apart" in todo and rank == 1:  # as if it were on another host
    for each in (PartWriter, OpenCheckpoint):
        make = each.__init__
        each.__init__ = lambda self, path, *more, make=make: make(self, path / "of another host", *more)
if "files" in todo:
    table_parts._MOST_NBYTES = 0
once, original = pathlib.Path(folder, "done"), table_parts.reserve
def full(segment):
    if rank == 1 and trainer.steps_done == 3:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    original(segment)
if "full" in todo:
    table_parts.reserve = full
if "die" in todo and rank == 1 and not once.exists():
    write = PartWriter.write
    def die(writer, ranges, files):
        if trainer.steps_done == 5:
            once.touch()
            os.kill(os.getpid(), 9)
        write(writer, ranges, files)
    PartWriter.write = die
trainer = unisono.Trainer(
    model, optimizer, virtual_ranks=4, seed=5, directory=folder, progress=False, engine="collective",
    checkpoints=unisono.Checkpoints(
        every_steps=1, every_minutes=None, keep=50, incremental=None if "changes" in todo else False,
        **({"best": "quality", "mode": "max"} if "best" in todo else {}),
    ),
)
print("after", trainer.steps_done)
qualities = [0.0, 1.0, 2.0, 9.0, 4.0, 5.0, 6.0]
for epoch in trainer.epochs(2, max_steps=steps):
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"), batch)
        if trainer.steps_done == 2:
            trainer.save(tag="second")
        if trainer.steps_done == 4 and "move" in todo:
            with torch.no_grad():
                model.frozen.weight[[5, 40_000]] += 1
        if "best" in todo:
            quality = qualities[trainer.steps_done]
            trainer.evaluate(
                lambda model, batch: {"quality": 0 * model(batch[0])[:, 0] + quality}, data, batch_size=48
            )
print(trainer.digest())
"""
ROWS = 60_000


@pytest.fixture
def start(fork_ranks, tmp_path):
    """Run the program on ranks; return the job."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def start(ranks, folder, steps=6, *, rows=ROWS, todo="none", **options):
        return fork_ranks(ranks, tmp_path / "program.py", tmp_path / folder, steps, rows, todo, **options)

    return start


@pytest.fixture
def run(start):
    """Run the program, and return what each of its ranks prints: where it began, and a digest."""

    def run(ranks, *args, **options):
        return lines_of_all(start(ranks, *args, **options), ranks)

    return run


def contents(folder):
    """Return a digest of each checkpoint, read as a whole after every byte has been compared with its hash."""
    store, found = CheckpointStore(folder / "checkpoints"), {}
    for info in store.list():
        store.verify(info)
        loaded = store.load(info)
        found[info.step] = digest({group: dict(sorted(tensors.items())) for group, tensors in loaded.groups.items()})
    return found


@pytest.mark.parametrize(
    ("ranks", "todo"),
    [(3, "none"), (2, "files"), pytest.param(4, "files", marks=pytest.mark.soak), (2, "apart")],
)
def test_ranks_write_the_files_that_one_process_would_write(run, tmp_path, ranks, todo):
    assert run(1, "one") == run(ranks, "run", todo=todo)
    found = sorted((tmp_path / "one").glob("checkpoints/*"))
    assert [path.name for path in found] == [*(f"step-{step:09}" for step in range(1, 7)), "tag-second"]
    for path in found:
        checkpoint = tmp_path / "run" / "checkpoints" / path.name
        for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
            assert (checkpoint / name).read_bytes() == (path / name).read_bytes(), f"{path.name}/{name}"
        written = writers(checkpoint)
        assert written["model"] == written["optimizer"] == ({0} if todo == "apart" else {*range(ranks)})
    assert sorted(each.name for each in (tmp_path / "run" / "checkpoints").iterdir()) == [each.name for each in found]


@pytest.mark.parametrize("todo", ["changes,move", "changes,move,apart,files"])
def test_ranks_write_the_rows_that_have_changed_alone(run, tmp_path, todo):
    run(1, "one", todo="changes,move")
    run(3, "run", todo=todo)
    run(2, "other", todo="changes,move")
    assert contents(tmp_path / "one") == contents(tmp_path / "run") == contents(tmp_path / "other")
    for step in range(1, 7):
        first, second, alone = (
            tmp_path / folder / "checkpoints" / f"step-{step:09}" for folder in ("run", "other", "one")
        )
        for name in ("model", "optimizer"):
            assert (first / f"{name}-base.safetensors").exists() == (step > 1)
            file = (first / f"{name}.safetensors").read_bytes()
            assert file == (second / f"{name}.safetensors").read_bytes()
            assert len(file) < 1.2 * (alone / f"{name}.safetensors").stat().st_size
        if step > 1 and "apart" not in todo:
            assert {rank for group in writers(first).values() for rank in group} == {0, 1, 2}


def test_any_number_of_ranks_goes_on_from_parts(run):
    (_, sha) = run(1, "one", 8)
    assert run(2, "run", 2, todo="changes")[0] == "after 0"
    assert run(3, "run", 4, todo="changes,files")[0] == "after 2"
    assert run(1, "run", 5, todo="changes")[0] == "after 4"
    assert run(2, "run", 7, todo="changes,apart")[0] == "after 5"
    assert run(3, "run", 8, todo="changes") == ["after 7", sha]


@pytest.mark.parametrize("todo", ["changes", "changes,apart"])
def test_a_part_that_is_damaged_sends_all_ranks_to_an_older_checkpoint(start, run, tmp_path, todo):
    (_, sha) = run(1, "one", 6)
    run(2, "run", 4, todo="changes")
    file = tmp_path / "run" / "checkpoints" / "step-000000004" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    job = start(3, "run", 6, todo=todo)
    assert [job.lines(rank) for rank in range(3)] == [["after 3", sha]] * 3
    assert f"warning: {file}" in job.err
    assert "which rank 1 wrote: the file was changed or the disk is failing" in job.err


def test_a_disk_without_room_for_the_rows_of_a_rank_costs_that_checkpoint(start, run, tmp_path):
    (_, sha) = run(1, "one")
    job = start(2, "run", todo="files,full")
    assert job.lines(0)[1] == sha
    steps = sorted(int(path.name[-9:]) for path in (tmp_path / "run").glob("checkpoints/step-*"))
    assert steps == [1, 2, 4, 5, 6]
    (line,) = [line for line in job.err.splitlines() if "checkpoint not written" in line]
    assert "the rows of divided tables that rank 1 writes could not come together in" in line
    assert "No space left on device" in line and "Older checkpoints are untouched" in line


def test_the_best_checkpoint_is_one_of_parts(run, tmp_path):
    (_, sha) = run(1, "one", todo="best,changes")
    assert run(2, "run", todo="best,changes") == ["after 0", sha]
    for folder in ("one", "run"):
        assert (tmp_path / folder / "checkpoints" / "best").resolve().name == "step-000000003"
    assert contents(tmp_path / "one") == contents(tmp_path / "run")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("todo", ["none", "apart"])
def test_a_checkpoint_with_another_number_of_rows_is_refused(start, tmp_path, ranks, todo):
    start(2, "run", 2)
    job = start(ranks, "run", 3, rows=ROWS + 1000, todo=todo, code=None)
    assert all(job.codes)
    assert "is a checkpoint of another model: " in job.err
    assert f"weight is float32[{ROWS}, 8] there and float32[{ROWS + 1000}, 8] here" in job.err


@pytest.mark.soak
@pytest.mark.parametrize("todo", ["die", "die,changes", "die,changes,files"])
def test_a_rank_that_dies_while_it_writes_costs_that_checkpoint(run_ranks, run, tmp_path, todo):
    (_, sha) = run(1, "one")
    job = run_ranks(2, tmp_path / "program.py", tmp_path / "run", 6, ROWS, todo, flags=["--max-restarts", 1])
    assert sha in job.out and "after 4" in job.out
    assert (tmp_path / "run" / "done").exists()
    assert contents(tmp_path / "one").items() >= contents(tmp_path / "run").items()
    assert not [*(tmp_path / "run" / "checkpoints").glob(".tmp*")]


def test_weights_are_loaded_from_changed_rows(fork_ranks, tmp_path):
    """Rank 0 reads rows of a checkpoint with changed rows in chunks, and each rank gets its own."""
    (tmp_path / "program.py").write_text(
        PROGRAM
        + """
source = pathlib.Path(folder, "checkpoints", "step-000000004")
assert (source / "model-base.safetensors").exists()
trainer.load(source)
trainer.export(os.path.join(folder, f"loaded-{trainer.world_size}.safetensors"))
"""
    )
    for ranks in (1, 3):
        fork_ranks(ranks, tmp_path / "program.py", tmp_path / "run", 6, ROWS, "changes")
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    (info,) = [each for each in store.list() if each.step == 4]
    expected = store.load(info).groups["model"]
    from unisono.state.weight_files import read_weights

    for ranks in (1, 3):
        found = read_weights(tmp_path / "run" / f"loaded-{ranks}.safetensors", key=None)
        assert all(torch.equal(found[name], expected[name]) for name in found) and "words.weight" in found
