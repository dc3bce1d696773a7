"""The flags of `unisono run`: torchrun's and a few of our own, in the order of the help.

Other commands that start ranks or meet other machines take some of them.
"""

from __future__ import annotations

import os

import click

from unisono.cli import reading
from unisono.cli.flags import Flag, Reader
from unisono.cli.scheduling import SCHEDULING_FLAGS
from unisono.launch.gpus import usable_gpus
from unisono.machine import usable_cores

__all__ = ["FLAGS", "MEETING_FLAGS"]

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
        ["--log-line-prefix-template"],
        section=_OUTPUT,
        envvar=["PET_LOG_LINE_PREFIX_TEMPLATE", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"],
        metavar="TEMPLATE",
        help="Begin lines with this text, where ${rank}, ${local_rank}, ${role_name} and ${hostname} are filled in.  "
        "['[${rank}] ']",
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
