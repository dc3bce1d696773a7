"""The command `unisono`, and how it reports errors of the user. Start reading at `main`."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

import click

from unisono.cli.compare import compare
from unisono.cli.drill import drill
from unisono.cli.hosts_check import hosts
from unisono.cli.plan import plan
from unisono.cli.ps import ps, stacks
from unisono.cli.report import report
from unisono.cli.run import run
from unisono.cli.scale import scale
from unisono.cli.token import token
from unisono.cli.top import top
from unisono.errors import EstimateError, LaunchError, ReportError

__all__ = ["cli", "main"]


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, invoke_without_command=True
)
@click.version_option(package_name="unisono", message="unisono %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Distributed training for PyTorch in which the number of ranks is a resource.

    \b
    unisono run -n 4 train.py --lr 0.1    # an unmodified script on 4 ranks
    unisono run --help
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for command in (run, drill, ps, top, stacks, scale, plan, report, compare, token, hosts):
    cli.add_command(command)


def main() -> None:
    """Run the command line and exit with its code; an error of the user is printed in one line, with code 2."""
    _open_missing_streams()
    try:
        code = cli.main(prog_name="unisono", standalone_mode=False)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "unisono"
        message = error.format_message().rstrip(".")
        click.echo(f"unisono: {message[:1].lower()}{message[1:]}; see `{command} --help`", err=True)
        code = 2
    except (EstimateError, LaunchError, ReportError) as error:
        click.echo(f"unisono: {error}", err=True)
        code = 2
    except (KeyboardInterrupt, click.Abort):
        code = 128 + signal.SIGINT
    _end(code)


def _end(code: int | None) -> NoReturn:
    """End this process as `sys.exit` does, but without tearing down the interpreter, which nothing here needs."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # its reader is gone
            stream.flush()
    os._exit(code or 0)


def _open_missing_streams() -> None:
    """Open the null device where a standard stream is closed, so that no file of ours gets its number."""
    for file in range(3):
        try:
            os.fstat(file)
        except OSError:
            # An opened file gets the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115  stays open as long as the process
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
