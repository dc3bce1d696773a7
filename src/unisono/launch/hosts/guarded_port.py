"""A way to torch's store for those who know the token only: torch's store itself asks nobody who they are.

On the host of the endpoint, the store listens on the loopback address, and `GuardedPort` on the endpoint: it passes a
connection on after a handshake (`launch.hosts.token`). On the others, `LocalPort` listens on the loopback address, and
passes each connection on to the endpoint after the same handshake. So torch connects to 127.0.0.1 everywhere, in agents
and in ranks. Does not import torch.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from unisono.launch.hosts.shared_token import TokenError, accept, introduce

__all__ = ["GuardedPort", "LocalPort", "refuses"]

_CHUNK = 1 << 16
_MOST_STRANGERS = 64
"""How many connections may be in a handshake at once; more wait in the kernel."""


class GuardedPort:
    """Passes connections to a listener on to a port of the loopback address, if they know the token.

    Args:
        listener: Listens at the endpoint; owned by this object.
        port: The port of the store.
        token: The shared secret.
        refused: Called with the address of a stranger, once for each.
    """

    def __init__(self, listener: socket.socket, port: int, token: str, *, refused: Callable[[str], None]) -> None:
        self._port, self._token, self._refused = port, token, refused
        self._strangers: set[str] = set()
        self._handshakes = threading.BoundedSemaphore(_MOST_STRANGERS)
        _serve(listener, self._handle, before=self._handshakes.acquire)

    def _handle(self, connection: socket.socket, address: str) -> None:
        try:
            accept(connection, self._token)
        except (TokenError, OSError):
            if address not in self._strangers and len(self._strangers) < _MOST_STRANGERS:
                self._strangers.add(address)
                self._refused(address)
            return
        finally:
            self._handshakes.release()
        with socket.create_connection(("127.0.0.1", self._port)) as store:
            _pass_on(connection, store)


class LocalPort:
    """Passes connections to a port of the loopback address on to another host, where this one proves who it is.

    Args:
        address: The address and the port there.
        token: The shared secret; "" if the other side asks for none.
    """

    def __init__(self, address: tuple[str, int], token: str) -> None:
        self._address, self._token = address, token
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN)
        self.port: int = self._listener.getsockname()[1]
        """The port on the loopback address."""
        self.has_ended = False
        """True if the other side has closed a connection, or refuses one: what listened there has ended."""
        self._open: set[socket.socket] = set()
        _serve(self._listener, self._handle)

    def close(self) -> None:
        """Break all connections, so that nobody waits for a host that is lost, and accept no more."""
        for end in (self._listener, *tuple(self._open)):
            with suppress(OSError):  # it has ended
                end.shutdown(socket.SHUT_RDWR)

    def _handle(self, connection: socket.socket, _: str) -> None:
        try:
            endpoint = socket.create_connection(self._address, timeout=5.0)
        except ConnectionRefusedError:
            self.has_ended = True
            raise
        with endpoint:
            if self._token:
                try:
                    introduce(endpoint, self._token)
                except (TokenError, ConnectionError):
                    self.has_ended = True
                    return
            ends = {connection, endpoint}
            self._open |= ends
            try:
                if _pass_on(connection, endpoint) is endpoint:
                    self.has_ended = True
            finally:
                self._open -= ends


def refuses(address: tuple[str, int], *, timeout_s: float) -> bool:
    """Return True if a host refuses connections to a port: then it runs, and nothing listens there any more.

    A connection that was closed says less, since somebody on the way may have reset it.
    """
    try:
        with socket.create_connection(address, timeout=timeout_s):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def _serve(
    listener: socket.socket, handle: Callable[[socket.socket, str], None], *, before: Callable[[], object] = bool
) -> None:
    """Handle each connection to a listener in a thread of its own, from now on."""

    def run(connection: socket.socket, address: str) -> None:
        with connection, suppress(OSError):  # one of the two ends has broken: that closes the other
            handle(connection, address)

    def listen() -> None:
        with listener, suppress(OSError):  # it was closed
            while True:
                before()
                connection, (address, *_) = listener.accept()
                threading.Thread(target=run, args=(connection, address), daemon=True).start()

    threading.Thread(target=listen, daemon=True).start()


def _pass_on(one: socket.socket, other: socket.socket) -> socket.socket:
    """Pass on the bytes of two connections to each other until one of them ends, and return that one.

    Raises:
        OSError: A connection has broken, other than by its other side.
    """
    for connection in (one, other):
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ways = {one.fileno(): (one, other), other.fileno(): (other, one)}
    poll = select.poll()
    for file in ways:
        poll.register(file, select.POLLIN)
    while True:
        for file, _ in poll.poll():
            source, target = ways[file]
            try:
                data = source.recv(_CHUNK)
            except ConnectionResetError:
                return source
            if not data:
                return source
            try:
                target.sendall(data)
            except (BrokenPipeError, ConnectionResetError):
                return target
