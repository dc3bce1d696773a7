"""The launcher's standard input, which one rank may have."""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["duplicate_stdin"]


def duplicate_stdin() -> int | None:
    """Duplicate standard input; None if it is closed, or a terminal with another program in the foreground."""
    with suppress(OSError):  # it is not a terminal, or not the one that controls this process
        if os.tcgetpgrp(0) != os.getpgrp():
            return None
    try:
        return os.dup(0)
    except OSError:
        return None
