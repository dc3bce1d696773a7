"""Ids of a dynamic table that have been seen too rarely for a row."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from unisono.embedding.id_index import NBYTES_PER_ID, IdIndex
from unisono.embedding.undo_log import UndoLog

__all__ = ["WaitingIds"]


class WaitingIds(nn.Module):
    """The ids that wait for a row, in the order in which they were first seen, and how often each was.

    If there are more than `capacity`, those that came first are forgotten, but for the newest half of them.

    Args:
        capacity: The number of ids that there is memory for, below 2**31.
    """

    NBYTES_PER_ID: ClassVar[int] = 8 + 4 + NBYTES_PER_ID
    LEAST_CAPACITY: ClassVar[int] = 65_536
    """How many ids can wait for a small table, if nothing else is said."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.ids = nn.Parameter(torch.zeros(capacity, dtype=torch.int64), requires_grad=False)
        self.counts = nn.Parameter(torch.zeros(capacity, dtype=torch.int32), requires_grad=False)
        """The number of steps with a gradient for each id; 0 for one that has got a row."""
        self.length = nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False)
        """The number of ids."""
        self._index: IdIndex | None = None
        self._indexed: tuple[Any, ...] = ()

    def extra_repr(self) -> str:
        """Return what print shows of it."""
        return f"{int(self.length)} ids"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and copies, without what can be made anew."""
        return {**self.__dict__, "_index": None, "_indexed": ()}

    def counts_of(self, ids: Tensor) -> Tensor:
        """Return the number of steps that have had a gradient for each id, [n]; 0 for those that do not wait."""
        places = self._refresh().find(ids)
        return self.counts.index_select(0, places.clamp_min(0)).masked_fill_(places < 0, 0)

    def count(self, ids: Tensor, is_admitted: Tensor, log: UndoLog) -> None:
        """Count a step for ids that have no row.

        Args:
            ids: [n], all different.
            is_admitted: [n], True for those that get a row now, which do not wait any longer.
            log: Gets the writes.
        """
        index = self._refresh()
        places = index.find(ids)
        is_known = places >= 0
        known = places[is_known]
        counts = (self.counts.index_select(0, known) + 1).masked_fill_(is_admitted[is_known], 0)
        log.write(self.counts, known, counts)
        new = ids[~is_known & ~is_admitted]
        start, capacity = int(self.length), len(self.ids)
        if start + len(new) > capacity:
            start = self._forget(start, log)
            index, new = self._rebuilt(start), new[: capacity - start]
        if len(new):
            added = torch.arange(start, start + len(new), device=ids.device)
            log.write(self.ids, added, new)
            log.write(self.counts, added, added.new_ones(1))
            log.write(self.length, added.new_zeros(1), added.new_tensor([start + len(new)]))
            index = index.added(added)
        self._index, self._indexed = index, self._source()

    def _forget(self, length: int, log: UndoLog) -> int:
        """Keep the newest half of the ids that wait. Return their number."""
        kept = self.counts[:length].nonzero().view(-1)
        kept = kept[max(len(kept) - len(self.ids) // 2, 0) :]
        places = torch.arange(length, device=kept.device)
        for tensor in (self.ids, self.counts):
            values = torch.zeros_like(tensor[:length])
            values[: len(kept)] = tensor.index_select(0, kept)
            log.write(tensor, places, values)
        log.write(self.length, kept.new_zeros(1), kept.new_tensor([len(kept)]))
        return len(kept)

    def _rebuilt(self, length: int) -> IdIndex:
        return IdIndex(self.ids, torch.arange(length, device=self.ids.device))

    def _source(self) -> tuple[Any, ...]:
        return tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in (self.ids, self.length))

    def _refresh(self) -> IdIndex:
        if self._index is None or self._source() != self._indexed:
            self._index, self._indexed = self._rebuilt(int(self.length)), self._source()
        return self._index
