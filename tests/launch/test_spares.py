"""Spare processes take the place of ranks that die, and are not noticed before."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch, unisono
from torch import nn

def children():
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and parent_of(pid) == os.getppid()]

def parent_of(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0

print("on the way", flush=True)
is_spare = os.environ["RANK"] == os.environ["WORLD_SIZE"]
# BEFORE
torch.manual_seed(0)
x = torch.randn(48, 8)
data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 2))
Path(f"made.{os.getpid()}").touch()
trainer = unisono.Trainer(
    model, torch.optim.AdamW(model.parameters()), virtual_ranks=6, progress=False, engine="ENGINE"
)
rank = unisono.rank()

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

def await_spares(count=1):
    # Wait until that many spare processes have come to their Trainer, those that have ended included.
    end_s = time.monotonic() + 30
    while len(list(Path().glob("made.*"))) < trainer.world_size + count and time.monotonic() < end_s:
        time.sleep(0.01)
    time.sleep(0.05)

def once(name):
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def die():
    os.kill(os.getpid(), signal.SIGKILL)

for epoch in trainer.epochs(2):
    for batch in trainer.batches(data, batch_size=12):
        step = trainer.steps_done
        # INSIDE
        trainer.step(loss, batch)
print("place", rank, os.environ["RANK"], os.environ["LOCAL_RANK"], trainer.recovered, flush=True)
if rank == 0:
    print("weights sha256:", trainer.digest(), flush=True)
"""


def script(inside: str = "pass", *, before: str = "", engine: str = "auto") -> str:
    return SCRIPT.replace("# BEFORE", before).replace("# INSIDE", inside).replace("ENGINE", engine)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("engine", "dying"), [("shared", 0), ("collective", 1)])
def test_a_spare_takes_the_place_of_a_killed_rank(run_ranks, here, engine, dying):
    whole = run_ranks(1, script(engine="auto"))
    for path in here.glob("made.*"):
        path.unlink()
    inside = f"""if step == 3 and once(f"there.{{rank}}"):
            await_spares()
            if rank == {dying}:
                die()"""
    job = run_ranks(3, script(inside, engine=engine), flags=("--spares", "1"))
    assert job.sha() == whole.sha()
    assert re.search(
        rf"rank {dying} was killed by SIGKILL in the loop, after step 3; replaced by a spare, \d+\.\d\d s", job.said
    )
    assert f"place {dying} {dying} {dying} True" in job.lines(dying)
    # What it printed on its way is the rank's, and what the next one printed is nobody's.
    assert job.lines(dying).count("on the way") == 2
    assert sum(job.lines(rank).count("on the way") for rank in range(3)) == 4


def test_of_two_that_die_at_once_one_is_replaced_by_a_spare_and_the_next_one_as_well(run_ranks, here):
    inside = """if step == 2 and once(f"there.{rank}"):
            await_spares()
            if rank < 2:
                die()
        if step == 4 and once(f"again.{rank}") and rank == 2:
            die()"""
    job = run_ranks(3, script(inside), flags=("--spares", "1"))
    assert "ranks 0-1 were killed by SIGKILL in the loop, after step 2; replaced, 1 of 2 by a spare, " in job.said
    assert "rank 2 was killed by SIGKILL in the loop, after step 4; replaced" in job.said


def test_a_spare_that_is_ended_is_made_again(run_ranks, here):
    inside = """if step == 2 and once(f"there.{rank}"):
            await_spares()
            if rank == 0:
                spare = max(pid for pid in children() if Path(f"made.{pid}").exists())
                os.kill(spare, signal.SIGTERM)
                await_spares(2)
                die()"""
    job = run_ranks(2, script(inside), flags=("--spares", "1"))
    assert job.said.count("unisono: a spare rank was killed by SIGTERM; another one is made") == 1
    assert "replaced by a spare" in job.said


@pytest.mark.soak
def test_spares_that_are_killed_again_and_again_come_to_an_end(run_ranks, here):
    inside = """if step == 2:
            end_s = time.monotonic() + 30
            while len(ended := list(Path().glob("ended.*"))) < 5 and time.monotonic() < end_s and rank == 0:
                time.sleep(0.05)
                for path in Path().glob("made.*"):
                    spare = int(path.suffix[1:])
                    if spare in children() and not Path(f"rank.{spare}").exists() and sleeps(spare):
                        os.kill(spare, signal.SIGKILL)
                        Path(f"ended.{spare}").touch()
            time.sleep(1.5 * (rank == 0))"""
    before = """
def sleeps(pid):
    # In a read of its socket, where it waits for a rank.
    time.sleep(0.1)
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"

if not is_spare:
    Path(f"rank.{os.getpid()}").touch()"""
    job = run_ranks(2, script(inside, before=before), flags=("--spares", "1"))
    assert job.said.count("unisono: a spare rank was killed by SIGKILL; another one is made") == 4
    told = "a spare rank was killed by SIGKILL; 5 have died within 300 s while they waited, so the job goes on without"
    assert job.said.count(told) == 1
    assert len(list(here.glob("made.*"))) == 7  # two ranks, five spares


