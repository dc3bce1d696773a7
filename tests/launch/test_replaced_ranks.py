"""A rank that dies is replaced while the others wait, if they have said that they survive it.

The programs here have no Trainer: they arm, wait and join as one does. What becomes of a training is tested there.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher import Launcher
from printed import ranks_of

PREAMBLE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from unisono import recovery_link

link, rank, ranks = recovery_link.current, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def wait_for(condition):
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def gather(name):
    Path(f"{name}.{rank}").touch()
    wait_for(lambda: all(Path(f"{name}.{each}").exists() for each in range(ranks)))


def begin(step=417):
    # Only where all have armed may one of them die.
    link.arm(8)
    link.note("backward", step, 3)
    if not link.is_new:
        gather("begun")


def join(least=1):
    wait_for(lambda: link.membership().number >= least)
    while True:
        number = link.membership().number
        Path(f"at{number}.{rank}").touch()
        here = lambda: all(Path(f"at{number}.{each}").exists() for each in range(ranks))
        wait_for(lambda: link.membership().number != number or here())
        if link.membership().number == number:
            break
    link.joined(number)


def die(signum=signal.SIGKILL):
    os.kill(os.getpid(), signum)
    time.sleep(60)
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(warm_launcher: Launcher) -> Run:
    """Run a program behind the preamble; return exit code, standard output and standard error as running text."""

    def run(program: str, *flags: str, ranks: int = 3) -> tuple[int, str, str]:
        (warm_launcher.folder / "program.py").write_text(PREAMBLE + program)
        done = warm_launcher.run("run", "-n", str(ranks), *flags, "program.py")
        return done.returncode, done.stdout, " ".join(done.stderr.split())

    return run


def by_rank(out: str) -> dict[int, str]:
    """The last line that each rank printed, alone or together with others."""
    return {rank: line.partition("] ")[2] for line in out.splitlines() for rank in ranks_of(line)}


def test_a_killed_rank_is_replaced_and_the_job_goes_on(run, warm_launcher):
    program = """
begin()
pid = os.getpid()
if rank == 1 and not link.is_new:
    print("first", flush=True)
    die()
join()
print(os.getpid() == pid, link.is_new, *link.membership()[:2], flush=True)
"""
    code, out, err = run(program, "--log-dir", "logs", "--rdzv-id", "a")
    assert code == 0, err
    assert by_rank(out) == {0: "True False 1 (1,)", 1: "True True 1 (1,)", 2: "True False 1 (1,)"}
    assert err.count("replaced") == 1
    assert "unisono: rank 1 was killed by SIGKILL in backward of step 418; replaced, 0." in err
    # The log of the rank has what both processes printed.
    log = warm_launcher.folder / "logs" / "a" / "attempt_0" / "1" / "stdout.log"
    assert log.read_text().splitlines() == ["first", "True True 1 (1,)"]


@pytest.mark.parametrize(
    "dying", [pytest.param((0, 2), id="two", marks=pytest.mark.soak), pytest.param((1, 2, 3), id="all but one")]
)
def test_ranks_that_die_together_are_replaced(run, dying):
    program = f"""
begin()
if rank in {dying} and not link.is_new:
    die()
join()
wait_for(lambda: len(link.membership().ranks) == {len(dying)})
join()
"""
    code, _, err = run(program, ranks=4)
    assert code == 0, err
    names = "ranks 0, 2" if len(dying) == 2 else "ranks 1-3"
    assert f"{names} were killed by SIGKILL in backward of step 418; replaced, " in err
    assert err.count("replaced") == 1


def test_a_replacement_that_dies_is_replaced(run):
    program = """
if link.is_new and link.membership().number == 1:
    die(signal.SIGSEGV)
begin()
if rank == 0 and not link.is_new:
    die()
join(least=2)
print(link.membership().number, flush=True)
"""
    code, out, err = run(program)
    assert code == 0, err
    assert by_rank(out) == dict.fromkeys(range(3), "2")
    assert (
        "rank 0 was killed by SIGKILL in backward of step 418, then rank 0 was killed by SIGSEGV before it had" in err
    )


def test_a_rank_that_dies_while_another_is_replaced_is_replaced_too(run):
    program = """
begin()
if rank == 0 and not link.is_new:
    die()
if rank == 2 and not link.is_new:
    wait_for(lambda: link.membership().number == 1)
    link.note("recovery", 417)
    die()
