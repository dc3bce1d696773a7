"""Ports for rank 0's store, from outside of the range that the system draws ports of connections from."""

from __future__ import annotations

import itertools
import os
import socket

__all__ = ["free_port"]

_FIRST, _COUNT = 10_000, 20_000
_next = itertools.count(os.getpid() * 12_361)  # far from those of processes with numbers near it: none catches up


def free_port() -> str:
    """Return a port of 127.0.0.1 that nothing uses, and that no connection of another process takes meanwhile.

    A port that the system chose for a socket is given to the next connection once that socket is closed.
    """
    while True:
        port = _FIRST + next(_next) % _COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # in use
                continue
        return str(port)
