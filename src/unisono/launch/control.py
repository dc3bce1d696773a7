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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from unisono.errors import LaunchError
from unisono.launch.hang.stacks import read_state
from unisono.launch.request_server import RequestServer

__all__ = ["Control", "ask", "ask_all", "running_jobs"]

Answer = dict[str, Any]


class Control:
    """The agent's end, served by the agent's own loop.

    Args:
        answer: Gets a question such as {"ask": "job"} and returns the reply, or None to a question it does not know.
    """

    def __init__(self, selector: selectors.BaseSelector, answer: Callable[[Answer], Answer | None]) -> None:
        self._answer = answer
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # A container with a process of the same number can share this machine's names. Then this job cannot be found,
        # which is no reason not to run it.
        try:
            listener.bind(_address(os.getpid()))
        except OSError:
            listener.bind("")  # a name that the kernel chooses
        listener.listen()
        self._server = RequestServer(selector, listener, self._reply, admits=lambda end: _user_of(end) == os.getuid())

    def close(self) -> None:
        """Stop answering."""
        self._server.close()

    def _reply(self, request: bytes) -> bytes:
        try:
            question = json.loads(request)
            answer = self._answer(question) if isinstance(question, dict) else None
        except (ValueError, RecursionError):  # it is not JSON, or is nested too deeply
            return b""
        return json.dumps(answer or {"error": "not understood"}).encode() + b"\n"


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
