"""Which row of a dynamic table an id has.

Rows are taken when an update brings a gradient for ids that have none, the free ones in turn, and by ids in ascending
order. All ranks see the ids of all, so each has the same map, and nothing is sent for it. Where rows are divided over
ranks, each has the whole map, too, and is told the ids that change it. The ids of the rows are part of the model. To
find them there is an index beside them (`id_index.py`), which is made anew whenever something else has written them, as
a checkpoint does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from unisono.embedding.id_index import NBYTES_PER_ID, IdIndex
from unisono.embedding.located_rows import LocatedRows, PlacedIds
from unisono.embedding.row_memory import resized
from unisono.embedding.row_policy import RowPolicy
from unisono.embedding.undo_log import UndoLog
from unisono.embedding.waiting_ids import WaitingIds
from unisono.errors import TableFullError

__all__ = ["RowMap", "map_nbytes"]

_SEED, _COUNT, _STEP, _EVICTED = range(4)
_MOST = 2**31 - 1


def map_nbytes(policy: RowPolicy, capacity: int) -> int:
    """Return the memory of a map for so many rows."""
    waiting = waiting_capacity(policy, capacity) * WaitingIds.NBYTES_PER_ID if policy.admit_after > 1 else 0
    return capacity * (8 + NBYTES_PER_ID + 8 * policy.evicts) + waiting


def waiting_capacity(policy: RowPolicy, capacity: int) -> int:
    """Return how many ids can wait for one of so many rows."""
    return policy.waiting_capacity or max(capacity, WaitingIds.LEAST_CAPACITY)


class RowMap(LocatedRows):
    """The ids of a table's rows.

    Its tensors are parameters without a gradient, not buffers: virtual ranks never write them.

    Args:
        name: The table, for messages.
        capacity: The number of rows that there is memory for, below 2**31.
        seed: Determines the first values of rows.
        std: The standard deviation of these values.
        policy: Which ids get a row, and which rows are given up.
    """

    def __init__(self, name: str, capacity: int, *, seed: int, std: float, policy: RowPolicy) -> None:
        super().__init__(name, std=std)
        self.ids = nn.Parameter(torch.zeros(capacity, dtype=torch.int64), requires_grad=False)
        """The id of each row that is taken."""
        self.counters = nn.Parameter(torch.tensor([seed, 0, 0, 0]), requires_grad=False)
        """The seed, and the numbers of rows that are taken, of steps, and of rows that have been given up."""
        self.seen: nn.Parameter | None = None
        self.sightings: nn.Parameter | None = None
        if policy.evicts:
            self.seen = nn.Parameter(torch.zeros(capacity, dtype=torch.int32), requires_grad=False)
            """For each row, the last step with a gradient for its id; 0 for free ones."""
            self.sightings = nn.Parameter(torch.zeros(capacity, dtype=torch.int32), requires_grad=False)
            """For each row, the number of steps with a gradient for its id."""
        self.waiting = WaitingIds(waiting_capacity(policy, capacity)) if policy.admit_after > 1 else None
        """Ids that have no row yet."""
        self.policy = policy
        self.announced: Sequence[Tensor] | None = None
        """The ids of the update at hand that may change the map, if rows are divided over ranks; they may be repeated.

        These are all ids of all ranks if rows may be given up, and otherwise all that have no row.
        """
        self.is_trained = False
        """True once there was an update, after which an optimizer may have state of this length."""
        self._numbers = [seed, 0, 0, 0]
        self._most = 0
        """More rows than that have never been taken."""
        self._free = torch.empty(0, dtype=torch.int64)
        """The free rows, ascending, where rows may be given up."""
        self._index: IdIndex | None = None
        self._indexed: tuple[Any, ...] = ()
        """The ids from which the index was made."""
        self._log = UndoLog()

    def extra_repr(self) -> str:
        """Return what print shows of it."""
        return f"{self.count} of {len(self.ids)} rows taken"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and copies, without what can be made anew."""
        return {**self.__dict__, "_index": None, "_indexed": (), "_log": UndoLog()}

    @property
    def seed(self) -> int:
        """The number that determines the first values of rows."""
        self._refresh()
        return self._numbers[_SEED]

    @property
    def count(self) -> int:
        """The number of ids that have a row."""
        self._refresh()
        return self._numbers[_COUNT]

    @property
    def evicted(self) -> int:
        """The number of rows that have been given up so far."""
        self._refresh()
        return self._numbers[_EVICTED]

    @property
    def taken(self) -> Tensor:
        """The numbers of the rows that are taken, ascending."""
        self._refresh()
        return self._taken()

    def in_order(self) -> Tensor:
        """Return the numbers of the rows that are taken, by ids in ascending order."""
        taken = self.taken
        return taken.index_select(0, torch.argsort(self.ids.detach().index_select(0, taken)))

    def find(self, ids: Tensor) -> Tensor:
        """Return the row of each id, [n], int64; -1 for those that have none.

        Args:
            ids: [n], int64.
        """
        return self._refresh().find(ids)

    def numbers(self, ids: Tensor) -> Tensor:
        """See `LocatedRows`."""
        return self.find(ids)

    def present(self, start: int, stop: int) -> Tensor:
        """See `LocatedRows`. A row that has been given up still has values."""
        self._refresh()
        found = torch.zeros(stop - start, dtype=torch.uint8, device=self.ids.device)
        if (count := min(stop, self._most) - start) > 0:
            rows = torch.arange(start, start + count, device=self.ids.device)
            found[:count] = 1 if self.owners is None else self.owners.keep(rows)
        return found

    def are_admitted(self, ids: Tensor) -> Tensor:
        """Return True for each of some ids without a row that gets one in an update with it, [n]."""
        if self.waiting is None:
            return torch.ones_like(ids, dtype=torch.bool)
        return self.waiting.counts_of(ids) + 1 >= self.policy.admit_after

    def check_room(self, ids: Sequence[Tensor]) -> None:
        """Raise TableFullError if an update with these ids, which may be repeated, would find too few rows.

        `wanted_length` is then the number of rows that a table which grows should have.
        """
        if (new := self._lacking(ids)) is not None:
            if self.policy.when_full == "grow":
                self.wanted_length = min(max(2 * len(self.ids), self.count + len(new)), _MOST)
            self._refuse(new)

    def resize(self, length: int) -> None:
        """Make room for another number of rows. All that are taken must be below it."""
        for tensor in (self.ids, self.seen, self.sightings):
            if tensor is not None:
                tensor.data = resized(tensor, length)
        self.wanted_length = 0

    def _lacking(self, ids: Sequence[Tensor]) -> Tensor | None:
        """Return the ids that need a row in an update, each once, if there are too few rows for them; else None."""
        most, room = sum(map(len, ids)), len(self.ids) - self.count
        if most <= (len(self.ids) if self.policy.replaces else room):
            return None
        joined = torch.cat([*ids])
        rows = self.find(joined)
        new = torch.unique(joined[rows < 0])
        new = new[self.are_admitted(new)]
        if len(new) > room and self.seen is not None:
            after = self.seen.index_fill(0, rows[rows >= 0], step := self._numbers[_STEP] + 1)
            room += len(self.policy.evicted(after, self.sightings, step=step, wanted=len(new) - room))
        return new if len(new) > room else None

    def place(self, ids: Tensor, everyone: Sequence[Tensor] | None = None) -> PlacedIds:
        """Make an update of the map, and return the rows of some of its ids.

        Args:
            ids: [n], int64, all different.
            everyone: All ids of the update, at least one, which may be repeated; None: those that were announced, or
                `ids` are all.

        Raises:
            TableFullError: There are not enough rows. Nothing has been changed.
        """
        before, self.is_trained = self.find(ids), True
        if everyone is None:
            everyone, self.announced = self.announced, None
        if everyone is None:
            changed = self._update(ids, before)
        else:
            joined = torch.cat([*everyone])
            changed = self._update(joined, self.find(joined))
        if not changed:
            return PlacedIds(before, before[:0])
        rows = self.find(ids)
        return PlacedIds(rows, ((before < 0) & (rows >= 0)).nonzero().view(-1))

    @torch.no_grad()
    def write_first(self, ids: Tensor, rows: Tensor, weight: Tensor, state: Mapping[str, Any]) -> None:
        """Write the first values of new rows, and the state of an optimizer that has not seen them.

        Args:
            ids: [n].
            rows: Their rows.
            weight: The table, [capacity, dim].
            state: The state of its optimizer.
        """
        super().write_first(ids, rows, weight, state)
        if self.policy.evicts:
            for value in state.values():
                if isinstance(value, Tensor) and value.shape[:1] == weight.shape[:1]:
                    value.index_fill_(0, rows, 0)

    def undo(self) -> None:
        """Take back the last update of the map, once."""
        self._log.undo()  # the next search notices that, and makes the index anew

    def admit(self, ids: Tensor) -> Tensor:
        """Give each of some ids a row, however often it has been seen, and return the rows, [n]. It counts as no step.

        Raises:
            TableFullError: There are not enough rows. Nothing has been changed.
        """
        self._update(ids, self.find(ids), admits_all=True)
        return self.find(ids)

    def _update(self, ids: Tensor, rows: Tensor, *, admits_all: bool = False) -> bool:
        """Count a step, give rows up and take rows. Return True if the row of an id has changed.

        Args:
            ids: All ids of the update, which may be repeated.
            rows: Their rows.
            admits_all: True to count no step, to let no id wait, and to give up no row.
        """
        log, numbers = self._log, [*self._numbers]
        log.clear()
        missing = ids[rows < 0]
        if self.seen is None and not len(missing):
            return False
        numbers[_STEP] += not admits_all
        now = max(numbers[_STEP], 1)  # 0 stands for free rows
        new = admitted = torch.unique(missing)
        is_admitted = None
        if self.waiting is not None:
            is_admitted = torch.ones_like(new, dtype=torch.bool) if admits_all else self.are_admitted(new)
            admitted = new[is_admitted]
        wanted = len(admitted) + numbers[_COUNT] - len(self.ids)
        given_up = admitted[:0]
        if self.seen is not None:
            assert self.sightings is not None
            known, step = rows[rows >= 0], admitted.new_tensor([now])
            log.write(self.seen, known, step)
            log.write(self.sightings, known, self.sightings.index_select(0, known) + 1)
            if not admits_all and (wanted > 0 or self.policy.is_due(numbers[_STEP])):
                given_up = self.policy.evicted(self.seen, self.sightings, step=numbers[_STEP], wanted=wanted)
        if wanted > len(given_up):
            log.undo()
            self._refuse(admitted)
        if self.waiting is not None:
            assert is_admitted is not None
            self.waiting.count(new, is_admitted, log)
        if self.seen is None and not len(admitted):
            return False
        for tensor in (self.ids, self.seen, self.sightings) if len(given_up) else ():
            assert tensor is not None
            log.write(tensor, given_up, given_up.new_zeros(1))
        taken = self._free_rows(len(admitted), anew=len(given_up) > 0)
        log.write(self.ids, taken, admitted)
        if self.seen is not None:
            assert self.sightings is not None
            log.write(self.seen, taken, taken.new_tensor([now]))
            log.write(self.sightings, taken, taken.new_ones(1))
        numbers[_COUNT] += len(admitted) - len(given_up)
        numbers[_EVICTED] += len(given_up)
        self._most = max(self._most, numbers[_COUNT] + numbers[_EVICTED])
        log.write(self.counters, torch.arange(len(numbers), device=ids.device), self.counters.new_tensor(numbers))
        self._numbers = numbers
        if len(given_up) or self._index is None:
            self._index = IdIndex(self.ids, self._taken())
        else:
            self._index = self._index.added(taken)
        self._indexed = self._source()
        return len(taken) > 0 or len(given_up) > 0

    def _free_rows(self, count: int, *, anew: bool) -> Tensor:
        """Return the first free rows, which are then no longer free."""
        if self.seen is None:
            start = self._numbers[_COUNT]
            return torch.arange(start, start + count, device=self.ids.device)
        free = (self.seen == 0).nonzero().view(-1) if anew else self._free
        self._free = free[count:]
        return free[:count]

    def _refuse(self, new: Tensor) -> NoReturn:
        remedy = (
            'Give it when_full="grow", with which a run also goes on from its checkpoint, or "evict_oldest".'
            if self.policy.when_full == "raise"
            else "Give it a larger capacity, or batches with fewer different ids."
        )
        raise TableFullError(
            f"table {self.name!r} is full: {self.count} of its {len(self.ids)} rows are taken, and this step has "
            f"{len(new)} ids without a row, such as {int(new[0])}. No table was updated. {remedy}"
        )

    def _source(self) -> tuple[Any, ...]:
        return tuple((t.data_ptr(), t.device, 0 if t.is_inference() else t._version) for t in (self.ids, self.counters))

    def _refresh(self) -> IdIndex:
        """Return the index, which is made anew if something else has written the ids."""
        source = self._source()
        if self._index is None or source != self._indexed:
            self._numbers, self._indexed = self.counters.tolist(), source
            self._most = max(self._most, self._numbers[_COUNT] + self._numbers[_EVICTED])
            if self.seen is not None:
                self._free = (self.seen == 0).nonzero().view(-1)
            self._index = IdIndex(self.ids, self._taken())
        return self._index

    def _taken(self) -> Tensor:
        if self.seen is None:
            return torch.arange(self._numbers[_COUNT], device=self.ids.device)
        return self.seen.nonzero().view(-1)
