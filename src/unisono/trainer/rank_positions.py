"""The places of ranks in their run, as they tell each other when they meet after a decision of the launcher.

Start reading at `missed_call`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from unisono.errors import PeerError
from unisono.job.rejoin import RecoveryStore
from unisono.trainer.call_log import CallLog, LoggedCall
from unisono.trainer.hyperparameters import Hyperparameters
from unisono.trainer.save_rule import Place
from unisono.trainer.snapshot import Cursor
from unisono.watch import Event

__all__ = ["Position", "furthest", "missed_call", "read_positions", "tell_position"]


class Position(NamedTuple):
    """Where a rank is in its run, as it tells others when they meet."""

    log: CallLog
    name: str
    """The call under way."""
    cursor: Cursor
    """The cursor when the loop last asked for a batch or an epoch."""
    evaluations: Any
    """The state of the history of evaluations at that time."""
    settings: Hyperparameters | None
    """The numbers that control the run when the latest call ended: the loop may have changed them since then."""
    began: Place
    """The place where the first processes of the job began."""
    saved: Place
    """The place of the latest checkpoint."""
    told: Sequence[Event]
    """The latest events about calls of all ranks."""
    resizes: bool
    """True if the number of ranks is to change before the loop gets its next batch."""
    divides: bool
    """True if tables are divided over ranks."""
    shift: int
    """How rows of these are kept twice; see `RowOwners`."""


def tell_position(store: RecoveryStore, rank: int, position: Position) -> None:
    """Write the place of this rank, for all others."""
    store.put(_key(rank), position)


def read_positions(store: RecoveryStore) -> dict[int, Position]:
    """Return the places of the ranks that are not new, once they have written them."""
    ranks = [rank for rank in range(store.membership.size) if rank not in store.membership.ranks]
    doing = "come to the call in which they notice it"
    return dict(zip(ranks, store.read([_key(rank) for rank in ranks], doing=doing), strict=True))


def furthest(positions: dict[int, Position]) -> tuple[int, Position]:
    """Return the rank that has made the most calls, and its place."""
    rank = max(positions, key=lambda rank: (positions[rank].log.count, -rank))
    return rank, positions[rank]


def missed_call(log: CallLog, source: int, position: Position, *, is_joined: bool) -> LoggedCall | None:
    """Return the call that the furthest rank has made and this one has not; None if there is none.

    Args:
        log: The calls of this rank.
        source: The furthest rank.
        position: Its place.
        is_joined: False on a new rank that has not joined the others yet.

    Raises:
        PeerError: The ranks are too far apart.
    """
    behind = position.log.count - log.count
    if not is_joined and behind:
        # The rank whose calls this one has gone through has died, and no other rank had come so far.
        raise PeerError("another rank died before this new one had its state: it is replaced once more")
    if behind < 0 or behind > 1:
        raise PeerError(f"this rank has made {log.count} calls, and rank {source} {position.log.count}")
    if not behind:
        return None
    assert position.log.last is not None
    return position.log.last


def _key(rank: int) -> str:
    return f"position/{rank}"
