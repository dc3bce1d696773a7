"""`unisono run`: start a program on several ranks, of this machine or of several.

The flags are torchrun's and a few of our own. `FLAGS` lists them in the order of the help; `job_of` makes a job of
their values. Start reading at `run`.
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
from unisono.cli.flags import Flag, FlagCommand, Reader
from unisono.cli.hosts import hosts_of
from unisono.cli.mpi import refuse_several_launchers
from unisono.cli.scheduling import PLACE_TO_CHECK, SCHEDULING_FLAGS, check_scheduling, schedule
from unisono.cli.slurm import flags_of_slurm
from unisono.launch import LaunchJob, check_target, run_job
from unisono.launch.gpus import usable_gpus
from unisono.launch.launch_job import Output
from unisono.launch.preflight import check_machine, with_log_folder
from unisono.machine import usable_cores
from unisono.variables import CHECK_VARIABLE, CPU_BACKEND_VARIABLE

__all__ = ["FLAGS", "MEETING_FLAGS", "environment_of", "job_of", "run"]

_RANKS, _PROGRAM, _ENDS, _OUTPUT, _MEETING, _IGNORED = (
    "Ranks",
    "Program",
    "Failures, hangs and the end",
    "Output",
    "Where ranks meet",
    "Accepted for torchrun's sake, without effect",
)


def _read_ranks(text: str) -> int:
    return reading.read_ranks(text, cores=usable_cores, gpus=lambda: usable_gpus(os.environ))


def _refuse_log_plugin(_text: str) -> None:
    raise ValueError("is a plugin of torchrun: use --log-dir, --redirects and --tee")


FLAGS = (
    Flag(
        ["-n", "--nproc-per-node"],
        section=_RANKS,
        type=Reader(_read_ranks),
        default="1",
        metavar="N",
        help="Number of ranks; cpu: one per core, gpu: one per GPU, auto: GPUs if there are any, otherwise cores.  [1]",
    ),
    Flag(["--role"], section=_RANKS, default="default", metavar="NAME", help="ROLE_NAME that ranks find."),
    Flag(
        ["--virtual-local-rank"],
        section=_RANKS,
        is_flag=True,
        help="Each rank sees one GPU, as number 0, and has LOCAL_RANK 0.",
    ),
    Flag(
        ["--numa-binding"],
        section=_RANKS,
        torchruns=False,
        type=click.Choice(["node", "socket", "exclusive", "core-complex"]),
        help="Bind ranks to cores near their GPU.",
    ),
    Flag(["-m", "--module"], section=_PROGRAM, is_flag=True, help="PROGRAM is a module, as for python -m."),
    Flag(["--no-python"], section=_PROGRAM, is_flag=True, help="PROGRAM is not Python: execute it as it is."),
    Flag(
        ["--pass-local-rank"],
        section=_PROGRAM,
        torchruns=False,
        is_flag=True,
        help="Give PROGRAM --local-rank=N as its first argument, as torch.distributed.launch does.",
    ),
    Flag(
        ["--stdin"],
        section=_PROGRAM,
        torchruns=False,
        type=Reader(reading.read_count),
        metavar="RANK",
        help="This rank has the standard input, such as the terminal for breakpoint(); for the others it is empty.  "
        "[with one rank: 0]",
    ),
    Flag(
        ["--start-method"],
        section=_PROGRAM,
        type=click.Choice(["fork", "spawn", "forkserver"]),
        default="fork",
        help="fork (the same as forkserver): ranks are copies of a process that has imported torch. spawn: each starts "
        "an interpreter.  [fork]",
    ),
    Flag(
        ["--preload"],
        section=_PROGRAM,
        torchruns=False,
        multiple=True,
        metavar="MODULE",
        help="Import this module once, before ranks are forked. May be given again. It must start no thread and touch "
        "no GPU.",
    ),
    Flag(
        ["--cpu-backend"],
        section=_PROGRAM,
        torchruns=False,
        type=click.Choice(["gloo", "shm"]),
        help="Backend for CPU tensors where PROGRAM asks torch.distributed for gloo: gloo itself, or the shared "
        "memory of this machine.  [gloo] unisono.init() uses it, too, for backend auto.",
    ),
    Flag(
        ["--check"],
        section=_PROGRAM,
        torchruns=False,
        is_flag=True,
        help="Compare each call of unisono.comm between ranks before it is done; where they differ, all ranks say who "
        "called what where. It sets UNISONO_CHECK=1.",
    ),
    Flag(
        ["--max-restarts"],
        section=_ENDS,
        type=Reader(reading.read_count),
        default="0",
        metavar="K",
        help="How often all ranks are started anew after a failure.  [0]",
    ),
    Flag(
        ["--recover"],
        section=_ENDS,
        torchruns=False,
        type=click.Choice(["on", "off"]),
        default="on",
        help="Replace a rank that dies while the others wait, if PROGRAM trains with a Trainer.  [on]",
    ),
    Flag(
        ["--spares"],
        section=_ENDS,
        torchruns=False,
        type=Reader(reading.read_count),
        default="0",
        metavar="N",
        help="Keep N processes that have run PROGRAM up to its Trainer: one takes the place of a rank that dies.  [0]",
    ),
    Flag(
        ["--servers"],
        section=_ENDS,
        torchruns=False,
        type=Reader(reading.read_count),
        default="0",
        metavar="N",
        help="Start N processes that update the rows of PROGRAM's unisono.embedding.Tables.  [0]",
    ),
    Flag(
        ["--hang-report"],
        section=_ENDS,
        torchruns=False,
        type=Reader(reading.read_seconds),
        default="30",
        metavar="SECONDS",
        help="Say who waits for whom when a rank has waited this long in a collective; 0: never.  [30]",
    ),
    Flag(
        ["--hang-abort"],
        section=_ENDS,
        torchruns=False,
        type=Reader(reading.read_seconds),
        metavar="SECONDS",
        help="End the job after such a wait.  [never]",
    ),
    Flag(
        ["--stuck-timeout"],
        section=_ENDS,
        torchruns=False,
        type=Reader(reading.read_seconds),
        metavar="SECONDS",
        help="Kill a rank for which others have waited so long, so that it is replaced.  [never]",
    ),
    Flag(
        ["--metrics"],
        section=_OUTPUT,
        torchruns=False,
        type=Reader(reading.read_metrics_address),
        metavar="HOST:PORT",
        help="Serve the latest numbers of the job to Prometheus at this address, such as 127.0.0.1:9400.",
    ),
    Flag(
        ["--shutdown-timeout"],
        section=_ENDS,
        envvar=["PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"],
        type=Reader(reading.read_seconds),
        default="30",
        metavar="SECONDS",
        help="Time for ranks to end on their own when the job is ended, before they are killed.  [30]",
    ),
    Flag(
        ["--signals-to-handle"],
        section=_ENDS,
        type=Reader(reading.read_signals),
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        metavar="NAMES",
        help="Signals that are passed to ranks and end the job.  [SIGTERM,SIGINT,SIGHUP,SIGQUIT]",
    ),
    Flag(
        ["--log-dir"],
        section=_OUTPUT,
        metavar="DIR",
        help="Keep what ranks print in DIR/ID/attempt_0/RANK/stdout.log and stderr.log.",
    ),
    Flag(
        ["-r", "--redirects"],
        section=_OUTPUT,
        type=Reader(reading.read_streams),
        metavar="STREAMS",
        help="Print to log files only: 0 nothing, 1 stdout, 2 stderr, 3 both; or by rank, such as 0:1,1:3.",
    ),
    Flag(
        ["-t", "--tee"],
        section=_OUTPUT,
        type=Reader(reading.read_streams),
        metavar="STREAMS",
        help="Print to log files and here; written as for --redirects.  [with --log-dir: 3]",
    ),
    Flag(
        ["--local-ranks-filter"],
        section=_OUTPUT,
        type=Reader(reading.read_rank_list),
        metavar="RANKS",
        help="Show the output of these ranks only, such as 0,2.",
    ),
    *(
        Flag(
            [f"--duplicate-{stream}-filters"],
            section=_OUTPUT,
            type=Reader(reading.read_filters),
            default="",
            metavar="TEXTS",
            help=f"Copy teed lines that hold one of these texts to filtered_{stream}.log.",
        )
        for stream in ("stdout", "stderr")
    ),
    Flag(
        ["--nnodes"],
        section=_MEETING,
        type=Reader(reading.read_nodes),
        metavar="N or MIN:MAX",
        help="Number of machines. Each runs this command, with the same flags.  [1]",
    ),
    Flag(
        ["--rdzv-endpoint"],
        section=_MEETING,
        type=Reader(reading.read_endpoint),
        metavar="HOST:PORT",
        help="Where machines meet: one of them, and a port there. On one machine: --master-port in other words.",
    ),
    Flag(
        ["--rdzv-id"],
        section=_MEETING,
        metavar="ID",
        help="Name of the job: TORCHELASTIC_RUN_ID, and a folder in the log folder. Machines with the same name meet.  "
        "[drawn; on several machines: none]",
    ),
    Flag(
        ["--rdzv-backend"],
        section=_MEETING,
        type=Reader(reading.read_rendezvous),
        metavar="NAME",
        help="c10d numbers machines by their addresses, static by --node-rank.  [static with --node-rank, else c10d]",
    ),
    Flag(
        ["--node-rank"],
        section=_MEETING,
        type=Reader(reading.read_node_rank),
        metavar="R",
        help="Number of this machine, from 0, the machine of the endpoint.",
    ),
    Flag(
        ["--local-addr"],
        section=_MEETING,
        metavar="HOST",
        help="This machine's address for the others.  [the one from which it reaches the endpoint]",
    ),
    Flag(
        ["--rdzv-conf"],
        section=_MEETING,
        metavar="NAME=VALUE,...",
        help="Settings of torch's rendezvous, such as join_timeout=600, and host_timeout=5: seconds after which a "
        "silent machine counts as lost.",
    ),
    Flag(
        ["--rdzv-token-file"],
        section=_MEETING,
        torchruns=False,
        metavar="FILE",
        help="A file with a secret that all machines share, made by `unisono token`: others are refused.",
    ),
    Flag(
        ["--master-addr"],
        section=_MEETING,
        metavar="HOST",
        help="The machine of --rdzv-endpoint, in other words. On one machine, ranks meet at 127.0.0.1.",
    ),
    Flag(
        ["--master-port"],
        section=_MEETING,
        type=Reader(reading.read_port),
        metavar="PORT",
        help="Its port. On one machine: the port of the job's store on the loopback address.  [a free one]",
    ),
    Flag(
        ["--standalone"],
        section=_MEETING,
        is_flag=True,
        help="One machine: take a free port and a drawn ID, whatever the flags above say.",
    ),
    *SCHEDULING_FLAGS,
    Flag(["--monitor-interval"], section=_IGNORED, type=Reader(reading.read_seconds), metavar="SECONDS"),
    Flag(["--event-log-handler"], section=_IGNORED, metavar="NAME"),
    Flag(["--run-path"], section=_IGNORED, is_flag=True, help="PROGRAM is a script, also with --no-python or -m."),
    Flag(["--use-env"], section=_IGNORED, torchruns=False, is_flag=True, help="LOCAL_RANK is always there."),
    Flag(["--logs-specs"], section=_IGNORED, torchruns=False, type=Reader(_refuse_log_plugin), hidden=True),
)

MEETING_FLAGS = [flag for flag in FLAGS if flag.section == _MEETING]
"""The flags about machines, for other commands that run on each of them."""


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
    if folder == os.devnull:  # as in torchrun, this means no log files
        return Output(shown=shown)
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
        stdout_filters=given["duplicate_stdout_filters"],
        stderr_filters=given["duplicate_stderr_filters"],
    )
