"""The words and semaphores by which the ranks and the servers of a session tell each other how far they are.

Each word has one writer and is a single store. A process may be killed between any two of them, so their order matters:
`server.py` says which. Semaphores wake those that wait, and order memory; a wait looks at the words, so that a post
that is lost with its process, or one too many, does no harm.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from unisono.shm.segment import Segment, aligned
from unisono.shm.semaphore import SEMAPHORE_NBYTES, Semaphore

__all__ = ["SessionControl"]

_LINE = 8
"""Words of a cache line: each writer has its own."""
_RELEASED, _CLOSED, _GIVEN = range(3)
_APPLIED, _READY, _DONE, _REPAIRED, _ROWS = range(5)
_NUMBERED = _ROWS + 2
"""After two sums of rows, in turn."""
_SLICE_S = 0.01


class SessionControl:
    """The control memory of a session.

    Args:
        segment: Shared memory of `nbytes`, which `create` has prepared.
        ranks: The number of ranks.
        servers: The number of servers.
        redo_nbytes: The bytes of each server's redo record.
    """

    def __init__(self, segment: Segment, *, ranks: int, servers: int, redo_nbytes: int) -> None:
        self._segment, self._ranks, self._servers = segment, ranks, servers
        lines = ranks + servers
        self._words = memoryview(segment.memory)[: lines * _LINE * 8].cast("q")
        self._semaphores_at = aligned(lines * _LINE * 8)
        self._redo_at = self._semaphores_at + aligned(servers * (1 + ranks) * SEMAPHORE_NBYTES)
        self._redo_nbytes = aligned(redo_nbytes)

    @staticmethod
    def nbytes(*, ranks: int, servers: int, redo_nbytes: int) -> int:
        """Return the size of the memory."""
        words, semaphores = (ranks + servers) * _LINE * 8, servers * (1 + ranks) * SEMAPHORE_NBYTES
        return aligned(words) + aligned(semaphores) + servers * aligned(redo_nbytes)

    def create(self) -> None:
        """Prepare memory that is all zero. One rank does it, before others have the memory."""
        for server in range(self._servers):
            for place in range(1 + self._ranks):
                self._semaphore(server, place).create()

    # The ranks' words.

    @property
    def released(self) -> int:
        """The number of the last step that servers may apply: any rank may say so."""
        return max(self._words[rank * _LINE + _RELEASED] for rank in range(self._ranks))

    @property
    def is_closed(self) -> bool:
        """True if ranks give servers nothing more in this session."""
        return any(self._words[rank * _LINE + _CLOSED] for rank in range(self._ranks))

    def rows_given(self) -> int:
        """Return the rows in all updates that were released."""
        turn = _GIVEN + self.released % 2
        return sum(self._words[rank * _LINE + turn] for rank in range(self._ranks))

    def hand_over(self, step: int, *, rank: int, rows: int) -> None:
        """Note that a rank has handed over its updates in a step, with so many rows. Steps count from 1."""
        line = rank * _LINE + _GIVEN
        self._words[line + step % 2] = self._words[line + (step - 1) % 2] + rows

    def release(self, step: int, *, rank: int) -> None:
        """Let servers apply a step, whose updates all ranks have handed over. Any rank may say so."""
        self._words[rank * _LINE + _RELEASED] = step
        for server in range(self._servers):
            self._semaphore(server, 0).post()

    def close(self, *, rank: int) -> None:
        """Note that ranks give servers nothing more in this session."""
        self._words[rank * _LINE + _CLOSED] = 1

    # The servers' words.

    @property
    def applied(self) -> int:
        """The last step that all servers have applied."""
        return min(self.applied_by(server) for server in range(self._servers))

    def applied_by(self, server: int) -> int:
        """Return the last step that a server has applied."""
        return self._words[self._place(server) + _APPLIED]

    def rows_applied(self, *, in_columns: bool) -> int:
        """Return the rows in the updates that servers have applied.

        Args:
            in_columns: True if each server has columns of all rows, so that a row is applied when all have done so.
        """
        rows = [self._rows(server, self.applied_by(server)) for server in range(self._servers)]
        return min(rows) if in_columns else sum(rows)

    @property
    def repaired(self) -> int:
        """How many updates of some rows were completed by a process in the place of the one that began them."""
        return sum(self._words[self._place(server) + _REPAIRED] for server in range(self._servers))

    def set_applied(self, server: int, step: int, *, rows: int) -> None:
        """Note that a server has applied a step, with so many rows, and wake the ranks."""
        # The sum for the step before stays as it is, so that this can be repeated.
        self._words[self._place(server) + _ROWS + step % 2] = self._rows(server, step - 1) + rows
        self._words[self._place(server) + _APPLIED] = step
        self.wake_ranks(server)

    @property
    def numbered(self) -> int:
        """The last step of which all servers have computed their numbers of rows, of the steps that have such."""
        return min(self.numbered_by(server) for server in range(self._servers))

    def numbered_by(self, server: int) -> int:
        """Return the last step of which a server has computed its numbers of rows."""
        return self._words[self._place(server) + _NUMBERED]

    def set_numbered(self, server: int, step: int) -> None:
        """Note that a server has computed its numbers of rows in a step, and wake the other servers."""
        self._words[self._place(server) + _NUMBERED] = step
        self.wake_servers(server)

    def wake_servers(self, server: int) -> None:
        """Wake the servers that wait for one."""
        for other in range(self._servers):
            if other != server:
                self._semaphore(other, 0).post()

    def wake_ranks(self, server: int) -> None:
        """Wake the ranks that wait for a server."""
        for rank in range(self._ranks):
            self._semaphore(server, 1 + rank).post()

    def ready(self, server: int) -> int:
        """Return the number of the last part of an update that the redo record has, whole."""
        return self._words[self._place(server) + _READY]

    def done(self, server: int) -> int:
        """Return the number of the last part that is written to its table."""
        return self._words[self._place(server) + _DONE]

    def set_ready(self, server: int, part: int) -> None:
        """Note that the redo record has a part, which may now be written."""
        self._words[self._place(server) + _READY] = part

    def set_done(self, server: int, part: int) -> None:
        """Note that a part is written, so that the redo record is free."""
        self._words[self._place(server) + _DONE] = part

    def count_repair(self, server: int) -> None:
        """Count an update that another process has begun."""
        self._words[self._place(server) + _REPAIRED] += 1

    def redo(self, server: int) -> Tensor:
        """Return the redo record of a server, as bytes."""
        return self._segment.tensor(self._redo_at + server * self._redo_nbytes, (self._redo_nbytes,))

    # Waits.

    def sleep(self, server: int, timeout_s: float) -> None:
        """Wait, as a server, until a step is released, for at most `timeout_s`; it may return early."""
        self._semaphore(server, 0).wait(timeout_s)

    def wait_until_applied(self, step: int, *, rank: int, look: Callable[[int, float], None]) -> None:
        """Wait, as a rank, until all servers have applied a step.

        Args:
            step: The number of the step.
            rank: This rank.
            look: Called now and then with the server that is awaited and the seconds so far. It may raise.
        """
        begun_s = time.monotonic()
        for server in range(self._servers):
            while self.applied_by(server) < step:
                if not self._semaphore(server, 1 + rank).wait(_SLICE_S):
                    look(server, time.monotonic() - begun_s)
        # Posts of steps that nobody waited for would add up.
        for server in range(self._servers):
            while self._semaphore(server, 1 + rank).try_wait():
                pass

    def _place(self, server: int) -> int:
        return (self._ranks + server) * _LINE

    def _rows(self, server: int, step: int) -> int:
        return self._words[self._place(server) + _ROWS + step % 2]

    def _semaphore(self, server: int, place: int) -> Semaphore:
        offset = self._semaphores_at + (server * (1 + self._ranks) + place) * SEMAPHORE_NBYTES
        return Semaphore(self._segment.address + offset)