join(least=2)
print(link.membership().ranks, flush=True)
"""
    code, out, err = run(program)
    assert code == 0, err
    assert by_rank(out) == dict.fromkeys(range(3), "(0, 2)")
    assert "then rank 2 was killed by SIGKILL while it waited for a new rank, at step 418; replaced" in err


def test_if_all_die_the_job_starts_again_as_a_whole(run):
    program = """
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
link.arm(8)
if not link.is_new:
    assert link.membership()[:3] == (0, (), 0)
    gather("there" + attempt)
if attempt == "0":
    wait_for(lambda: rank == 0 or link.membership().number)
    die() if not link.is_new else wait_for(lambda: False)
if rank == 1 and not link.is_new:
    die()
join()
# Ranks meet under this number, in a store that outlives the attempt.
assert link.membership().number > 1
"""
    code, _, err = run(program, "--max-restarts", "1")
    assert code == 0, err
    assert "unisono: all 3 ranks were killed by SIGKILL; starting all 3 ranks again (restart 1 of 1)" in err
    assert "unisono: rank 1 was killed by SIGKILL; replaced, " in err


def test_an_exception_on_one_rank_is_shown_and_the_rank_replaced(run, warm_launcher):
    program = """
begin()
if rank == 2 and not link.is_new:
    [][7]
join()
"""
    code, _, err = run(program, "--log-dir", "logs", "--rdzv-id", "a")
    assert code == 0, err
    assert "unisono: rank 2 raised IndexError in backward of step 418; replaced, " in err
    assert "[2] IndexError: list index out of range" in err
    log = warm_launcher.folder / "logs" / "a" / "attempt_0" / "2" / "stderr.log"
    assert log.read_text().rstrip().endswith("IndexError: list index out of range")


def test_the_same_exception_on_all_ranks_is_reported_as_ever(run):
    program = """
begin()
raise ValueError("a mistake of the program")
"""
    code, _, err = run(program)
    assert code == 1
    assert "unisono: all 3 ranks failed: ValueError: a mistake of the program" in err
    assert "replaced" not in err and "note" not in err


def test_what_led_to_the_end_of_all_is_named(run, warm_launcher):
    program = """
begin()
if rank == 1:
    wait_for(lambda: False) if link.is_new else die()
wait_for(lambda: link.membership().number)
from unisono import PeerError
raise PeerError("rank 1 is gone")
"""
    code, _, err = run(program, "--log-dir", "logs", "--rdzv-id", "a")
    assert code == 128 + signal.SIGKILL
    assert "unisono: rank 1 was killed by SIGKILL" in err
    report = json.loads((warm_launcher.folder / "logs" / "a" / "attempt_0" / "report.json").read_text())
    assert report["cause_ranks"] == [1] and report["recoveries"] == []


@pytest.mark.parametrize(
    ("program", "flags", "code", "told"),
    [
        ("begin()\nsys.exit(3) if rank == 1 else time.sleep(60)", (), 3, "rank 1 exited with code 3"),
        ("begin()\ndie(signal.SIGINT) if rank == 1 else time.sleep(60)", (), 130, "KeyboardInterrupt"),
        ("gather('here')\ndie() if rank == 1 else time.sleep(60)", (), 137, "rank 1 was killed by SIGKILL"),
        ("not rank or link.arm(8)\ngather('here')\ndie() if rank == 1 else time.sleep(60)", (), 137, "rank 1 was"),
        (
            "link is None or begin()\ngather('here')\ndie() if rank == 1 else time.sleep(60)",
            ("--recover", "off"),
            137,
            "rank 1 was killed by SIGKILL",
        ),
    ],
    ids=["exit", "interrupt", "no Trainer", "not armed", "off"],
)
def test_what_is_not_replaced_ends_the_job(run, program, flags, code, told):
    ended, _, err = run(program, *flags)
    assert ended == code, err
    assert told in err
    assert "replaced" not in err


def test_a_rank_that_has_finished_cannot_be_waited_for(run):
    program = """
begin()
if rank == 0:
    sys.exit()
time.sleep(0.3)
die() if rank == 1 else time.sleep(60)
"""
    code, _, err = run(program)
    assert code == 137 and "replaced" not in err


def test_a_refusal_is_told(run):
    program = """
if rank == 0:
    link.refuse("train.py:7 calls all_reduce")
