"""The measurement of one direction of a network link: round-trip time, clock offset and bandwidth of one TCP stream.

A host serves a port (`LinkServer`) and measures the way to the ports of others (`measure_link`). Both sides prove that
they know the secret of the check before anything else. Does not import torch. The clock offset is NTP's (RFC 5905,
section 8): the other clock's reading against the middle of the round trip, of the shortest round trip.
"""

from __future__ import annotations

import select
import socket
import statistics
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from unisono.launch.hosts.endpoint import listen
from unisono.launch.hosts.shared_token import TokenError, accept, introduce

__all__ = ["Link", "LinkServer", "measure_link"]

_CONNECT_S = 3.0
_PATIENCE_S = 5.0
_PINGS = 60
_WARM_UP_S = 0.05
_TRANSFER_S = 0.25
_CHUNK = 1 << 18
_PING, _STREAM = b"p", b"s"
_TIME, _RATE = struct.Struct("!q"), struct.Struct("!d")


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The measurements from one host to another."""

    round_trip_s: float = 0.0
    """The median time of a message of 8 bytes and its answer."""
    clock_offset_s: float = 0.0
    """How far the other host's clock is ahead."""
    bytes_per_s: float = 0.0
    """The rate of one TCP stream, measured where it arrives."""
    problem: str = ""
    """Why nothing could be measured; otherwise empty."""


class LinkServer:
    """Answers the measurements of other hosts at a free port of an address, in threads, until the process ends.

    Args:
        address: This host's address for the others.
        secret: What both sides must know.
    """

    def __init__(self, address: str, secret: str) -> None:
        self._secret = secret
        self._listener = listen(address, 0)
        self.port: int = self._listener.getsockname()[1]
        """The port."""
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Take no further connection."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, TokenError):  # the other side sees it, and reports it
            accept(connection, self._secret)
            connection.settimeout(_PATIENCE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            kind = connection.recv(1)
            if kind == _PING:
                while connection.recv(_TIME.size, socket.MSG_WAITALL):
                    connection.sendall(_TIME.pack(time.time_ns()))
            elif kind == _STREAM:
                connection.sendall(_RATE.pack(_receive(connection)))
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(_CHUNK):  # a close with unread data could overtake the answer
                    pass


def measure_link(address: str, port: int, secret: str) -> Link:
    """Measure the way to another host's `LinkServer`. Takes about 0.5 s, and 13 s where nothing gets through."""
    try:
        with _connect(address, port, secret, _PING) as connection:
            round_trip_s, offset_s = _ping(connection)
        with _connect(address, port, secret, _STREAM) as connection:
            # What is still in the buffer would disturb the next measurement of a slow link.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            rate = _send(connection)
    except TokenError:
        return Link(problem="something else than this check answers there")
    except OSError as error:
        return Link(problem=error.strerror or str(error) or type(error).__name__)
    return Link(round_trip_s=round_trip_s, clock_offset_s=offset_s, bytes_per_s=rate)


def _connect(address: str, port: int, secret: str, kind: bytes) -> socket.socket:
    connection = socket.create_connection((address, port), timeout=_CONNECT_S)
    try:
        introduce(connection, secret)
        connection.settimeout(_PATIENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(kind)
    except BaseException:
        connection.close()
        raise
    return connection


def _ping(connection: socket.socket) -> tuple[float, float]:
    """Return the median round-trip time and the clock offset of the shortest round trip, in seconds."""
    end_s = time.monotonic() + 1.0
    trips: list[tuple[float, float]] = []
    while len(trips) < _PINGS and (not trips or time.monotonic() < end_s):
        sent_ns, began_s = time.time_ns(), time.perf_counter()
        connection.sendall(_TIME.pack(sent_ns))
        answer = connection.recv(_TIME.size, socket.MSG_WAITALL)
        took_s = time.perf_counter() - began_s
        if len(answer) < _TIME.size:
            raise ConnectionError("the other host closed the connection")
        trips.append((took_s, (_TIME.unpack(answer)[0] - sent_ns) / 1e9 - took_s / 2))
    return statistics.median(took_s for took_s, _ in trips), min(trips)[1]


def _receive(connection: socket.socket) -> float:
    """Read a stream for a moment; return its bytes per second, without TCP's slow start."""
    buffer, nbytes = bytearray(_CHUNK), 0
    connection.recv_into(buffer)
    began_s = time.perf_counter()
    from_s, until_s = began_s + _WARM_UP_S, began_s + _WARM_UP_S + _TRANSFER_S
    counted_s: float | None = None
    while True:
        got = connection.recv_into(buffer)
        now_s = time.perf_counter()
        if not got:
            raise ConnectionError("the other host closed the connection")
        if counted_s is not None:
            nbytes += got
            if now_s >= until_s:
                return nbytes / (now_s - counted_s)
        elif now_s >= from_s:
            counted_s = now_s


def _send(connection: socket.socket) -> float:
    """Send until the other host has measured; return what it has found."""
    data, end_s = memoryview(bytearray(_CHUNK)), time.monotonic() + _PATIENCE_S
    connection.setblocking(False)
    while (left_s := end_s - time.monotonic()) > 0:
        readable, writable, _ = select.select([connection], [connection], [], left_s)
        if readable:
            connection.settimeout(_PATIENCE_S)
            answer = connection.recv(_RATE.size, socket.MSG_WAITALL)
            if len(answer) < _RATE.size:
                raise ConnectionError("the other host closed the connection")
            return float(_RATE.unpack(answer)[0])
        if writable:
            with suppress(BlockingIOError):
                connection.send(data)
    raise TimeoutError(f"nothing has arrived within {_PATIENCE_S:g} s")
