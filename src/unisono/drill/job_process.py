"""A run of a drill in a process of its own, which is the agent of the job. What is printed goes to files.

The process has its own process group: Ctrl-C reaches the drill alone, which then ends the job.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from unisono.drill.job_log import REPLACED
from unisono.errors import LaunchError
from unisono.launch import LaunchJob, run_job
from unisono.launch.control import ask
from unisono.launch.linux import set_parent_death_signal
from unisono.variables import DRILL_VARIABLE

__all__ = ["JobProcess", "report_of"]

_GRACE_S = 3.0
"""How long a job may take to end before its ranks are killed."""
_REPORT_LINES = 60


class JobProcess:
    """A job that has been started.

    Args:
        job: Its description.
        environment: The variables of its ranks.
        folder: The folder of the run; it is made.
    """

    def __init__(self, job: LaunchJob, *, environment: Mapping[str, str], folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder, self._code = folder, None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # or the child would write the same once more
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            _run(job, {**environment, DRILL_VARIABLE: str(folder)}, folder, parent=parent)

    _code: int | None

    def poll(self) -> int | None:
        """Return the exit code of the launcher; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def ranks(self) -> list[dict[str, Any]]:
        """Ask for what the launcher knows of the ranks that run; see `Generation.describe_ranks`.

        Raises:
            LaunchError: The launcher does not answer.
        """
        answer = ask(self.pid, {"ask": "ranks"})
        found: list[dict[str, Any]] = [] if answer is None else answer["ranks"]
        return found

    def resize(self, ranks: int) -> str:
        """Ask for another number of ranks; return why that is not possible, or "" if it is.

        Raises:
            LaunchError: The launcher does not answer.
        """
        answer = ask(self.pid, {"ask": "scale", "ranks": ranks})
        return "the run has ended" if answer is None else str(answer["problem"])

    def resizing(self) -> dict[str, Any]:
        """Return the state of the change of the number of ranks; see `Scaling.status`.

        Raises:
            LaunchError: The launcher does not answer.
        """
        return ask(self.pid, {"ask": "scaling"}) or {"state": "idle", "problem": "the run has ended"}

    def end(self) -> None:
        """End the job, and return when nothing of it is left."""
        for signum, patience_s in ((signal.SIGINT, _GRACE_S), (signal.SIGINT, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
            deadline_s = time.monotonic() + patience_s
            if self.poll() is None:
                os.kill(self.pid, signum)
            while self.poll() is None and time.monotonic() < deadline_s:
                time.sleep(0.01)


def report_of(folder: Path) -> str:
    """Return the end of what a run has printed to standard error, where its report is."""
    lines = (folder / "stderr.log").read_text(errors="replace").rstrip().splitlines()
    return "\n".join(lines[-_REPORT_LINES:])


def _run(job: LaunchJob, environment: Mapping[str, str], folder: Path, *, parent: int) -> NoReturn:
    """Run the job in this process, and end it."""
    code = 1
    os.setpgid(0, 0)
    set_parent_death_signal(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with (folder / "stdout.log").open("w") as stdout, (folder / "stderr.log").open("w") as stderr:
        try:
            if os.getppid() == parent:
                with (folder / REPLACED).open("a", buffering=1) as replaced:
                    code = run_job(
                        job,
                        environment=environment,
                        stdout=stdout,
                        stderr=stderr,
                        on_recovery=lambda entry: print(json.dumps(entry), file=replaced),
                    )
        except LaunchError as error:
            print(f"unisono: {error}", file=stderr)
            code = 2
        except BaseException:  # the top level of this process: nothing above may go on in it
            traceback.print_exc(file=stderr)
        with suppress(OSError):  # a full disk
            stdout.flush()
            stderr.flush()
        os._exit(code)
