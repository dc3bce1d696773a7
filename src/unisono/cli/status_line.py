"""A line on the terminal that says what a command waits for, and leaves nothing behind."""

from __future__ import annotations

import sys

import click

__all__ = ["show_status"]


def show_status(doing: str) -> None:
    """Show what is done now, in the place of what was shown before; nothing if standard error is no terminal.

    Args:
        doing: The text; empty to clear the line.
    """
    if sys.stderr.isatty():
        click.echo(f"\r\033[K{doing + ' ...' if doing else ''}", nl=False, err=True)
