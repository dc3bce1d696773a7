"""What a run goes on with after one of its ranks was replaced: the scale of losses, a full disk, SIGTERM."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from unisono.state.checkpoint_store import CheckpointStore

SCALED = """
import os, signal, sys
from pathlib import Path
import torch, unisono
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

RANK, ENGINE, FOLDER = int(os.environ.get("RANK", "0")), sys.argv[1], Path(sys.argv[2])
DEATHS = {1: (1, "loss"), 2: (0, "stepped"), 6: (1, "loss"), 9: (0, "loss")} if len(sys.argv) > 3 else {}


def at(place):
    rank, where = DEATHS.get(trainer.steps_done, (-1, ""))
    died = FOLDER / f"died{trainer.steps_done}"
    if (rank, where) == (RANK, place) and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Skipped:
    steps = ()

    def state_dict(self):
        return {"steps": list(self.steps)}

    def load_state_dict(self, state):
        self.steps = tuple(state["steps"])


def loss(model, batch):
    at("loss")
    # Its gradient overflows until the scale has come down, and again after some steps.
    size = 1e3 if trainer.steps_done < 7 else 1e6
    return size * F.cross_entropy(model(batch[0]), batch[1], reduction="none")


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
optimizer, skipped = torch.optim.AdamW(model.parameters(), lr=0.01), Skipped()
x = torch.randn(96, 8)
data = TensorDataset(x, (x.sum(1) > 0).long())
trainer = unisono.Trainer(model, optimizer, virtual_ranks=6, autocast="fp16", stateful={"skipped": skipped},
                          engine=ENGINE, progress=False)
for epoch in trainer.epochs(2):
    for batch in trainer.batches(data, batch_size=12):
        result = trainer.step(loss, batch)
        if result.skipped:
            skipped.steps += (trainer.steps_done,)
        at("stepped")
(runner,) = trainer._parts.runners.values()
print(trainer.digest(), skipped.steps, runner.scaler.state_dict(), flush=True)
"""


@pytest.fixture(scope="module")
def run_alone(fork_python, tmp_path_factory):
    """Run a script on one rank that nobody disturbs, once for each; gives what it prints."""
    known: dict[str, list[str]] = {}

    def run(source: str, *args: object) -> list[str]:
        if source not in known:
            folder = tmp_path_factory.mktemp("calm")
            (folder / "script.py").write_text(source)
            known[source] = fork_python(folder / "script.py", "auto", folder, *args)
        return known[source]

    return run


@pytest.mark.parametrize("engine", ["shared", pytest.param("collective", marks=pytest.mark.soak)])
def test_the_scale_of_losses_and_skipped_steps_are_those_of_an_undisturbed_run(run_ranks, run_alone, tmp_path, engine):
    calm = run_alone(SCALED)
    assert len(json.loads(re.search(r"\((.*?)\)", calm[0]).expand(r"[\1]"))) >= 4, calm
    job = run_ranks(2, SCALED, engine, tmp_path, "disturbed")
    assert [job.lines(rank) for rank in range(2)] == [calm] * 2
    assert job.said.count("; replaced") == len([*tmp_path.glob("died*")]) == 4


FULL_DISK = """
import os, resource, signal, sys
from pathlib import Path
import torch, unisono
from torch import nn
from torch.utils.data import TensorDataset

RANK, ENGINE, FOLDER, DYING = int(os.environ.get("RANK", "0")), sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
LIMIT = resource.getrlimit(resource.RLIMIT_FSIZE)


def loss(model, batch):
    if trainer.steps_done == 5 and RANK == DYING and not (FOLDER / "died").exists():
        (FOLDER / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return model(batch[0]).square().sum(1)


class Large:
    def state_dict(self):
        return {"values": torch.arange(1_000_000)}

    def load_state_dict(self, state):
        pass


torch.manual_seed(0)
model = nn.Linear(8, 2)
data = TensorDataset(torch.randn(48, 8))
trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), virtual_ranks=2, progress=False,
                          engine=ENGINE, directory=FOLDER / "run", stateful={"large": Large()},
                          checkpoints=unisono.Checkpoints(every_steps=1))
