"""Printing on one rank only."""

from __future__ import annotations

from typing import Any

from unisono.job.ranks import is_main

__all__ = ["print0"]


def print0(*values: Any, local: bool = False, **options: Any) -> None:
    """Print on rank 0, and do nothing on the other ranks. No rank waits for another, and not every rank must call it.

    Args:
        values: The arguments of `print`.
        local: Print on the first rank of each node instead.
        options: The keyword arguments of `print`.
    """
    if is_main(local=local):
        print(*values, **options)
