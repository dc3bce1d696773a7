"""Printing on one rank for all."""

from __future__ import annotations

from typing import Any

from unisono.job.ranks import is_main

__all__ = ["print0"]


def print0(*values: Any, local: bool = False, **options: Any) -> None:
    """Print on rank 0, and do nothing on the others. No rank waits for another.

    Args: local prints on the first rank of each node; values and options are those of `print`.
    """
    if is_main(local=local):
        print(*values, **options)
