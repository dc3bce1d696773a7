"""`unisono run`: start a program on several ranks of this machine."""

from __future__ import annotations

import os
import sys
import traceback

import click

from unisono.launch import Job, check_target, run_job
from unisono.machine import usable_cores

__all__ = ["run"]


def _read_ranks(context: click.Context, _option: click.Parameter, value: str) -> int:
    if value == "auto":
        return usable_cores()
    if not (value.isascii() and value.isdigit() and len(value) < 10 and int(value) > 0):
        raise click.UsageError(
            f"-n {value!r} is not a number of ranks: give 1 or more, or auto for one per core", context
        )
    return int(value)


@click.command(
    # What follows the program belongs to it, also if it looks like an option of ours.
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    short_help="Run a program on several ranks of this machine.",
)
@click.option(
    "-n",
    "--nproc-per-node",
    "--nproc_per_node",
    "ranks",
    callback=_read_ranks,
    default="1",
    metavar="N",
    show_default=True,
    help="Number of ranks, or auto: one per core that this process may use.",
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module, as for python -m.")
@click.option(
    "--preload",
    multiple=True,
    metavar="MODULE",
    help="Import this module once, before ranks are forked. May be given again. It must start no thread and touch no "
    "GPU.",
)
@click.option(
    "--shutdown-timeout",
    type=float,
    default=5.0,
    metavar="SECONDS",
    show_default=True,
    help="Time that ranks have to end by themselves when the job is ended, before they are killed.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="PROGRAM [ARGUMENTS]...")
def run(ranks: int, module: bool, preload: tuple[str, ...], shutdown_timeout: float, command: tuple[str, ...]) -> int:
    """Run a program on several ranks of this machine.

    PROGRAM is a Python script, or a module with -m; it finds its rank in the environment, as under torchrun. Each line
    that a rank prints gets the rank in front. If a rank fails, the others are ended and its exit code is returned.

    \b
    unisono run -n 4 train.py --lr 0.1
    unisono run -n auto -m package.train
    """
    if not command:
        raise click.UsageError("no program given, for example: unisono run -n 4 train.py")
    try:
        job = Job(
            target=command[0],
            arguments=command[1:],
            module=module,
            ranks=ranks,
            preload=preload,
            shutdown_timeout_s=shutdown_timeout,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        check_target(job)
    except SyntaxError as error:
        traceback.print_exception(type(error), error, None)
        return 1
    return run_job(job, environment=os.environ, stdout=sys.stdout, stderr=sys.stderr)
