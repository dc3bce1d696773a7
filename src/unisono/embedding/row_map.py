"""Which row of a dynamic table an id has.

Rows are taken in turn, when an update first brings a gradient for an id, and in ascending order of the ids of that
update. All ranks see the ids of all, so each has the same map, and nothing is sent for it.

The ids of the rows are part of the model. To find them there is an index beside them, which is made from them whenever
something else has written them, as a checkpoint does: a hash table with open addressing, linear probing and no
deletions, whose slots hold numbers of rows. It is searched for all ids at once by operations of torch: each round looks
at one slot of each id that is not settled. At most a quarter of the slots is taken, so few ids need a second round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono.embedding.initial_rows import initial_rows, mixed
from unisono.errors import TableFullError

__all__ = ["NBYTES_PER_ROW", "RowMap"]

NBYTES_PER_ROW = 8 + 32
"""The memory of a row beside its values: the id, and at most eight slots."""
_SLOTS_PER_ROW = 4
_LEAST_SLOTS = 1024
_EMPTY = -1
_SEED, _COUNT = 0, 1


class RowMap(nn.Module):
    """The ids of a table's rows.

    Its tensors are parameters without a gradient, not buffers: virtual ranks never write them.

    Args:
        name: The table, for messages.
        capacity: The number of rows that there is memory for, below 2**31.
        seed: Determines the first values of rows.
        std: The standard deviation of these values.
    """

    def __init__(self, name: str, capacity: int, *, seed: int, std: float) -> None:
        super().__init__()
        self.ids = nn.Parameter(torch.zeros(capacity, dtype=torch.int64), requires_grad=False)
        """The id of each row. Rows from `count` on have none."""
        self.counters = nn.Parameter(torch.tensor([seed, 0]), requires_grad=False)
        """The seed, and the number of rows that are taken."""
        self.name, self.std = name, std
        self._count = self._seed = 0
        self._slots = torch.empty(0, dtype=torch.int32)
        self._indexed: tuple[Any, ...] = ()
        """What the index was made from."""

    def extra_repr(self) -> str:
        """Return what print shows of it."""
        return f"{self.count} of {len(self.ids)} rows taken"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle, without the index."""
        return {**self.__dict__, "_slots": torch.empty(0, dtype=torch.int32), "_indexed": ()}

    @property
    def count(self) -> int:
        """The number of ids that have a row."""
        self._refresh()
        return self._count

    def find(self, ids: Tensor) -> Tensor:
        """Return the row of each id, [n], int64; -1 for those that have none.

        Args:
            ids: [n], int64.
        """
        self._refresh()
        known, mask = self.ids, len(self._slots) - 1
        slots = mixed(ids).bitwise_and_(mask)
        rows = self._slots.index_select(0, slots)
        # An empty slot is compared with some id, which does not matter.
        is_open = (known.index_select(0, rows.clamp_min(0)) != ids).logical_and_(rows != _EMPTY)
        places = is_open.nonzero().view(-1)
        if len(places):
            ids, slots = ids.index_select(0, places), slots.index_select(0, places)
        while len(places):
            slots = (slots + 1).bitwise_and_(mask)
            found = self._slots.index_select(0, slots)
            is_open = (known.index_select(0, found.clamp_min(0)) != ids).logical_and_(found != _EMPTY)
            rows[places] = found  # those that are still open are written again
            ids, slots, places = ids[is_open], slots[is_open], places[is_open]
        return rows.long()

    def locate(self, weight: Tensor, ids: Tensor, *, padding: int | None = None) -> tuple[Tensor, Tensor]:
        """Return a tensor with the values of ids, and the row of each id in it.

        It is the table, where all ids have a row. Otherwise it is a copy of the rows, [n, dim], with the first values
        of those that have none.

        Args:
            weight: The table, [capacity, dim].
            ids: [n], int64.
            padding: An id whose values are zeros; None: there is none.
        """
        rows = self.find(ids)
        missing = (rows < 0).nonzero().view(-1)
        if not len(missing):
            return weight, rows
        values = weight.index_select(0, rows.clamp_min_(0))
        of_missing = ids.index_select(0, missing)
        first = self.initial(of_missing, weight)
        if padding is not None:
            first[of_missing == padding] = 0.0
        return values.index_copy_(0, missing, first), torch.arange(len(ids), device=ids.device)

    def initial(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Return the first values of the rows of ids, [n, dim], of the type of the table."""
        self._refresh()
        return initial_rows(ids, weight.shape[1], seed=self._seed, std=self.std, dtype=weight.dtype)

    def check_room(self, ids: Sequence[Tensor]) -> None:
        """Raise TableFullError if there are not enough rows for the ids that have none. They may be repeated."""
        if sum(map(len, ids)) > len(self.ids) - self.count:
            self._check_room(self._missing(ids))

    def take(self, ids: Sequence[Tensor]) -> None:
        """Take rows for the ids that have none. They may be repeated.

        The rows still have what was in them: write `initial` there.

        Raises:
            TableFullError: There are not enough rows. None has been taken.
        """
        new = self._missing(ids)
        self._check_room(new)
        if not len(new):
            return
        start, self._count = self._count, self._count + len(new)
        with torch.no_grad():
            self.ids[start : self._count] = new
            self.counters[_COUNT] = self._count
        if self._count * _SLOTS_PER_ROW > len(self._slots):
            self._build()
        else:
            self._insert(start)
        self._indexed = self._source()

    def admit(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Return the rows of ids, [n], after taking and writing one for each id that had none.

        Args:
            ids: [n], int64, all different.
            weight: The table.

        Raises:
            TableFullError: There are not enough rows. Nothing has been written.
        """
        rows = self.find(ids)
        missing = (rows < 0).nonzero().view(-1)
        if len(missing):
            new = ids.index_select(0, missing)
            self.take([new])
            taken = self.find(new)
            weight.index_copy_(0, taken, self.initial(new, weight))
            rows.index_copy_(0, missing, taken)
        return rows

    def roll_back(self, count: int) -> None:
        """Give back all rows but the first `count`, which is what `count` was before they were taken."""
        if count == self.count:
            return
        with torch.no_grad():
            self.ids[count : self._count] = 0
            self.counters[_COUNT] = count
        # The index has no deletions: the next search makes it anew.

    def _missing(self, ids: Sequence[Tensor]) -> Tensor:
        """Return the ids that have no row, each once, ascending."""
        joined = torch.cat([*ids]) if ids else self.ids[:0]
        new: Tensor = torch.unique(joined[self.find(joined) < 0])
        return new

    def _check_room(self, new: Tensor) -> None:
        if len(new) <= len(self.ids) - self.count:
            return
        raise TableFullError(
            f"table {self.name!r} is full: {self.count} of its {len(self.ids)} rows are taken, and this step has "
            f"{len(new)} ids without a row, such as {int(new[0])}. No table was updated. Give it a larger capacity="
            ", or fewer different ids."
        )

    def _source(self) -> tuple[Any, ...]:
        return tuple((t.data_ptr(), t.device, 0 if t.is_inference() else t._version) for t in (self.ids, self.counters))

    def _refresh(self) -> None:
        """Make the index anew if something else has written the ids."""
        source = self._source()
        if source != self._indexed:
            self._seed, self._count = self.counters.tolist()
            self._build()
            self._indexed = source

    def _build(self) -> None:
        size = 1 << max(self._count * _SLOTS_PER_ROW * 2 - 1, _LEAST_SLOTS - 1).bit_length()
        size = min(size, 1 << max(len(self.ids) * _SLOTS_PER_ROW - 1, _LEAST_SLOTS - 1).bit_length())
        self._slots = torch.full((size,), _EMPTY, dtype=torch.int32, device=self.ids.device)
        self._insert(0)

    def _insert(self, start: int) -> None:
        """Put the rows from `start` on into free slots. Which of two rows gets a slot does not matter."""
        rows = torch.arange(start, self._count, dtype=torch.int32, device=self.ids.device)
        slots = mixed(self.ids[start : self._count]).bitwise_and_(len(self._slots) - 1)
        while len(rows):
            is_free = self._slots.index_select(0, slots) == _EMPTY
            self._slots[slots[is_free]] = rows[is_free]
            is_open = self._slots.index_select(0, slots) != rows
            rows, slots = rows[is_open], (slots[is_open] + 1).bitwise_and_(len(self._slots) - 1)
