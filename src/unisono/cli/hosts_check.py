"""`unisono hosts check`: see whether machines can form a job, before one is started. Start reading at `check`."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

import click

from unisono.cli.flags import FlagCommand
from unisono.cli.hosts import hosts_of
from unisono.cli.run_flags import MEETING_FLAGS
from unisono.cli.slurm import flags_of_slurm
from unisono.cli.status_line import show_status

__all__ = ["hosts"]


@click.group(short_help="Check the machines of a job, and the network between them.", invoke_without_command=True)
@click.pass_context
def hosts(context: click.Context) -> None:
    """Check the machines of a job, and the network between them."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@hosts.command(
    cls=FlagCommand, short_help="Measure the network between machines, and name the odd one out.", params=MEETING_FLAGS
)
def check(**given: Any) -> int:
    """Measure the network between machines, compare what is on them, and name the odd one out.

    Start it on every machine, with the flags about machines that unisono run will get. Each terminal shows the same
    table. The exit code is 1 if a job would be refused, or two machines cannot connect. Without flags, this machine is
    shown.

    \b
    unisono hosts check --nnodes 4 --rdzv-endpoint host0:29500    # on each of four machines
    srun --ntasks-per-node 1 unisono hosts check
    """
    try:
        given |= flags_of_slurm(given, os.environ)
        settings = hosts_of(given)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    # Not at the top: they import torch.
    from unisono.launch.host_check.check_table import table_of  # noqa: PLC0415
    from unisono.launch.host_check.facts import own_facts  # noqa: PLC0415
    from unisono.launch.host_check.findings import find  # noqa: PLC0415

    if settings is None:
        facts = [own_facts(address="", interface="")]
        click.echo(table_of(facts, {}, find(facts, {}), own=0))
        return 0
    from unisono.launch.host_check.check import HostCheck  # noqa: PLC0415

    # A check must not meet a job of the same name.
    settings = dataclasses.replace(settings, run_id=f"check-{settings.run_id}")
    work = HostCheck(settings, notice=_notice, warn=lambda text: click.echo(f"unisono: {text}", err=True))
    try:
        work.run()
    finally:
        show_status("")
    found = find(work.hosts, work.links)
    click.echo(table_of(work.hosts, work.links, found, own=work.own))
    return 1 if found.problems else 0


def _notice(text: str) -> None:
    if sys.stderr.isatty():
        show_status(text.removesuffix(" ..."))
    else:
        click.echo(text, err=True)