def test_there_are_spares_again_after_a_restart_of_all_ranks(run_ranks, here):
    inside = """if step == 2 and once(f"there.{rank}"):
            Path(f"pid.{rank}").write_text(str(os.getpid()))
            await_spares()
            while rank == 1 or not Path("pid.1").exists():
                time.sleep(0.01)
            for path in Path().glob("made.*"):
                path.unlink()
            os.kill(int(Path("pid.1").read_text()), signal.SIGKILL)
            die()
        if step == 3 and once(f"again.{rank}"):
            await_spares()
            if rank == 1:
                die()"""
    job = run_ranks(2, script(inside), flags=("--spares", "1", "--max-restarts", "1"))
    assert job.said.count("starting all 2 ranks again (restart 1 of 1)") == 1
    assert "unisono: rank 1 was killed by SIGKILL in the loop, after step 3; replaced by a spare, " in job.said


@pytest.mark.soak
def test_a_spare_that_is_a_new_interpreter_takes_the_place_of_a_rank(run_ranks, here):
    inside = """if step == 3 and once(f"there.{rank}"):
            await_spares()
            if rank == 0:
                die()"""
    # What children of a rank inherit: nothing of the launcher's.
    before = """from unisono.variables import EVENTS_VARIABLE
if EVENTS_VARIABLE in os.environ:
    print("inherited", os.get_inheritable(int(os.environ[EVENTS_VARIABLE])), flush=True)"""
    job = run_ranks(2, script(inside, before=before), flags=("--spares", "1", "--start-method", "spawn"))
    assert job.sha() == run_ranks(1, script()).sha()
    assert "rank 0 was killed by SIGKILL in the loop, after step 3; replaced by a spare, " in job.said
    assert "inherited False" in job.lines(0) and "inherited True" not in job.out


def test_spares_that_fail_are_told_and_come_to_an_end(run_ranks, here):
    before = """if is_spare:
    Path(f"failed.{os.getpid()}").touch()
    raise ValueError("no room for a spare")"""
    inside = """if step == 2:
            while len(list(Path().glob("failed.*"))) < 2:
                time.sleep(0.01)
            time.sleep(0.3)"""
    job = run_ranks(2, script(inside, before=before), flags=("--spares", "1"))
    assert "unisono: a spare rank failed: ValueError: no room for a spare; another one is made" in job.said
    assert (
        "unisono: a spare rank failed: ValueError: no room for a spare, as the one before; "
        "the job goes on without spare ranks" in job.said
    )
    assert len(list(here.glob("failed.*"))) == 2
    assert "Traceback" not in job.err


def test_spares_that_are_of_no_use_end(run_ranks, here):
    inside = """if step == 2:
            await_spares()
            unisono.comm.barrier()
        if step == 5 and once(f"there.{rank}"):
            end_s = time.monotonic() + 30
            while len(children()) > 2 and time.monotonic() < end_s:
                time.sleep(0.01)
            print("others", len(children()) - 2, flush=True)"""
    job = run_ranks(2, script(inside), flags=("--spares", "1"))
    assert job.said.count("unisono: spare ranks are of no use: no rank can be replaced alone: ranks call coll") == 1
    assert job.lines(0).count("others 0") == 1


def test_a_script_without_a_trainer_has_no_spares(run_ranks):
    job = run_ranks(2, 'import time; time.sleep(0.4); print("here", flush=True)', flags=("--spares", "1"))
    assert [job.lines(rank) for rank in range(2)] == [["here"], ["here"]] and "spare" not in job.said


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--spares", "-1"), "-1"),
        (("--spares", "x"), "x"),
        (("--spares", "1", "--recover", "off"), "--spares 1 and --recover off exclude each other"),
        (("--spares", "1", "--virtual-local-rank"), "--spares 1 and --virtual-local-rank exclude each other"),
        (("--spares", "1000000"), "2 ranks and 1000000 spare ones need 8000064 open files"),
    ],
)
def test_spares_that_cannot_be_are_refused(run_ranks, flags, told):
    job = run_ranks(2, "pass", code=None, flags=flags)
    assert job.code != 0 and told in job.said and "Traceback" not in job.err
    assert job.code != -signal.SIGKILL
