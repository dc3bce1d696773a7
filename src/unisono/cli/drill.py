"""`unisono drill`: a fire drill on a script. It parses, and shows what `unisono.drill` does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

import click

from unisono.cli import reading
from unisono.cli.drill_screen import Screen
from unisono.cli.flags import Flag, FlagCommand, Reader
from unisono.cli.run import environment_of, job_of, run
from unisono.cli.run_flags import FLAGS
from unisono.drill.drill_errors import DrillFailedError, NoDrillError
from unisono.drill.fault_plan import KINDS
from unisono.drill.injector import Resize, Strike
from unisono.drill.run_drill import Drill, Outcome
from unisono.errors import LaunchError
from unisono.launch import LaunchJob, check_target
from unisono.launch.launch_job import Output
from unisono.launch.preflight import check_machine
from unisono.watch.figures import plural

__all__ = ["drill"]

_DRILL = "Drill"
_MOST_DIGITS = 6
_PASSED = (
    "nproc_per_node",
    "module",
    "start_method",
    "preload",
    "pass_local_rank",
    "virtual_local_rank",
    "numa_binding",
    "cpu_backend",
    "check",
    "shutdown_timeout",
    "spares",
)
"""The flags of `unisono run` that mean the same here."""


def _read_faults(text: str) -> tuple[str, ...]:
    kinds = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if unknown := [name for name in kinds if name not in KINDS]:
        raise ValueError(f"has {', '.join(map(repr, unknown))}, which is no fault: give some of {', '.join(KINDS)}")
    return kinds


def _read_every(text: str) -> int:
    if (every := reading.read_count(text)) < 1:
        raise ValueError("is not a number of steps: give 1 or more")
    return every


def _read_sizes(text: str) -> tuple[int, ...]:
    sizes = [part.strip() for part in text.split(",")]
    if not all(size.isascii() and size.isdigit() and int(size[:_MOST_DIGITS]) > 0 for size in sizes):
        raise ValueError("is no list of numbers of ranks: give it as 2,4,1")
    return tuple(map(int, sizes))


_FLAGS = (
    Flag(
        ["--faults"],
        section=_DRILL,
        torchruns=False,
        type=Reader(_read_faults),
        default=",".join(KINDS),
        metavar="KINDS",
        help="The faults: "
        + "; ".join(f"{kind.name}: {kind.what}" for kind in KINDS.values())
        + f".  [{','.join(KINDS)}]",
    ),
    Flag(
        ["--every"],
        section=_DRILL,
        torchruns=False,
        type=Reader(_read_every),
        default="5",
        metavar="STEPS",
        help="One fault in so many steps, at a random moment of them.  [5]",
    ),
    Flag(
        ["--seed"],
        section=_DRILL,
        torchruns=False,
        type=Reader(reading.read_count),
        default="0",
        metavar="N",
        help="Draws the faults, their ranks and moments.  [0]",
    ),
    Flag(
        ["--scale"],
        section=_DRILL,
        torchruns=False,
        type=Reader(_read_sizes),
        default=(),
        metavar="RANKS",
        help="Change the number of ranks in mid-run to these in turn, such as 2,4,1.  [never]",
    ),
    Flag(
        ["--stuck-timeout"],
        section=_DRILL,
        torchruns=False,
        type=Reader(reading.read_seconds),
        metavar="SECONDS",
        help="Kill a rank for which others have waited so long.  [5, or more if steps take long]",
    ),
    Flag(
        ["--json"],
        section=_DRILL,
        torchruns=False,
        into="json_file",
        metavar="FILE",
        help="Write the table and the verdict to this file, too.",
    ),
    Flag(
        ["--keep"],
        section=_DRILL,
        torchruns=False,
        metavar="DIR",
        help="Keep events, checkpoints and output of all runs here.  [a temporary folder, kept if the drill fails]",
    ),
)


@click.command(
    cls=FlagCommand,
    short_help="Try how a script survives faults, on this machine.",
    params=[
        *_FLAGS,
        *(flag for flag in FLAGS if flag.name in _PASSED),
        click.Argument(["command"], nargs=-1, type=click.UNPROCESSED, metavar="PROGRAM [ARGUMENTS]..."),
    ],
)
def drill(command: tuple[str, ...], json_file: str | None, keep: str | None, **given: Any) -> int:
    """Try how a script survives faults: the result must keep its bits.

    PROGRAM, a script with a Trainer, runs twice undisturbed, and once while its ranks are killed, stopped and so on, at
    random moments. A row tells what became of each fault. The exit code is 0 if losses and the state at the end are
    equal to the bit, 1 if they are not or a run fails. Checkpoints of PROGRAM are neither read nor written.

    \b
    unisono drill -n 4 train.py --epochs 2
    unisono drill -n 2 --faults kill,stop --every 10 --seed 1 train.py
    """
    if not command:
        raise click.UsageError("no program given, for example: unisono drill -n 4 train.py")
    job = _job_of(given, command)
    try:
        check_target(job)
    except SyntaxError as error:
        traceback.print_exception(type(error), error, None)
        return 1
    check_machine(job, environment=os.environ)
    if json_file is not None:
        _write(json_file, "")
    folder = _folder(keep)
    screen = Screen()
    screen.begin(
        f"{Path(job.target).name} on {job.ranks} ranks, seed {given['seed']}, {', '.join(given['faults'])}: one every "
        f"{plural(given['every'], 'step')}"
    )
    one = Drill(
        job,
        kinds=given["faults"],
        every=given["every"],
        seed=given["seed"],
        sizes=given["scale"],
        environment=os.environ | environment_of(given),
        folder=folder,
        reporter=screen,
    )
    reason, keeps = "", keep is not None
    try:
        with _terminated_as_interrupt():
            one.run()
        screen.verdict(one.outcome)
        keeps |= bool(one.outcome.differences)
    except DrillFailedError as error:
        reason, keeps = str(error), True
        screen.failed(reason, error.report)
    except NoDrillError as error:
        raise LaunchError(str(error)) from error
    finally:
        screen.clear()
        if keeps:
            screen.kept(str(folder))
        else:
            shutil.rmtree(folder)
    facts = _facts(job, given, one.outcome, reason)
    if json_file is not None:
        _write(json_file, json.dumps(facts, indent=1) + "\n")
    return 0 if facts["equal"] else 1


def _job_of(given: Mapping[str, Any], command: tuple[str, ...]) -> LaunchJob:
    """Return the job of all runs.

    Raises:
        UsageError: The flags contradict each other, or there is only one rank.
    """
    defaults = run.make_context("run", [command[0]]).params
    try:
        job = job_of({**defaults, **given}, command)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if job.hosts is not None:
        raise click.UsageError("a drill runs on one machine: leave --nnodes out, and unset PET_NNODES")
    if job.ranks == 1:
        raise click.UsageError("a drill needs at least 2 ranks, as nobody goes on after the death of the only one")
    return replace(job, output=Output(), stdin=None, max_restarts=0, recover=True, hang_abort_s=None)


def _folder(keep: str | None) -> Path:
    """Make the folder of the runs.

    Raises:
        LaunchError: It cannot be written, or is not empty.
    """
    try:
        if keep is None:
            return Path(tempfile.mkdtemp(prefix="unisono-drill-"))
        folder = Path(keep).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise LaunchError(f"--keep {keep!r} is not empty: name a new folder, as every run of a drill begins anew")
        (folder / ".drill").touch()
        (folder / ".drill").unlink()
    except OSError as error:
        raise LaunchError(
            f"the folder of the drill cannot be written: {error.strerror} ({error.filename}); name another by --keep"
        ) from error
    return folder


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise LaunchError(f"--json {path!r} cannot be written: {error.strerror}; name another file") from error


def _facts(job: LaunchJob, given: Mapping[str, Any], outcome: Outcome, reason: str) -> dict[str, Any]:
    """Return all that a drill has found, for programs."""
    return {
        "program": job.target,
        "arguments": list(job.arguments),
        "ranks": job.ranks,
        "seed": given["seed"],
        "every": given["every"],
        "stuck_timeout_s": outcome.stuck_s,
        "equal": not reason and not outcome.differences,
        "reason": reason,
        "differences": outcome.differences,
        "digests": outcome.digests,
        "runs": [asdict(facts) for facts in outcome.runs],
        "planned": outcome.planned,
        "faults": [_facts_of_fault(each) for each in outcome.done if isinstance(each, Strike)],
        "changes": [
            {
                "ranks": each.change.ranks,
                "before": each.before,
                "step": each.step,
                "waited_s": each.waited_s,
                "problem": each.problem or None,
            }
            for each in outcome.done
            if isinstance(each, Resize)
        ],
    }


def _facts_of_fault(strike: Strike) -> dict[str, Any]:
    return {
        "fault": strike.fault.kind,
        "rank": strike.fault.rank,
        "step": strike.step,
        "time": strike.time_s,
        "phase": strike.phase or None,
        "ended": strike.ended or None,
        "replaced": list(strike.ranks),
        "noticed_s": strike.noticed_s,
        "script_s": strike.script_s,
        "next_step_s": strike.resumed_s,
        "repeated": strike.repeated,
    }


@contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the drill with all its processes, as Ctrl-C does."""

    def end(signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    handled = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    earlier = {each: signal.signal(each, end) for each in handled}
    try:
        yield
    finally:
        for each, handler in earlier.items():
            signal.signal(each, handler)
