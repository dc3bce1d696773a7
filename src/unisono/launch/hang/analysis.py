"""Decides from the situations of all ranks whether some wait in vain: for which ranks, since when, and where those are.

Pure functions of `Situation`s. A rank that waits is not a hang yet. A collective that other ranks do not enter is one,
and so are sends and receives that wait in a circle or for a rank that cannot come. Start reading at `find_hang`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from unisono.launch.hang.situation import Pending, Situation, user_line_of
from unisono.launch.hang.stacks import Frame
from unisono.launch.hang.status_block import CallKind, RecordedCall

__all__ = [
    "Finding",
    "Mismatch",
    "OperationState",
    "OperationWait",
    "find_hang",
    "find_mismatch",
]

_SETTLED_NS = 1_000_000_000
"""If the collectives of ranks do not match, a rank that has been in one for this long counts as stuck."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationState:
    """The operation of one rank in a group, as reports name it."""

    rank: int
    name: str
    detail: str
    """Tensors, reduction and root, for example "float32[4, 4], sum"."""
    since_ns: int
    place: Frame | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """Different collectives that members of a group called at the same position of its sequence."""

    group: str
    label: str
    """How users know the group."""
    members: tuple[int, ...]
    sequence: int
    operations: tuple[OperationState, ...]
    """In the order of ranks. Ranks that have not reached this position are missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationWait:
    """Ranks that wait in the same operation."""

    name: str
    kind: CallKind
    group: str
    label: str
    """How users know the group."""
    members: tuple[int, ...]
    """The ranks that take part; empty if they are not known."""
    sequence: int
    operations: tuple[OperationState, ...]
    """Those of the ranks that wait."""
    missing: tuple[int, ...]
    """The ranks that they wait for; empty if all are in the operation."""

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that wait."""
        return tuple(operation.rank for operation in self.operations)

    @property
    def since_ns(self) -> int:
        """When the first of them began to wait."""
        return min(operation.since_ns for operation in self.operations)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Ranks that wait in vain, as far as can be seen."""

    mismatch: Mismatch | None
    waits: tuple[OperationWait, ...]

    @property
    def since_ns(self) -> int:
        """When the first rank began to wait."""
        starts = [wait.since_ns for wait in self.waits]
        starts += [operation.since_ns for operation in self.mismatch.operations] if self.mismatch else []
        return min(starts)

    @property
    def involved(self) -> tuple[int, ...]:
        """All ranks that wait, are waited for, or belong to the mismatch."""
        ranks = {rank for wait in self.waits for rank in (*wait.waiting, *wait.missing)}
        return tuple(sorted(ranks | {o.rank for o in (self.mismatch.operations if self.mismatch else ())}))

    @property
    def stuck(self) -> tuple[int, ...]:
        """The ranks that are waited for and wait for nobody themselves; empty if collectives do not match."""
        if self.mismatch is not None:
            return ()
        waiting = {rank for wait in self.waits for rank in wait.waiting}
        return tuple(sorted({rank for wait in self.waits for rank in wait.missing} - waiting))

    def key(self) -> tuple[object, ...]:
        """Return a key that stays the same, also if the finding goes away and comes back at the next step."""
        if self.mismatch:
            return (self.mismatch.group, self.mismatch.sequence)
        # Waits that began at nearly the same time may change places: clocks of hosts are compared by messages.
        keys = [
            (wait.name, wait.group, wait.waiting, wait.missing, *sorted({_line(o) for o in wait.operations}, key=repr))
            for wait in self.waits
        ]
        return tuple(sorted(keys, key=repr))


def find_hang(situations: Sequence[Situation], *, now_ns: int, patience_ns: int) -> Finding | None:
    """Return the ranks that wait in vain; None if there are none. Situations are those of all ranks, also ended ones.

    A mismatch counts after a second, everything else after `patience_ns`; twice that if all members of a group are in
    their collective, because it may just take long.
    """
    by_rank = {situation.rank: situation for situation in situations}
    mismatch = find_mismatch(situations, now_ns=now_ns)
    waits = [
        wait
        for wait in _find_waits(by_rank, now_ns=now_ns, patience_ns=patience_ns)
        if wait.kind == "point-to-point" or wait.missing or now_ns - wait.since_ns >= 2 * patience_ns
    ]
    stuck = [wait for wait in waits if wait.kind != "point-to-point" or not _excused(wait, waits, by_rank)]
    if mismatch is None and not stuck:
        return None
    return Finding(mismatch=mismatch, waits=tuple(sorted(stuck, key=lambda wait: wait.since_ns)))


def find_mismatch(situations: Sequence[Situation], *, now_ns: int, settled_ns: int = _SETTLED_NS) -> Mismatch | None:
    """Return the first collective that is not the same on all ranks that reached it, if a rank is stuck since then.

    With a negative `settled_ns` no rank needs to be stuck: this finds the mismatch that preceded a failure.
    """
    found: list[tuple[int, Mismatch]] = []
    for (group, _, sequence), calls in _by_sequence(situations, failed=settled_ns < 0).items():
        signatures = {call.signature for call in calls.values()}
        if len(signatures) > 1 and (settled_ns < 0 or _stuck_since(situations, group, sequence, now_ns - settled_ns)):
            members = next(iter(calls.values())).ranks
            operations = tuple(_operation(rank, call) for rank, call in sorted(calls.items()))
            label = _label_of(group, situations)
            mismatch = Mismatch(group=group, label=label, members=members, sequence=sequence, operations=operations)
            found.append((min(call.started_ns for call in calls.values()), mismatch))
    if found:
        return min(found, key=lambda pair: pair[0])[1]
    return _mismatch_of_backends(situations)


def detail_of(call: RecordedCall) -> str:
    """Return the details of a call: tensors, reduction, root or peer."""
    sides = {"send": "to", "send_object_list": "to", "recv": "from", "recv_object_list": "from"}
    side = sides.get(call.name, "with" if call.kind == "message" else "root")
    peer = "" if call.peer is None else f"{side} {'' if side == 'root' else 'rank '}{call.peer}"
    return ", ".join(part for part in (call.tensors, call.reduction, peer) if part)


def _by_sequence(
    situations: Sequence[Situation], *, failed: bool = False
) -> dict[tuple[str, int, int], dict[int, RecordedCall]]:
    found: dict[tuple[str, int, int], dict[int, RecordedCall]] = {}
    for situation in situations:
        for call in situation.calls:
            if call.kind == "collective" and call.signature and (failed or not call.failed):
                found.setdefault((call.group, call.epoch, call.sequence), {})[situation.rank] = call
    return found


def _stuck_since(situations: Sequence[Situation], group: str, sequence: int, before_ns: int) -> bool:
    calls = (call for situation in situations for call in situation.calls)
    return any(
        call.running and call.group == group and call.sequence >= sequence and call.started_ns <= before_ns
        for call in calls
    ) or any(entry.group == group for situation in situations for entry in situation.pending)


def _mismatch_of_backends(situations: Sequence[Situation]) -> Mismatch | None:
    """Compare unfinished operations of backends: the only record of those that pass no recorded function."""
    entries: dict[tuple[str, int], dict[int, Pending]] = {}
    for situation in situations:
        for entry in situation.pending:
            if not entry.point_to_point and situation.exit_code is None:
                entries.setdefault((entry.group, entry.sequence), {})[situation.rank] = entry
    by_rank = {situation.rank: situation for situation in situations}
    for (group, sequence), pending in sorted(entries.items(), key=lambda item: item[0][1]):
        if len({entry.name for entry in pending.values()}) > 1:
            members = next((s.groups[group] for s in situations if group in s.groups), ())
            operations = tuple(_operation_of_backend(by_rank[rank], entry) for rank, entry in sorted(pending.items()))
            label = _label_of(group, situations)
            return Mismatch(group=group, label=label, members=members, sequence=sequence, operations=operations)
    return None


def _find_waits(by_rank: Mapping[int, Situation], *, now_ns: int, patience_ns: int) -> list[OperationWait]:
    found: dict[tuple[object, ...], OperationWait] = {}
    for situation in by_rank.values():
        if not situation.can_wait:
            continue
        late = [call for call in situation.calls if call.running and now_ns - call.started_ns >= patience_ns]
        for call in late:
            wait = _wait_in(call, situation, by_rank)
            found.setdefault((wait.name, wait.group, call.epoch, wait.sequence, wait.waiting), wait)
        if not any(call.running for call in situation.calls):
            for entry in situation.pending[:1]:
                if now_ns - entry.since_ns >= patience_ns and not entry.point_to_point:
                    wait = _wait_in_backend(entry, by_rank)
                    found.setdefault((wait.name, wait.group, "backend", wait.sequence), wait)
    return list(found.values())


def _wait_in(call: RecordedCall, situation: Situation, by_rank: Mapping[int, Situation]) -> OperationWait:
    members = call.ranks or tuple(sorted(by_rank))
    if call.kind in ("point-to-point", "message"):
        others = tuple(rank for rank in members if rank != situation.rank) if call.peer is None else (call.peer,)
        operations: tuple[OperationState, ...] = (_operation(situation.rank, call),)
        missing = others
    else:
        inside = {rank: own for rank in members if (own := _same_call(by_rank.get(rank), call)) is not None}
        operations = tuple(_operation(rank, own) for rank, own in sorted(inside.items()))
        missing = tuple(
            rank
            for rank in members
            if rank in by_rank
            and (by_rank[rank].state == "stopped" or (rank not in inside and not _passed(by_rank[rank], call)))
        )
    return OperationWait(
        name=call.name,
        kind=call.kind,
        group=call.group,
        label=call.label,
        members=call.ranks,
        sequence=call.sequence,
        operations=operations,
        missing=missing,
    )


def _same_call(situation: Situation | None, call: RecordedCall) -> RecordedCall | None:
    """Return the same collective of another rank, if that rank is inside it now, and not stopped there."""
    if situation is None or not situation.can_wait:
        return None
    for own in situation.calls:
        if own.running and _alike(own, call) and (own.epoch, own.sequence) == (call.epoch, call.sequence):
            return own
    return None


def _alike(one: RecordedCall, other: RecordedCall) -> bool:
    """Return True if two calls are counted together. Calls that make groups are counted by function."""
    return one.kind == other.kind and one.group == other.group and (one.kind != "setup" or one.name == other.name)


def _passed(situation: Situation, call: RecordedCall) -> bool:
    """Return True if a rank has completed a collective in which others still wait, or given it to the backend."""
    return situation.epoch > call.epoch or any(
        _alike(own, call) and own.epoch == call.epoch and own.sequence >= call.sequence and not own.failed
        for own in situation.calls
    )


def _wait_in_backend(entry: Pending, by_rank: Mapping[int, Situation]) -> OperationWait:
    members = next((s.groups[entry.group] for s in by_rank.values() if entry.group in s.groups), ())
    inside = {
        rank: own
        for rank, situation in by_rank.items()
        if situation.can_wait
        and (own := next((o for o in situation.pending if _same_entry(o, entry)), None)) is not None
    }
    return OperationWait(
        name=entry.name,
        kind="collective",
        group=entry.group,
        label=_label_of(entry.group, by_rank.values()),
        members=members,
        sequence=entry.sequence,
        operations=tuple(_operation_of_backend(by_rank[rank], own) for rank, own in sorted(inside.items())),
        missing=tuple(
            rank
            for rank in (members or sorted(by_rank))
            if rank in by_rank
            and (
                by_rank[rank].state == "stopped"
                or (rank not in inside and by_rank[rank].enqueued.get(entry.group, -1) < entry.sequence)
            )
        ),
    )


def _label_of(group: str, situations: Iterable[Situation]) -> str:
    """Return how users know a group, from its calls; "" if none has a label."""
    calls = (call for situation in situations for call in situation.calls)
    return next((call.label for call in calls if call.group == group and call.label), "")


def _same_entry(one: Pending, other: Pending) -> bool:
    return (one.group, one.sequence) == (other.group, other.sequence)


def _excused(wait: OperationWait, waits: Sequence[OperationWait], by_rank: Mapping[int, Situation]) -> bool:
    """Return True if a send or receive may still complete: its other side computes, or waits for a rank that does.

    So a parameter server and a pipeline whose first stage is busy do not count as hangs.
    """
    by_waiter = {rank: other for other in waits for rank in other.waiting}
    seen: set[int] = set(wait.waiting)
    open_ranks = list(wait.missing)
    while open_ranks:
        rank = open_ranks.pop()
        situation = by_rank.get(rank)
        if rank in seen or situation is None:
            continue
        seen.add(rank)
        if situation.ended or situation.state == "stopped":
            continue
        next_wait = by_waiter.get(rank)
        if next_wait is None:
            return True
        if next_wait.kind == "point-to-point":
            open_ranks += next_wait.missing
    return False


def _operation(rank: int, call: RecordedCall) -> OperationState:
    return OperationState(
        rank=rank, name=call.name, detail=detail_of(call), since_ns=call.started_ns, place=user_line_of(call)
    )


def _operation_of_backend(situation: Situation, entry: Pending) -> OperationState:
    return OperationState(
        rank=situation.rank,
        name=entry.name,
        detail=entry.tensors,
        since_ns=entry.since_ns,
        place=situation.main.place if situation.main else None,
    )


def _line(operation: OperationState) -> object:
    return (operation.place.file, operation.place.line) if operation.place else None
