"""Connections of torch's stores without questions to a name server.

Torch looks up the name of each address that a store's client connects to, for its messages. It does so for IPv4
addresses in the form of IPv6 (`::ffff:127.0.0.1`), which /etc/hosts does not have, so a name server is asked even for
the loopback address. If none answers, as on a machine without a network, each connection takes 10 s, prints a warning,
and may fail for it. Here the calling thread asks a socket of this process instead, which answers that there is no name.
Start reading at `answered_here`.
"""

from __future__ import annotations

import ctypes
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["answered_here"]

_LOOPBACK = "127.0.0.1"
_LONGEST = 512
"""Bytes of a question over UDP (RFC 1035)."""
_NO_SUCH_NAME = b"\x81\x83"
"""The flags of an answer: it is one, recursion was asked for and is available, and the name does not exist."""


@contextmanager
def answered_here(host: str) -> Iterator[None]:
    """Let no name server be asked by this thread while it connects to an address.

    Other threads are not concerned. Nothing changes where the host is a name, which a name server may have to resolve,
    or where the C library is not glibc, whose resolver has a state of its own for each thread (resolver(3)).

    Args:
        host: The host to connect to.
    """
    state = _resolver() if _is_address(host) else None
    if state is None:
        yield
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((_LOOPBACK, 0))
        answers = threading.Thread(target=_answer, args=(server,), name="unisono-names", daemon=True)
        answers.start()
        servers, count = bytes(state.servers), state.count
        here = (ctypes.c_ubyte * 4)(*socket.inet_aton(_LOOPBACK))
        state.servers[0] = _Address(socket.AF_INET, socket.htons(server.getsockname()[1]), here)
        state.count = 1
        try:
            yield
        finally:
            state.count = count
            ctypes.memmove(state.servers, servers, len(servers))
            server.sendto(b"", server.getsockname())  # ends the thread
            answers.join()


class _Address(ctypes.Structure):
    """A `sockaddr_in`."""

    _fields_ = (
        ("family", ctypes.c_ushort),
        ("port", ctypes.c_ushort),
        ("address", ctypes.c_ubyte * 4),
        ("zero", ctypes.c_ubyte * 8),
    )


class _State(ctypes.Structure):
    """The beginning of a `__res_state`, as in <resolv.h>."""

    _fields_ = (
        ("retransmission", ctypes.c_int),
        ("tries", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("count", ctypes.c_int),
        ("servers", _Address * 3),
    )


def _resolver() -> _State | None:
    """Return the state of the resolver of this thread; None if the C library has none."""
    library = ctypes.CDLL(None)
    try:
        initialize, find = library.__res_init, library.__res_state
    except AttributeError:
        return None
    find.restype = ctypes.POINTER(_State)
    state: _State = find().contents
    if not state.options & 1 and initialize() != 0:
        return None
    return state


def _is_address(host: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            socket.inet_pton(family, host)
            return True
    return False


def _answer(server: socket.socket) -> None:
    """Answer each question with the statement that there is no such name, until an empty one comes."""
    while True:
        question, asker = server.recvfrom(_LONGEST)
        if not question:
            return
        server.sendto(question[:2] + _NO_SUCH_NAME + question[4:], asker)
