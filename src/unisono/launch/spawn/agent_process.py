"""The process between a caller of `unisono.spawn` and its ranks: it runs the job, and ends it when the caller is gone.

It is the agent, as `unisono run` is for a script. Start reading at `main`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

from unisono.errors import LaunchError
from unisono.launch.agent import run_job
from unisono.launch.launch_job import LaunchJob
from unisono.launch.spawn.function_call import read_reports

__all__ = ["end_with_caller", "main"]


def main() -> None:
    """Run the job that the arguments describe as JSON, and exit with its code. Called by the interpreter."""
    facts = json.loads(sys.argv[1])
    packed, reports, events = facts["packed"], facts["reports"], facts["events"]
    for file in (events, facts["caller"]):
        os.set_inheritable(file, False)
    threading.Thread(target=end_with_caller, args=(facts["caller"],), daemon=True).start()

    def tell(rank: int, code: int) -> bool:
        """Send the rank that was the cause to the caller; return True if the caller has an exception of it to show."""
        os.write(events, json.dumps({"rank": rank, "code": code}).encode() + b"\n")
        return any(report.rank == rank and report.traceback is not None for report in read_reports(reports))

    job = LaunchJob(
        target="unisono.launch.spawn.rank_program",
        module=True,
        arguments=(str(packed), str(reports)),
        ranks=facts["ranks"],
        start_method=facts["start_method"],
        shutdown_timeout_s=30.0,
        has_flags=False,
        recover=False,
        files=(packed, reports, *facts["files"]),
    )
    try:
        code = run_job(job, environment=os.environ, stdout=sys.stdout, stderr=sys.stderr, on_failure=tell)
    except LaunchError as error:
        print(f"unisono: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


def end_with_caller(caller: int) -> None:
    """Wait until the caller's end of a pipe is closed, and end the job."""
    os.read(caller, 1)
    os.kill(os.getpid(), signal.SIGTERM)
