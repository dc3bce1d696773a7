"""Spare processes: each has run the script up to the place where it needs a rank, and waits there to take one.

They are made once a Trainer of each rank survives the death of others, and as long as that holds. `Replacing` takes one
for a rank that has died, and another one is made when all ranks go on. Nothing of a spare process is shown while it
waits: its output is read once it has a rank. Its side is `launch.spare_process`. Start reading at `Spares.tick`.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from unisono.launch.failure.root_cause import name_signal
from unisono.launch.forkserver_handle import ForkServerHandle
from unisono.launch.generation import Generation
from unisono.launch.hang.observed_rank import ObservedRank
from unisono.launch.output.relay import Relay
from unisono.launch.recovery_page import RecoveryPage
from unisono.launch.spare_process import encode_grant

__all__ = ["Spare", "Spares"]

_MAKING_S = 0.25
"""How often it is checked whether spare processes can be made."""
_WATCHING_S = 1.0
"""How often it is checked, once all are there, whether they are still of use."""
_MOST_FAILURES = 2
"""So many spare processes that fail in a row before they wait are the last."""
_MOST_DEATHS, _DEATHS_S = 5, 300.0
"""So many spare processes that die while they wait, within so many seconds, are the last. Rarer deaths do not count."""
_PIPE_SIZE = 1 << 20
"""The number of bytes that a spare process can print before it waits for a reader."""


@dataclass(eq=False, slots=True)
class Spare:
    """A process without a rank, and what will be the rank's."""

    number: int
    """The fork server's number of the process."""
    watched: ObservedRank
    page: RecoveryPage
    pipes: list[int]
    """The ends to read from: stdout, stderr, events."""
    grant: socket.socket
    is_ready: bool = False
    """True if it waits for a rank."""
    is_failing: bool = False

    def close(self) -> None:
        """Close all files."""
        self.watched.close()
        self.page.close()
        self.grant.close()
        for file in self.pipes:
            os.close(file)


