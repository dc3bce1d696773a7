"""The server processes of embedding tables: they are started with the ranks, and anew when one ends.

A server finds the rows where ranks and the server before it left them, in memory that outlives it, so nothing is told
to the ranks: they wait. Its program is `unisono.servers`. Start reading at `Servers.on_message`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unisono.launch.failure.root_cause import name_signal
from unisono.launch.forkserver_handle import ForkServerHandle
from unisono.launch.generation import Generation
from unisono.launch.hang.observed_rank import ObservedRank
from unisono.launch.output.relay import Relay
from unisono.launch.recovery_page import RecoveryPage
from unisono.variables import SERVER_VARIABLE

__all__ = ["Servers"]

_MOST_KILLS, _MOST_ERRORS = 20, 3
"""So many ends of a server without a step between them are followed by another start: by a signal, and by an error."""


@dataclass(eq=False, slots=True)
class _Process:
    """The process of a server."""

    server: int
    watched: ObservedRank
    page: RecoveryPage

    def close(self) -> None:
        self.watched.close()
        self.page.close()


class Servers:
    """The servers in one generation of ranks.

    Args:
        generation: The ranks, and the page that they share with servers.
        server: The fork server.
        relay: Shows what happens to servers.
        environment: Returns the variables of a process that is no rank.
        lost: Called with a sentence when a server cannot be had: the job cannot go on.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        server: ForkServerHandle,
        relay: Relay,
        environment: Callable[[], Mapping[str, str]],
        lost: Callable[[str], None],
    ) -> None:
        self._generation, self._server, self._relay = generation, server, relay
        self._environment, self._lost = environment, lost
        self._count = generation.servers
        self._processes: dict[int, _Process] = {}  # by the fork server's number
        self._ends = [0] * self._count
        """For each server, the processes that have ended since its last step."""
        self._done = [0] * self._count
        self._is_over = False

    @property
    def running(self) -> list[dict[str, int]]:
        """The servers that run: number and process."""
        return sorted(
            ({"server": each.server, "pid": each.watched.pid} for each in self._processes.values() if each.watched.pid),
            key=lambda each: each["server"],
        )

    def start(self) -> None:
        """Start all servers."""
        for server in range(self._count):
            self._make(server)

    def has(self, number: int) -> bool:
        """Return True if the fork server knows a server by this number."""
        return number in self._processes

    def on_message(self, kind: str, message: Mapping[str, Any]) -> None:
        """Handle a message of the fork server about a server."""
        process = self._processes[message["rank"]]
        if kind == "started":
            process.watched.pid = message["pid"]
        elif kind == "unstarted":
            self._forget(message["rank"])
            self._give_up(f"server {process.server} of the embedding tables could not be started: {message['problem']}")
        elif kind == "exited":
            self._on_exit(message["rank"], process, message["code"])

    def conclude(self) -> None:
        """Tell the user, once all ranks have ended well, if servers were of no use."""
        page = self._generation.server_page
        if page is not None and page.version == 0:
            one = self._count == 1
            what = "the server" if one else f"the {self._count} servers"
            self._relay.say(
                f"{what} of --servers {self._count} {'was' if one else 'were'} given nothing to do: the program has "
                "made no unisono.embedding.Tables, or no Trainer has made a second step with them"
            )

    def close(self) -> None:
        """Forget all servers. They end with the job, or before its ranks are started again."""
        self._is_over = True
        for number in [*self._processes]:
            self._server.end_spare(number)
            self._forget(number)

    def _on_exit(self, number: int, process: _Process, code: int) -> None:
        server, page = process.server, self._generation.server_page
        how = _describe_end(process.watched, code)
        pid = process.watched.pid
        self._forget(number)
        if self._is_over or not self._generation.running:
            return
        assert page is not None
        done = page.progress(server)
        self._ends[server] = 1 if done > self._done[server] else self._ends[server] + 1
        self._done[server] = done
        name = f"server {server} of the embedding tables (process {pid})"
        if self._ends[server] > (_MOST_KILLS if code < 0 else _MOST_ERRORS):
            before = self._ends[server] - 1
            self._give_up(f"{name} {how}, and {before} processes before it have ended without a step between them")
            return
        self._relay.say(f"{name} {how}; it is started anew with its rows, and ranks wait")
        self._make(server)

    def _give_up(self, why: str) -> None:
        self._is_over = True
        if (page := self._generation.server_page) is not None:
            page.lose()
        self._lost(why)

    def _make(self, server: int) -> None:
        watched, page, files = self._generation.open_spare()
        files |= {"stdout": os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), "stderr": os.dup(2)}
        environment = {**self._environment(), SERVER_VARIABLE: str(server)}
        number = self._server.fork_spare(environment=environment, files=files)
        self._processes[number] = _Process(server, watched, page)

    def _forget(self, number: int) -> None:
        self._processes.pop(number).close()


def _describe_end(watched: ObservedRank, code: int) -> str:
    if code < 0:
        return f"was killed by {name_signal(-code)}"
    account = watched.block.read_failure()
    if account is not None and code:
        return f"failed: {account['traceback'].rstrip().rpartition(chr(10))[2]}"
    return f"ended with code {code}"
