"""Which ids of a dynamic table get a row, and which rows it gives up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from unisono.arguments import choice, whole

__all__ = ["RowPolicy"]

_CHECKS = 8
"""Rows that have expired are looked for so often in `evict_after` steps."""
_PART = 8
"""A full table gives up this part of its rows at once, since the index of ids is then made anew."""


@dataclass(frozen=True, kw_only=True)
class RowPolicy:
    """Settings of a dynamic table's rows. A step of a table is an update with a gradient for any of its ids.

    Raises:
        TypeError, ValueError: A setting is of the wrong type or out of its range.
    """

    admit_after: int = 1
    """An id gets a row in the step of this number that has a gradient for it."""
    waiting_capacity: int | None = None
    """The number of ids that can wait for a row, below 2**31; None: that of the rows at the start, or 65536."""
    evict_after: int | None = None
    """A row is given up after so many steps without a gradient for its id; None: it is kept."""
    when_full: Literal["raise", "grow", "evict_oldest", "evict_rarest"] = "raise"
    """The behaviour if there are no rows for new ids."""

    def __post_init__(self) -> None:
        """Check the settings."""
        whole("admit_after", self.admit_after, least=1)
        if self.waiting_capacity is not None and whole("waiting_capacity", self.waiting_capacity, least=1) >= 2**31:
            raise ValueError(f"waiting_capacity={self.waiting_capacity}: at most {2**31 - 1} ids can wait")
        if self.evict_after is not None:
            whole("evict_after", self.evict_after, least=1)
        choice("when_full", self.when_full, ("raise", "grow", "evict_oldest", "evict_rarest"))

    @property
    def evicts(self) -> bool:
        """True if rows may be given up."""
        return self.evict_after is not None or self.replaces

    @property
    def replaces(self) -> bool:
        """True if a full table gives up rows."""
        return self.when_full.startswith("evict")

    def is_due(self, step: int) -> bool:
        """Return True if rows that have expired are looked for in a step."""
        return self.evict_after is not None and step % max(self.evict_after // _CHECKS, 1) == 0

    def evicted(self, seen: Tensor, sightings: Tensor | None, *, step: int, wanted: int) -> Tensor:
        """Return the rows to give up in a step, ascending.

        Args:
            seen: For each row, the last step with a gradient for its id; 0 for free ones. Those of this step are kept.
            sightings: For each row, the number of steps with a gradient for its id; None: unknown.
            step: The number of this step.
            wanted: The number of rows that new ids need, beyond those that are free.

        >>> seen = torch.tensor([1, 9, 5, 0])
        >>> RowPolicy(evict_after=4).evicted(seen, None, step=9, wanted=0).tolist()
        [0, 2]
        >>> RowPolicy(when_full="evict_oldest").evicted(seen, None, step=9, wanted=1).tolist()
        [0]
        """
        is_taken = seen > 0
        if self.evict_after is not None:
            expired = (is_taken & (seen <= step - self.evict_after)).nonzero().view(-1)
            if len(expired) >= wanted:
                return expired
        if not self.replaces or wanted <= 0:
            return seen.new_zeros(0, dtype=torch.int64)
        idle = (is_taken & (seen < step)).nonzero().view(-1)
        order = seen.index_select(0, idle).long()
        if self.when_full == "evict_rarest":
            assert sightings is not None
            order += sightings.index_select(0, idle).long() << 32
        first = torch.sort(order, stable=True).indices[: max(wanted, len(seen) // _PART)]
        return idle.index_select(0, first).sort().values
