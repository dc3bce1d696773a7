"""Connections of one request each, answered by the agent's own loop. Start reading at `RequestServer`."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial

__all__ = ["RequestServer"]

_MOST_BYTES = 1 << 13
_MOST_CONNECTIONS = 16
"""Clients that connect and ask nothing must not use up the agent's open files."""
_PATIENCE_S = 1.0
"""How long a client that does not read can delay the job."""


class RequestServer:
    """Reads a request from each connection, answers it, and closes the connection.

    A request comes in one piece; what is longer than 8 KiB is cut off.

    Args:
        selector: The agent's; the data of each key is the function to call when the file is ready.
        listener: A listening socket, which this object closes.
        answer: Gets a request and returns the reply.
        admits: Returns False for a connection that is to be closed at once.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listener: socket.socket,
        answer: Callable[[bytes], bytes],
        *,
        admits: Callable[[socket.socket], bool] = lambda _: True,
    ) -> None:
        self._selector, self._listener, self._answer, self._admits = selector, listener, answer, admits
        self._connections: list[socket.socket] = []  # oldest first
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Stop answering."""
        for end in (self._listener, *self._connections):
            self._selector.unregister(end)
            end.close()
        self._connections.clear()

    def _accept(self) -> None:
        with suppress(OSError):  # the other end has gone already, or no more files can be opened
            connection, _ = self._listener.accept()
            if not self._admits(connection):
                connection.close()
                return
            connection.setblocking(False)
            try:
                # Mostly the request is there already. A turn of the agent's loop would take as long as to answer it.
                request = connection.recv(_MOST_BYTES)
            except BlockingIOError:
                self._await(connection)
            except OSError:
                connection.close()
            else:
                self._reply(connection, request)

    def _await(self, connection: socket.socket) -> None:
        if len(self._connections) >= _MOST_CONNECTIONS:
            self._forget(self._connections[0]).close()
        self._connections.append(connection)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._serve, connection))

    def _forget(self, connection: socket.socket) -> socket.socket:
        self._selector.unregister(connection)
        self._connections.remove(connection)
        return connection

    def _serve(self, connection: socket.socket) -> None:
        if connection not in self._connections:  # closed a moment ago, for a newer one
            return
        try:
            request = self._forget(connection).recv(_MOST_BYTES)
        except OSError:
            connection.close()
        else:
            self._reply(connection, request)

    def _reply(self, connection: socket.socket, request: bytes) -> None:
        connection.settimeout(_PATIENCE_S)
        with connection, suppress(OSError):
            connection.sendall(self._answer(request))