begin()
die() if rank == 1 else time.sleep(60)
"""
    code, _, err = run(program)
    assert code == 137
    assert err.count("no rank can be replaced alone: train.py:7 calls all_reduce") == 1


@pytest.mark.parametrize(
    ("death", "code", "told"),
    [
        ("die()", 137, "rank 1 is not replaced: this is the third death at step 418, virtual rank 3, samples 7, 9"),
        (
            "[][7]",
            1,
            "rank 1 is not replaced: IndexError for the second time at step 418, virtual rank 3, samples 7, 9",
        ),
    ],
    ids=["killed", "exception"],
)
def test_deaths_at_one_step_have_an_end(run, warm_launcher, death, code, told):
    program = f"""
begin()
link.note_samples("samples 7, 9")
while True:
    number = link.membership().number
    if number or link.is_new:
        join(number)
        gather(f"joined{{number}}")
    if rank == 1:
        {death}
    wait_for(lambda: link.membership().number != number)
"""
    ended, _, err = run(program, "--log-dir", "logs", "--rdzv-id", "a")
    assert ended == code, err
    assert err.count(told) == 1
    report = json.loads((warm_launcher.folder / "logs" / "a" / "attempt_0" / "report.json").read_text())
    assert [each["ranks"] for each in report["recoveries"]] == [[1]] * (2 if code == 137 else 1)
    documented = {"number", "ranks", "what", "seconds", "spares", "decided_ns", "script_s", "deaths"}
    assert all(each.keys() == documented and each["spares"] == 0 for each in report["recoveries"])
    assert report["recoveries"][0]["deaths"][0].keys() == {"rank", "how", "phase", "step", "time_ns"}
    assert told in report["remarks"]


def test_a_replacement_that_ends_before_it_joins_ends_the_job(run):
    program = """
if link.is_new:
    sys.exit()
begin()
die() if rank == 1 else time.sleep(60)
"""
    code, _, err = run(program)
    assert code == 137
    assert "note rank 1, which took the place of one that died, ended before it met the others" in err


def test_what_a_dead_rank_has_started_ends_with_it(run):
    program = """
begin()
if not link.is_new:
    child = subprocess.Popen(["sleep", "60"])
    Path(f"child.{rank}").write_text(str(child.pid))
    wait_for(lambda: all(Path(f"child.{each}").exists() for each in range(ranks)))
    if rank == 1:
        die()
join()
time.sleep(0.1)
alive = [Path(f"/proc/{Path(f'child.{each}').read_text()}").exists() for each in range(ranks)]
print(alive, flush=True)
gather("looked")
"""
    code, out, err = run(program)
    assert code == 0, err
    assert by_rank(out) == dict.fromkeys(range(3), "[True, False, True]")


def test_a_rank_that_waits_for_a_new_one_is_not_called_stuck(run):
    program = """
from unisono.activity import Observed, Wait
begin()
if rank == 1:
    time.sleep(1.8) if link.is_new else die()
    join()
else:
    with Observed(Wait("step", "trainer", ranks, 9)):
        join()
"""
    code, _, err = run(program, "--hang-report", "0.3", "--hang-abort", "0.6")
    assert code == 0, err
    assert "waited" not in err
    assert float(re.search(r"replaced, ([\d.]+) s", err)[1]) > 1.8, err


def test_ps_counts_recoveries_and_an_interrupt_ends_ranks_that_wait(warm_launcher):
    program = """
begin()
if rank == 1 and not link.is_new:
    die()
join()
gather("joined")
if rank == 1 and link.membership().number == 1:
    wait_for(lambda: Path("go").exists())
    die()
if rank == 1:
    Path("waiting").touch()
time.sleep(60)
"""
    (warm_launcher.folder / "program.py").write_text(PREAMBLE + program)
    with warm_launcher.start("run", "-n", "3", "program.py") as job:
        try:
            _wait_for(warm_launcher.folder / "joined.1")
            deadline_s = time.monotonic() + 20
            while "3 (1 recovery)" not in warm_launcher.run("ps").stdout:
                assert time.monotonic() < deadline_s
            (warm_launcher.folder / "go").touch()
            time.sleep(0.5)
            job.send_signal(signal.SIGINT)
            _, err = job.communicate(timeout=60)
        finally:
            job.kill()
    text = " ".join(err.decode().split())
    assert job.returncode == 130, text
    assert text.count("replaced") == 1
    assert "unisono: interrupted" in text


def _wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline_s, path
        time.sleep(0.01)
