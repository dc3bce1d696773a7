"""Ranks that do nothing while none is in a collective: found by `launch.hang.idleness`, and reported as information.

Start reading at `IdleWatch`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from unisono.launch.hang.hang_report import render_idle
from unisono.launch.hang.idleness import Activity, Idleness, read_activity
from unisono.launch.hang.observed_rank import ObservedRank
from unisono.launch.hang.situation import Situation

__all__ = ["IdleWatch"]


class IdleWatch:
    """Looks whether the ranks of this host do nothing.

    Args:
        patience_s: Seconds without activity before a report; 0 for never.
        folder: The working directory; paths in reports are relative to it.
        command: What shows where ranks are.
    """

    def __init__(self, patience_s: float, *, folder: str, command: str) -> None:
        self._idleness = Idleness(patience_s)
        self._folder, self._command = folder, command
        self._told: set[bool] = set()

    def look(self, now_s: float, members: Mapping[int, ObservedRank]) -> tuple[int, ...]:
        """Return the ranks that still run, once they have done nothing for long enough; otherwise none.

        Args:
            now_s: The time, by the monotonic clock.
            members: The ranks.
        """
        alive = self._alive(members)
        if alive is None:
            self._idleness.forget()
            return ()
        return tuple(alive) if self._idleness.look(now_s, ranks=list(alive), read=_reader(alive)) else ()

    @property
    def since_s(self) -> float:
        """Since when they have done nothing, by the monotonic clock. To show their stacks is activity, too."""
        return self._idleness.since_s

    def for_s(self, now_s: float, members: Mapping[int, ObservedRank]) -> float:
        """Return for how long the ranks that still run have done nothing, if that is long enough; otherwise 0."""
        alive = self._alive(members)
        return self._idleness.for_s(now_s, ranks=list(alive), read=_reader(alive)) if alive else 0.0

    def report(self, situations: Sequence[Situation], idle_s: float, *, places: str = "") -> str:
        """Return the report: once, and once more when some ranks have ended; otherwise "".

        Args:
            situations: All ranks, with the stacks of those that still run.
            idle_s: For how long they have done nothing.
            places: A line on the hosts of the ranks; "" for none.
        """
        ended = [situation.rank for situation in situations if situation.ended]
        idle = [situation for situation in situations if not situation.ended]
        if not idle or bool(ended) in self._told:
            return ""
        self._told.add(bool(ended))
        return render_idle(
            idle,
            ended=ended,
            idle_s=idle_s,
            now_ns=time.monotonic_ns(),
            folder=self._folder,
            command=self._command,
            places=places,
        )

    def forget(self) -> None:
        """Start over."""
        self._idleness.forget()

    @staticmethod
    def _alive(members: Mapping[int, ObservedRank]) -> dict[int, ObservedRank] | None:
        """Return the ranks that still run; None if failures or collectives have reports of their own."""
        alive = {rank: watched for rank, watched in sorted(members.items()) if watched.alive}
        calls = (call for watched in alive.values() for call in watched.block.calls())
        if any(watched.exit_code for watched in members.values()):
            return None
        return None if any(call.running and call.kind != "point-to-point" for call in calls) else alive


def _reader(alive: Mapping[int, ObservedRank]) -> Callable[[], dict[int, Activity]]:
    return lambda: {rank: read_activity(watched.pid, watched.block.mark) for rank, watched in alive.items()}