class Spares:
    """The spare processes in one generation of ranks.

    Args:
        count: How many to keep.
        stdin: The local rank that has the launcher's standard input, which no spare process can take.
        environment: Returns the variables of a rank; None: of a process that has none yet.
    """

    def __init__(
        self,
        count: int,
        generation: Generation,
        *,
        stdin: int | None,
        server: ForkServerHandle,
        relay: Relay,
        selector: selectors.BaseSelector,
        environment: Callable[[int | None], Mapping[str, str]],
    ) -> None:
        self._count, self._generation, self._stdin = count, generation, stdin
        self._server, self._relay, self._selector, self._environment = server, relay, selector, environment
        self._spares: dict[int, Spare] = {}  # by number
        self._granted: dict[int, Spare] = {}  # those that have a rank, until they have read that
        self._due_s = 0.0
        self._failures = 0
        self._deaths_s: deque[float] = deque(maxlen=_MOST_DEATHS)  # when spare processes died that waited for a rank
        self._is_over = count == 0

    @property
    def ready(self) -> int:
        """The number of processes that wait for a rank."""
        return sum(spare.is_ready for spare in self._spares.values())

    def next_deadline_s(self) -> float | None:
        """Return when `tick` is due, by the monotonic clock; None if it has nothing more to do."""
        return None if self._is_over else self._due_s

    def tick(self, *, is_calm: bool) -> None:
        """Make spare processes that are missing, or end those that are of no use.

        Args:
            is_calm: True if no rank is being replaced.
        """
        now_s = time.monotonic()
        if self._is_over or now_s < self._due_s:
            return
        pages = [self._generation.pages[rank] for rank in self._generation.running]
        if refusal := next((page.refusal for page in pages if page.refusal), ""):
            self.end()
            self._relay.say(f"spare ranks are of no use: no rank can be replaced alone: {refusal}")
        elif self._generation.finished:
            self.end()
        elif is_calm and all(page.armed for page in pages):
            while len(self._spares) < self._count:
                self._make()
        self._due_s = now_s + (_MAKING_S if len(self._spares) < self._count else _WATCHING_S)

    def take(self, rank: int) -> Spare | None:
        """Make a spare process that of a rank, and return it for `grant`; None if there is none.

        One that has not come to its place yet is taken, too: it has begun before any other could.
        """
        usable = [spare for spare in self._spares.values() if not spare.is_failing and not _has_ended(spare)]
        if self._generation.local_rank(rank) == self._stdin or not usable:
            return None
        spare = min(usable, key=lambda spare: (not spare.is_ready, spare.number))
        self._due_s = time.monotonic()
        self._granted[spare.number] = self._spares.pop(spare.number)
        self._server.assign(spare.number, rank)
        if rank != 0:
            os.close(spare.pipes.pop())
        self._generation.adopt(rank, spare.watched, spare.page, spare.pipes)
        return spare

    def grant(self, spare: Spare, rank: int) -> None:
        """Let a process that was taken go on as its rank."""
        # If it has ended meanwhile, the fork server is about to say so. The socket stays open until the process has
        # read this: otherwise, what the process says meanwhile would break the connection.
        with suppress(BrokenPipeError, ConnectionResetError):
            spare.grant.sendall(encode_grant(self._environment(rank), events=rank == 0))

    def on_message(self, kind: str, message: Mapping[str, Any]) -> None:
        """Handle a message of the fork server about a process that is no rank."""
        spare = self._spares.get(message["rank"])
        if spare is None:  # it has been ended
            return
        if kind == "started":
            spare.watched.pid = message["pid"]
        elif kind == "failing":
            spare.is_failing = True
        elif kind == "unstarted":
            self._drop(spare, f"could not be started: {message['problem']}")
        elif kind == "exited":
            self._drop(spare, _describe_end(spare, message["code"]))

    def end(self) -> None:
        """End all spare processes, and make no more."""
        self._is_over = True
        for spare in [*self._spares.values()]:
            self._forget(spare)
            self._server.end_spare(spare.number)
            spare.close()

    def close(self) -> None:
        """End all spare processes. The ranks have ended."""
        self.end()
        for spare in self._granted.values():
            self._selector.unregister(spare.grant)
            spare.grant.close()
        self._granted.clear()

    def _make(self) -> None:
        watched, page, files = self._generation.open_spare()
        ours, theirs = socket.socketpair()
        reads, writes = zip(*(os.pipe2(os.O_CLOEXEC) for _ in range(3)), strict=True)
        for file in reads:
            with suppress(PermissionError):  # the user's pipes may hold no more in all
                fcntl.fcntl(file, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        files |= dict(zip(("stdout", "stderr", "events"), writes, strict=True)) | {"grant": theirs.detach()}
        number = self._server.fork_spare(environment=self._environment(None), files=files)
        spare = self._spares[number] = Spare(number, watched, page, [*reads], ours)
        self._selector.register(ours, selectors.EVENT_READ, partial(self._on_ready, spare))

    def _on_ready(self, spare: Spare) -> None:
        if spare.grant.fileno() < 0:  # another message of the same turn has told of its end
            return
        with suppress(ConnectionResetError):
            if spare.grant.recv(1):
                spare.is_ready = True
                self._failures = 0
                return
        spare.is_failing = True
        self._selector.unregister(spare.grant)
        if self._granted.pop(spare.number, None):
            spare.grant.close()

    def _drop(self, spare: Spare, how: str) -> None:
        """Forget a process that has ended on its own, and report how."""
        self._forget(spare)
        spare.close()
        now_s = time.monotonic()
        if spare.is_ready:
            self._deaths_s.append(now_s)
        else:
            self._failures += 1
        self._due_s = now_s + _WATCHING_S
        if self._failures >= _MOST_FAILURES:
            self.end()
            self._relay.say(f"a spare rank {how}, as the one before; the job goes on without spare ranks")
        elif _die_often(self._deaths_s):
            self.end()
            self._relay.say(
                f"a spare rank {how}; {_MOST_DEATHS} have died within {_DEATHS_S:g} s while they waited, so the job "
                "goes on without spare ranks"
            )
        else:
            self._relay.say(f"a spare rank {how}; another one is made")

    def _forget(self, spare: Spare) -> None:
        del self._spares[spare.number]
        if spare.grant in self._selector.get_map():
            self._selector.unregister(spare.grant)
        self._due_s = time.monotonic()


def _die_often(deaths_s: Sequence[float]) -> bool:
    """Return True if spare processes die so often that no more are made.

    >>> _die_often([0.0, 60.0, 120.0, 180.0]), _die_often([0.0, 60.0, 120.0, 180.0, 240.0])
    (False, True)
    >>> _die_often([0.0, 3600.0, 7200.0, 10800.0, 14400.0])
    False
    """
    return len(deaths_s) == _MOST_DEATHS and deaths_s[-1] - deaths_s[0] < _DEATHS_S


def _has_ended(spare: Spare) -> bool:
    """Return True if the process has closed its end of the socket."""
    try:
        return spare.grant.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def _describe_end(spare: Spare, code: int) -> str:
    account = spare.watched.block.read_failure()
    if code < 0:
        return f"was killed by {name_signal(-code)}"
    if account is not None and code:
        return f"failed: {account['traceback'].rstrip().rpartition(chr(10))[2]}"
    return f"ended with code {code} before it had come to its Trainer"
