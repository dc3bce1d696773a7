"""The connection of `unisono ps`, `top` and `stacks` to the agents of running jobs.

Each agent listens on an abstract Unix socket named after its user and process, which leaves no file and vanishes with
the agent, however that ends. Only the same user gets answers. Question and answer are one line of JSON each. The
agent's side is `Control`; the other side is `running_jobs`, `ask` and `ask_all`.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from unisono.errors import LaunchError
from unisono.launch.hang.stacks import read_state

__all__ = ["Control", "ask", "ask_all", "running_jobs"]

Answer = dict[str, Any]
_MOST_BYTES = 1 << 12
_MOST_CONNECTIONS = 16
"""Clients that connect and ask nothing must not use up the agent's open files."""


class Control:
    """The agent's end, served by the agent's own loop.

    Args:
        answer: Gets a question such as {"ask": "job"} and returns the reply, or None to a question it does not know.
    """

    def __init__(self, selector: selectors.BaseSelector, answer: Callable[[Answer], Answer | None]) -> None:
        self._selector, self._answer = selector, answer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # A container with a process of the same number can share this machine's names. Then this job cannot be found,
        # which is no reason not to run it.
        try:
            self._listener.bind(_address(os.getpid()))
        except OSError:
            self._listener.bind("")  # a name that the kernel chooses
        self._listener.listen()
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._connections: list[socket.socket] = []  # oldest first

    def close(self) -> None:
        """Stop answering."""
        for end in (self._listener, *self._connections):
            self._selector.unregister(end)
            end.close()
        self._connections.clear()

    def _accept(self) -> None:
        with suppress(OSError):  # the other end has gone already, or no more files can be opened
            connection, _ = self._listener.accept()
            if _user_of(connection) != os.getuid():
                connection.close()
                return
            connection.settimeout(1.0)  # a client that does not read delays the job for this long at most
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
        # The question may not be JSON, or be nested too deeply.
        with self._forget(connection), suppress(OSError, ValueError, RecursionError):
            question = json.loads(connection.recv(_MOST_BYTES))
            answer = self._answer(question) if isinstance(question, dict) else None
            connection.sendall(json.dumps(answer or {"error": "not understood"}).encode() + b"\n")


def running_jobs() -> list[int]:
    """List the process ids of this user's agents on this machine, in ascending order."""
    prefix = f"@{_name('')}"
    found = set()
    for line in Path("/proc/net/unix").read_text(errors="replace").splitlines():
        name = line.rpartition(" ")[2]
        if name.startswith(prefix) and name.removeprefix(prefix).isdigit():
            found.add(int(name.removeprefix(prefix)))
    return sorted(found)


def ask(agent: int, question: Answer, *, patience_s: float = 10.0) -> Answer | None:
    """Ask the agent with this process id and return its answer; None if it has ended or is another user's.

    Raises:
        LaunchError: The agent does not answer in time.
    """
    answers = ask_all([agent], question, patience_s=patience_s)
    if agent in answers and answers[agent] is None:
        raise LaunchError(
            f"job {agent} did not answer within {patience_s:g} s: its launcher is {read_state(agent).state}"
        )
    return answers.get(agent)


def ask_all(agents: Iterable[int], question: Answer, *, patience_s: float) -> dict[int, Answer | None]:
    """Ask several agents at once; return their answers by process id, None for one that did not answer in time.

    Agents that have ended or are another user's are left out.
    """
    deadline_s = time.monotonic() + patience_s
    answers: dict[int, Answer | None] = {}
    with ExitStack() as stack:
        ends: dict[int, socket.socket] = {}
        for agent in agents:
            end = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            end.settimeout(patience_s)
            try:
                end.connect(_address(agent))
                # Anybody can take an abstract name: the other end must belong to this user.
                if _user_of(end) == os.getuid():
                    end.sendall(json.dumps(question).encode() + b"\n")
                    ends[agent] = end
            except BlockingIOError:  # it has not accepted connections for long
                answers[agent] = None
            except OSError:
                continue
        for agent, end in ends.items():
            try:
                received = _read(end, deadline_s)
            except TimeoutError:
                answers[agent] = None
            except OSError:
                continue
            else:
                if received.endswith(b"\n"):
                    answers[agent] = json.loads(received)
    return answers


def _read(end: socket.socket, deadline_s: float) -> bytes:
    """Read until the other end closes the connection."""
    received = b""
    while True:
        end.settimeout(max(0.001, deadline_s - time.monotonic()))
        if not (piece := end.recv(1 << 16)):
            return received
        received += piece


def _address(agent: int) -> str:
    return "\0" + _name(str(agent))


def _name(agent: str) -> str:
    return f"unisono/{os.getuid()}/{agent}"


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", credentials)[1]
    return user
