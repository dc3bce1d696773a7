"""An index from ids to their places in a list: a hash table, searched by a compiled function or by operations of torch.

It has open addressing, linear probing and no deletions, and its slots hold places. At most a quarter of the slots is
taken, so few ids need a second look. The compiled function asks for the slots and the ids of the list before it needs
them: it finds 40 960 ids of a million in 0.7 ms, and torch's operations in 1.3 to 2. Those search all ids at once: each
round looks at one slot of each id that is not settled, or at several slots of the last ones, since a round of few ids
costs calls only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.embedding.compiled_ids import find_by_compiled, insert_by_compiled, is_searchable
from unisono.embedding.huge_pages import advise_huge_pages
from unisono.embedding.initial_rows import mixed

__all__ = ["NBYTES_PER_ID", "IdIndex"]

NBYTES_PER_ID = 32
"""The most memory that the index of a list takes for each id that the list has room for."""
_SLOTS_PER_ID = 4
_LEAST_SLOTS = 1024
_EMPTY = -1
_FEW, _WIDTH = 512, 8
"""Of fewer ids, several slots are looked at together."""


class IdIndex:
    """The places of ids in a list of different ids, below 2**31.

    Args:
        listed: The list, [capacity], int64, of which the index keeps no copy.
        places: The places that are in use, [n].
    """

    def __init__(self, listed: Tensor, places: Tensor) -> None:
        self._listed, self._count = listed.detach(), len(places)
        size = 1 << max(self._count * _SLOTS_PER_ID * 2 - 1, _LEAST_SLOTS - 1).bit_length()
        size = min(size, 1 << max(len(listed) * _SLOTS_PER_ID - 1, _LEAST_SLOTS - 1).bit_length())
        self._slots = torch.empty(size, dtype=torch.int32, device=listed.device)
        advise_huge_pages(self._slots)
        self._slots.fill_(_EMPTY)
        self._insert(places)

    def find(self, ids: Tensor) -> Tensor:
        """Return the place of each id, [n], int64; -1 for those that are not in the list.

        >>> IdIndex(torch.tensor([7, -2, 0]), torch.tensor([0, 1])).find(torch.tensor([-2, 0, 7])).tolist()
        [1, -1, 0]
        """
        ids = ids.long()  # the hash of an integer depends on its bits
        if is_searchable(ids) and is_searchable(self._listed):
            return find_by_compiled(ids, self._slots, self._listed)
        mask = len(self._slots) - 1
        slots = mixed(ids).bitwise_and_(mask)
        found = self._slots.index_select(0, slots)
        # An empty slot is compared with some id, which does not matter.
        is_open = (self._listed.index_select(0, found.clamp_min(0)) != ids).logical_and_(found != _EMPTY)
        which = is_open.nonzero().view(-1)
        if len(which):
            ids, slots = ids.index_select(0, which), slots.index_select(0, which)
        while len(which):
            if len(which) < _FEW:
                found[which] = self._search(ids, slots)
                break
            slots = (slots + 1).bitwise_and_(mask)
            place = self._slots.index_select(0, slots)
            is_open = (self._listed.index_select(0, place.clamp_min(0)) != ids).logical_and_(place != _EMPTY)
            found[which] = place  # those that are still open are written again
            ids, slots, which = ids[is_open], slots[is_open], which[is_open]
        return found.long()

    def _search(self, ids: Tensor, slots: Tensor) -> Tensor:
        """Return the places of ids that are behind these slots."""
        steps = torch.arange(1, _WIDTH + 1, device=ids.device)
        found = torch.full_like(slots, _EMPTY, dtype=torch.int32)
        which, ids = torch.arange(len(ids), device=ids.device), ids.unsqueeze(1)
        while len(which):
            near = (slots.unsqueeze(1) + steps).bitwise_and_(len(self._slots) - 1)
            places = self._slots[near]
            # An id that is in the list has no empty slot before its own.
            is_equal = (self._listed[places.clamp_min(0)] == ids).logical_and_(places != _EMPTY)
            found[which] = torch.where(is_equal, places, _EMPTY).amax(1)
            is_open = ((places != _EMPTY) & ~is_equal).all(1)
            which, ids, slots = which[is_open], ids[is_open], near[is_open, -1]
        return found

    def added(self, places: Tensor) -> IdIndex:
        """Return an index that has these places as well: this one, or a larger one."""
        if (self._count + len(places)) * _SLOTS_PER_ID > len(self._slots):
            taken = self._slots[self._slots != _EMPTY]
            return IdIndex(self._listed, torch.cat([taken.to(places.dtype), places]))
        self._count += len(places)
        self._insert(places)
        return self

    def _insert(self, places: Tensor) -> None:
        """Put places into free slots. Which of two gets a slot does not matter."""
        if is_searchable(places) and is_searchable(self._listed):
            insert_by_compiled(places, self._slots, self._listed)
            return
        slots = mixed(self._listed.index_select(0, places)).bitwise_and_(len(self._slots) - 1)
        places = places.int()
        while len(places):
            is_free = self._slots.index_select(0, slots) == _EMPTY
            self._slots[slots[is_free]] = places[is_free]
            is_open = self._slots.index_select(0, slots) != places
            places, slots = places[is_open], (slots[is_open] + 1).bitwise_and_(len(self._slots) - 1)
