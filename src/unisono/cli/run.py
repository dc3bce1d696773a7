"""`unisono run`: start a program on several ranks, of this machine or of several.

`run_flags` has the flags; `job_of` makes a job of their values. Start reading at `run`.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from unisono.cli import reading
from unisono.cli.flags import FlagCommand
from unisono.cli.hosts import hosts_of
from unisono.cli.mpi import refuse_several_launchers
from unisono.cli.run_flags import FLAGS
from unisono.cli.scheduling import PLACE_TO_CHECK, check_scheduling, schedule
from unisono.cli.slurm import flags_of_slurm
from unisono.launch import LaunchJob, check_target, run_job
from unisono.launch.launch_job import Output
from unisono.launch.preflight import check_machine, with_log_folder
from unisono.variables import CHECK_VARIABLE, CPU_BACKEND_VARIABLE

__all__ = ["environment_of", "job_of", "run"]


@click.command(
    cls=FlagCommand,
    short_help="Run a program on several ranks, of this machine or of several.",
    params=[*FLAGS, click.Argument(["command"], nargs=-1, type=click.UNPROCESSED, metavar="PROGRAM [ARGUMENTS]...")],
)
@click.pass_context
def run(context: click.Context, /, command: tuple[str, ...], **given: Any) -> int:
    """Run a program on several ranks of this machine, or of several.

    PROGRAM is a Python script, or a module with -m; it finds its rank in the environment, as under torchrun. Each line
    that a rank prints gets the rank in front. If a rank fails, the others are ended and its exit code is returned.

    Flags are torchrun's, with hyphens or underscores, and its variables PET_NPROC_PER_NODE and so on give defaults.

    \b
    unisono run -n 4 train.py --lr 0.1
    unisono run -n auto -m package.train
    unisono run --nnodes 2 -n 8 --rdzv-endpoint host0:29500 train.py    # on each of two machines
    unisono run --on slurm --nnodes 2 -n 8 --time 2:00:00 train.py      # once, where sbatch is
    """
    if not command:
        raise click.UsageError("no program given, for example: unisono run -n 4 train.py")
    try:
        check_scheduling(given, context)
        refuse_several_launchers(given, os.environ)
        given |= flags_of_slurm(given, os.environ) if given["on"] is None else PLACE_TO_CHECK
        job = job_of(given, command)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        if given["on"] != "kubernetes":  # its programs are in an image
            check_target(job)
    except SyntaxError as error:
        traceback.print_exception(type(error), error, None)
        return 1
    if given["on"] is not None:
        return schedule(given, command, context)
    check_machine(job, environment=os.environ)
    if job.output.directory is None and (job := with_log_folder(job)).output.directory is not None:
        click.echo(f"unisono: log files in {job.output.directory}; --log-dir chooses another folder", err=True)
    environment = {**os.environ, **environment_of(given)}
    return run_job(job, environment=environment, stdout=sys.stdout, stderr=sys.stderr)


def environment_of(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that ranks get from the values of the flags. Without the flags, unisono.init() decides."""
    told = {CPU_BACKEND_VARIABLE: given["cpu_backend"]} if given["cpu_backend"] else {}
    if given["check"]:
        told[CHECK_VARIABLE] = "1"
    return told


def job_of(given: Mapping[str, Any], command: tuple[str, ...]) -> LaunchJob:
    """Return a job from the values of all flags, and the program with its arguments.

    Raises:
        ValueError: The flags contradict each other.
    """
    if given["hang_abort"] == 0:
        raise ValueError("--hang-abort 0 would end every job: give more than 0 seconds, or leave it out")
    if given["stuck_timeout"] == 0:
        raise ValueError("--stuck-timeout 0 would kill every rank: give more than 0 seconds, or leave it out")
    as_path = given["run_path"]
    hosts = hosts_of(given)
    # A spare process has no standard input, so it could not take the place of a rank that has it.
    is_only_rank = given["nproc_per_node"] == 1 and not given["spares"]
    return LaunchJob(
        target=command[0],
        arguments=command[1:],
        module=given["module"] and not as_path,
        python=as_path or not given["no_python"],
        ranks=given["nproc_per_node"],
        run_id=hosts.run_id if hosts is not None else "" if given["standalone"] else given["rdzv_id"] or "",
        role=given["role"],
        start_method="spawn" if given["start_method"] == "spawn" else "fork",
        preload=given["preload"],
        pass_local_rank=given["pass_local_rank"],
        stdin=0 if is_only_rank and given["stdin"] is None else given["stdin"],
        virtual_local_rank=given["virtual_local_rank"],
        master_port=0
        if given["standalone"] or hosts is not None
        else _port(given["rdzv_endpoint"], given["master_port"]),
        max_restarts=given["max_restarts"],
        recover=given["recover"] == "on",
        spares=given["spares"],
        servers=given["servers"],
        shutdown_timeout_s=given["shutdown_timeout"],
        hang_report_s=given["hang_report"],
        hang_abort_s=given["hang_abort"],
        stuck_timeout_s=given["stuck_timeout"],
        metrics=given["metrics"],
        signals=given["signals_to_handle"],
        numa_binding=given["numa_binding"],
        cpu_backend=given["cpu_backend"] or "gloo",
        hosts=hosts,
        output=_output(given, ranks=given["nproc_per_node"]),
    )


def _port(endpoint: reading.Endpoint | None, master_port: int | None) -> int:
    """Return the port of the endpoint or, if it has none, `--master-port`, as torchrun does."""
    if endpoint is not None and endpoint.port is not None:
        return endpoint.port
    return master_port or 0


def _output(given: Mapping[str, Any], *, ranks: int) -> Output:
    folder = given["log_dir"]
    shown = given["local_ranks_filter"]
    prefix = given["log_line_prefix_template"] or None
    if folder == os.devnull:  # as in torchrun, this means no log files
        return Output(shown=shown, prefix=prefix)
    redirects, tee = given["redirects"], given["tee"]
    if folder is not None and redirects is None and tee is None:
        tee = reading.read_streams("3")
    none = reading.read_streams("0")
    teed = reading.streams_of(tee or none, ranks=ranks)
    redirected = reading.streams_of(redirects or none, ranks=ranks)
    return Output(
        directory=None if folder is None else Path(folder),
        # A stream that is redirected and teed is shown, as in torchrun.
        redirected={rank: streams - teed[rank] for rank, streams in redirected.items()},
        teed=teed,
        shown=shown,
        prefix=prefix,
        stdout_filters=given["duplicate_stdout_filters"],
        stderr_filters=given["duplicate_stderr_filters"],
    )