for epoch in trainer.epochs(2):
    for batch in trainer.batches(data, batch_size=8):
        # No file may grow beyond 4 MB from step 4 to step 8: what a full disk does, without one.
        is_full = 3 <= trainer.steps_done < 8 and DYING >= 0
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, LIMIT[1]) if is_full else LIMIT)
        trainer.step(loss, batch)
        if RANK == 0 and trainer.steps_done == 7 and DYING >= 0:
            print("kept", *sorted(each.name for each in (FOLDER / "run/checkpoints").glob("step-*")), flush=True)
print("weights sha256:", trainer.digest(), flush=True)
"""


@pytest.mark.parametrize(("engine", "dying"), [("shared", 0), ("collective", 1)])
def test_a_rank_is_replaced_while_the_disk_is_full(run_ranks, run_alone, tmp_path, engine, dying):
    calm = run_alone(FULL_DISK, -1)
    job = run_ranks(2, FULL_DISK, engine, tmp_path, dying)
    assert job.said.count(f"rank {dying} was killed by SIGKILL in forward of step 6; replaced") == 1, job.said
    assert job.sha() == calm[-1].split()[-1]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    at = [event["event"] for event in events].index("recovery")
    for part in (events[:at], events[at:]):  # told before and after
        assert any("checkpoint not written" in event.get("message", "") for event in part)
    assert job.said.count("Older checkpoints are untouched") >= 2
    # Those from before the disk was full are there while it is, and others follow when there is room again.
    assert job.lines(0)[0].startswith("kept step-000000001 step-000000002")
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert [info.step for info in store.list()] == [12, 11, 10]
    for info in store.list():
        store.verify(info)
    assert {path.name for path in store.folder.iterdir()} == {info.path.name for info in store.list()}


ASKED_TO_END = """
import os, signal, sys, time
from pathlib import Path
import torch, unisono
from torch import nn
from torch.utils.data import TensorDataset

RANK, ENGINE, FOLDER, ENDING = int(os.environ.get("RANK", "0")), sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])


def loss(model, batch):
    return model(batch[0]).square().sum(1)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2))
data = TensorDataset(torch.randn(48, 8))
trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), virtual_ranks=4, progress=False,
                          engine=ENGINE, directory=FOLDER / "run" if "directory" in sys.argv else None)
try:
    for epoch in trainer.epochs(4):
        for batch in trainer.batches(data, batch_size=8):
            trainer.step(loss, batch)
            if RANK == ENDING and trainer.steps_done == 5 and not (FOLDER / "asked").exists():
                (FOLDER / "asked").touch()
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.12 * (ENDING >= 0 and (FOLDER / "asked").exists() and not trainer.recovered))
except SystemExit as end:
    print("left", end.code, flush=True)
    raise
print("weights sha256:", trainer.digest(), flush=True)
"""


@pytest.mark.parametrize(
    ("engine", "ending", "keeps"),
    [
        ("collective", 0, True),
        ("shared", 1, False),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in [("shared", 1, True), ("collective", 0, False)]),
    ],
)
def test_a_rank_that_is_asked_to_end_is_replaced(run_ranks, run_alone, tmp_path, engine, ending, keeps):
    """With a directory, it ends itself where its state is complete."""
    calm = run_alone(ASKED_TO_END, -1)
    folder = ("directory",) if keeps else ()
    job = run_ranks(2, ASKED_TO_END, engine, tmp_path, ending, *folder)
    if keeps:
        assert f"unisono: rank {ending} raised SystemExit for SIGTERM in the loop, after step " in job.said
    else:
        assert f"unisono: rank {ending} was killed by SIGTERM in the loop, after step 5; replaced" in job.said
    assert job.said.count("; replaced") == 1 and "Traceback" not in job.said
    assert (job.lines(ending)[0] == "left 143") == keeps
    assert job.sha() == calm[-1].split()[-1]


LATE = """
import os, signal, sys, threading, time
from pathlib import Path
import torch, unisono
from torch import nn
from torch.utils.data import TensorDataset
from unisono.launch.control import running_jobs

