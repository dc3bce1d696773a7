"""The numbers of a job for Prometheus, which asks for them over HTTP. Served by the agent's own loop.

Start reading at `MetricsServer`.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from unisono.errors import LaunchError
from unisono.loggers.prometheus_text import LatestNumbers, metric
from unisono.loggers.rows import read_row, steps_done

__all__ = ["MetricsServer"]

_MOST_BYTES = 1 << 13
_MOST_CONNECTIONS = 16
_PATIENCE_S = 1.0
"""How long a client that does not read can delay the launcher."""


class MetricsServer:
    """Answers GET /metrics with the latest numbers of the run and of the job, in Prometheus' text format.

    Args:
        selector: The agent's; the data of each key is the function to call when the file is ready.
        host: The address to listen at.
        port: The port; 0 for a free one.
        name: The value of the label "run", until the run tells its directory.
        facts: Returns numbers of the job: "ranks", "running" and "recoveries".

    Raises:
        LaunchError: The address cannot be used.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        *,
        host: str,
        port: int,
        name: str,
        facts: Callable[[], Mapping[str, int]],
    ) -> None:
        self._selector, self._facts, self._name = selector, facts, name
        self._latest = LatestNumbers(name)
        self._state = self._step = 0
        self._connections: list[socket.socket] = []  # oldest first
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._listener = socket.socket(family, kind, protocol)
        except OSError as error:
            raise _refusal(host, port, error) from error
        try:
            # Otherwise a port that a job has just served could not be used for a minute.
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(address)
            self._listener.listen()
        except OSError as error:
            self._listener.close()
            raise _refusal(host, port, error) from error
        self._listener.setblocking(False)
        self.address = f"http://{host}:{self._listener.getsockname()[1]}/metrics"
        """Where the numbers are."""
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def take(self, event: Mapping[str, Any]) -> None:
        """Note an event of the run. One that lacks fields, of a later version, is passed over."""
        kind = event.get("event")
        with suppress(KeyError, TypeError, AttributeError):
            row = read_row(event, step=self._step)
            self._step = steps_done(event, self._step)
            if row is not None:
                self._latest.add(row)
        if kind == "run":
            directory = event.get("directory")
            self._latest = LatestNumbers(
                Path(directory).name if isinstance(directory, str) else self._name, ranks=event.get("world_size")
            )
            self._state = 0
        elif kind in ("end", "failure"):
            self._state = 1 if kind == "end" else 2

    def close(self) -> None:
        """Stop answering."""
        for end in (self._listener, *self._connections):
            self._selector.unregister(end)
            end.close()
        self._connections.clear()

    def _accept(self) -> None:
        with suppress(OSError):  # the other end has gone already, or no more files can be opened
            connection, _ = self._listener.accept()
            connection.settimeout(_PATIENCE_S)
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
        with self._forget(connection), suppress(OSError):
            # A request of this kind comes in one piece; what is read no further is of no interest.
            words = connection.recv(_MOST_BYTES).split(b"\r\n", 1)[0].split(b" ")
            connection.sendall(self._answer(words[0], words[1].split(b"?")[0] if len(words) > 1 else b""))

    def _answer(self, method: bytes, path: bytes) -> bytes:
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", "only GET is answered\n", method)
        if path not in (b"/metrics", b"/"):
            return _response("404 Not Found", "the numbers are at /metrics\n", method)
        return _response("200 OK", self._latest.text(state=self._state) + self._job_text(), method)

    def _job_text(self) -> str:
        told = {
            "ranks": "Ranks of the job.",
            "running": "Ranks of the job that run on this machine.",
            "recoveries": "How often ranks have been replaced.",
        }
        labels = {"run": self._latest.run}
        facts = self._facts()
        lines = (metric(f"unisono_job_{name}", words, facts[name], labels) for name, words in told.items())
        return "".join(f"{line}\n" for each in lines for line in each)


def _response(status: str, text: str, method: bytes) -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == b"HEAD" else body)


def _refusal(host: str, port: int, error: OSError) -> LaunchError:
    where = f"--metrics {host}:{port} cannot be served: {error.strerror}"
    return LaunchError(f"{where}. Give another port, or port 0 for one that is free.")
