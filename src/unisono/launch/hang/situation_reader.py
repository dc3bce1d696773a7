"""Reads what ranks do: from their status blocks, the kernel, and the stacks for which they have been asked.

Stacks come some turns of the agent's loop later: `request_stacks` asks for them, and `poll_stacks` tells when all are
there. Start reading at `SituationReader.read`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from unisono.launch.hang.observed_rank import ObservedRank
from unisono.launch.hang.situation import Situation
from unisono.launch.hang.stacks import StackRequest, read_state
from unisono.launch.hang.status_block import RecordedCall

__all__ = ["SituationReader", "poll_stacks", "request_stacks"]

_LOAD_S = 0.25
"""The shortest time over which the load of a process is measured."""
_MOST_STACKS = 16


class SituationReader:
    """Reads what ranks do at one moment, as far as their present generation is concerned."""

    def __init__(self) -> None:
        self.past_ns: int | None = None
        """Calls that began before, by the monotonic clock, are left out; None if no rank has been replaced."""

    def read(
        self,
        members: Mapping[int, ObservedRank],
        now_s: float,
        requests: Mapping[int, StackRequest],
        ranks: Iterable[int] | None = None,
    ) -> list[Situation]:
        """Return what ranks do now.

        Args:
            members: The ranks that there are.
            now_s: The monotonic clock.
            requests: By rank, the stacks that have been collected.
            ranks: The ranks to look at, of which some may not be there. None: all, in order.
        """
        shown = sorted(members) if ranks is None else [rank for rank in ranks if rank in members]
        return [self._situation(rank, members[rank], now_s, requests.get(rank)) for rank in shown]

    def _situation(self, rank: int, watched: ObservedRank, now_s: float, request: StackRequest | None) -> Situation:
        state = read_state(watched.pid) if watched.alive else None
        if state is not None and now_s - watched.cpu[0] >= _LOAD_S:
            watched.measure_load(now_s, state.cpu_s)
        stacks = request.stacks if request else {}
        return Situation(
            rank=rank,
            pid=watched.pid,
            state=state.state if state else "ended",
            exit_code=watched.exit_code,
            load=watched.load,
            calls=tuple(self._comparable(call) for call in watched.block.calls() if self._matters(call)),
            main_thread=watched.block.main_thread,
            threads=stacks.get(watched.pid, ()),
            children=tuple((pid, read_state(pid).name, found) for pid, found in stacks.items() if pid != watched.pid),
            **watched.recorded(),
        )

    def _matters(self, call: RecordedCall) -> bool:
        return self.past_ns is None or call.started_ns >= self.past_ns or call.kind == "setup"

    def _comparable(self, call: RecordedCall) -> RecordedCall:
        """Return a call as those of other ranks are counted: one that was replaced has made fewer default groups."""
        return call if self.past_ns is None else replace(call, epoch=0)


def request_stacks(members: Mapping[int, ObservedRank], ranks: Iterable[int]) -> dict[int, StackRequest]:
    """Ask ranks for their stacks: the first of those that run, as long as they are not too many.

    Args:
        members: The ranks that there are.
        ranks: The ranks to ask, the most important first.
    """
    found: dict[int, StackRequest] = {}
    for rank in ranks:
        watched = members.get(rank)
        if watched is not None and watched.alive and len(found) < _MOST_STACKS:
            found[rank] = StackRequest(watched.pid, watched.dump, ask=watched.ask_stacks)
    return found


def poll_stacks(requests: Mapping[int, StackRequest]) -> bool:
    """Poll all requests, and return True if all are done."""
    return not [request for request in requests.values() if not request.poll()]