RANK, CASE, FOLDER = int(os.environ["RANK"]), sys.argv[1], Path(sys.argv[2])


def ask_to_end(process=None):
    os.kill(process or os.getpid(), signal.SIGTERM)


def launcher():
    process, launchers = os.getpid(), running_jobs()
    while process not in launchers:
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return process


torch.manual_seed(0)
model = nn.Linear(8, 2)
data = TensorDataset(torch.randn(16, 8))
trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), virtual_ranks=2, progress=False,
                          directory=FOLDER / "run")
for loop in range(2 if CASE == "two loops" else 1):
    for epoch in trainer.epochs(1 + 4 * loop):
        for batch in trainer.batches(data, batch_size=8):
            trainer.step(lambda model, batch: model(batch[0]).square().sum(1), batch)
            if trainer.steps_done == 2 and RANK == 1 and CASE != "shutdown" and not trainer.recovered:
                ask_to_end(launcher() if CASE == "all" else None)
                time.sleep(0.3 * (CASE == "all"))
            time.sleep(0.25 * loop)
    print("after the loop", flush=True)
if CASE == "shutdown" and RANK == 1:
    # The interpreter waits for this thread when the program is over.
    threading.Thread(target=lambda: (time.sleep(0.1), ask_to_end(), time.sleep(0.2))).start()
"""


@pytest.mark.parametrize("case", ["loop", "shutdown"])
def test_a_rank_that_is_asked_to_end_when_its_work_is_done_ends_as_its_program_does(run_ranks, tmp_path, case):
    job = run_ranks(2, LATE, case, tmp_path)
    assert [job.lines(rank) for rank in range(2)] == [["after the loop"]] * 2
    assert "replaced" not in job.said and "Traceback" not in job.said


AT_EXIT = """
import atexit, os, signal
atexit.register(os.kill, os.getpid(), signal.SIGTERM)  # what is registered first is called last
import torch, unisono
from torch import nn
from torch.utils.data import TensorDataset

model = nn.Linear(8, 2)
trainer = unisono.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.01), virtual_ranks=2, progress=False, directory="run"
)
for batch in trainer.batches(TensorDataset(torch.randn(16, 8)), batch_size=8):
    trainer.step(lambda model, batch: model(batch[0]).square().sum(1), batch)
    raise ValueError("of the loop")
"""


def test_a_program_that_fails_and_is_then_asked_to_end_shows_its_own_error_alone(tmp_path):
    (script := tmp_path / "script.py").write_text(AT_EXIT)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.returncode == 1, done.stderr
    assert "ValueError: of the loop" in done.stderr and "SystemExit" not in done.stderr, done.stderr


def test_a_rank_that_is_asked_to_end_in_the_last_step_of_a_loop_ends_in_the_next_one(run_ranks, tmp_path):
    job = run_ranks(2, LATE, "two loops", tmp_path)
    assert job.said.count("unisono: rank 1 raised SystemExit for SIGTERM in the loop, after step ") == 1
    assert [job.lines(rank)[-1] for rank in range(2)] == ["after the loop"] * 2


def test_a_job_that_is_asked_to_end_in_its_last_step_ends_where_its_loop_does(run_ranks, tmp_path):
    job = run_ranks(2, LATE, "all", tmp_path, code=143)
    assert not job.out and "unisono: SIGTERM received" in job.said, job.said


DROPPED = """
import gc, weakref
import torch, unisono
model = torch.nn.Linear(2, 2)
trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=2, progress=False)
parts = weakref.ref(trainer._recovery)
del trainer
gc.collect()
with unisono.main_first():
    print("gone", parts() is None, flush=True)
"""


def test_a_trainer_that_is_dropped_is_not_kept_for_its_recovery(run_ranks):
    job = run_ranks(2, DROPPED)
    assert [job.lines(rank) for rank in range(2)] == [["gone True"]] * 2
