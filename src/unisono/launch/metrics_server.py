"""The numbers of a job for Prometheus, which asks for them over HTTP. Served by the agent's own loop.

Start reading at `MetricsServer`.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono.errors import LaunchError
from unisono.launch.request_server import RequestServer
from unisono.loggers.prometheus_text import LatestNumbers, metric
from unisono.loggers.rows import read_row, steps_done

__all__ = ["MetricsServer"]


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
        self._facts, self._name = facts, name
        self._latest = LatestNumbers(name)
        self._state = self._step = 0
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(
                host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.socket(family, kind, protocol)
        except OSError as error:
            raise _refusal(host, port, error) from error
        try:
            # Otherwise a port that a job has just served could not be used for a minute.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
        except OSError as error:
            listener.close()
            raise _refusal(host, port, error) from error
        self.address = f"http://{host}:{listener.getsockname()[1]}/metrics"
        """Where the numbers are."""
        self._server = RequestServer(selector, listener, self._reply)

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
        self._server.close()

    def _reply(self, request: bytes) -> bytes:
        words = request.split(b"\r\n", 1)[0].split(b" ")
        return self._answer(words[0], words[1].split(b"?")[0] if len(words) > 1 else b"")

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
