"""Sums of named values over virtual ranks: the values of an evaluation, and the further values of a loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unisono.collectives.world import World
from unisono.errors import LossError
from unisono.metrics.average import Average
from unisono.parallel.losses import read_loss
from unisono.plan import Node, fold

__all__ = ["ValueSums"]

_Sums = dict[str, tuple[float, float]]


class ValueSums:
    """The sums of this rank's virtual ranks.

    Sums are float64, per virtual rank and then in tree order, so the result is the same on any number of ranks.

    Args:
        what: The function that returns the values, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._sums: dict[int, dict[str, tuple[Tensor, float]]] = {}
        self._forms: set[str] = set()
        """The forms of the values so far."""
        self.is_empty = True

    def clear(self) -> None:
        """Discard all sums."""
        self._sums, self._forms, self.is_empty = {}, set(), True

    def add(self, virtual_rank: int, values: Any, *, samples: int) -> None:
        """Add what the function returned for some samples of a virtual rank: a dict of values, or one value named "".

        Raises:
            LossError: A value is of no form that `read_loss` knows.
        """
        sums, self.is_empty = self._sums.setdefault(virtual_rank, {}), False
        self._forms.add("a dict" if isinstance(values, Mapping) else "a single value")
        if not isinstance(values, Mapping):
            values = {"": values}
        for name, value in values.items():
            what = self._what + (f" (entry {name!r})" if name else "")
            found = read_loss(_as_number(value), samples=samples, what=what)
            total, weight = found.total.detach().double(), found.weight_number(what)
            if name in sums:
                total, weight = sums[name][0] + total, sums[name][1] + weight
            sums[name] = total, weight

    def means(self, world: World, call: str) -> dict[str, Average]:
        """Return the mean of each name over all ranks. One small exchange; every rank must call it.

        Args:
            world: The ranks.
            call: The call that needs them, for messages.

        Raises:
            LossError: On all ranks, if the values have different forms.
        """
        own: dict[int, _Sums] = {
            virtual_rank: {name: (total.item(), weight) for name, (total, weight) in sums.items()}
            for virtual_rank, sums in self._sums.items()
        }
        everyone: dict[int, _Sums] = {}
        forms = set()
        for part, of_rank in world.gather((own, self._forms), call):
            everyone |= part
            forms |= of_rank
        if len(forms) > 1:
            raise LossError(
                f"the {self._what} returned {' and '.join(sorted(forms))} for different micro-batches, whose mean "
                "would be that of some samples only: return the same form for all."
            )
        names = list(dict.fromkeys(name for _, sums in sorted(everyone.items()) for name in sums))
        return {name: Average(*_total(everyone, name)) for name in names}


def _total(everyone: Mapping[int, _Sums], name: str) -> tuple[float, float]:
    leaves = 1 + max(everyone)  # a virtual rank without samples has no values
    values = {Node(v, v + 1): everyone.get(v, {}).get(name, (0.0, 0.0)) for v in range(leaves)}
    return fold(values, leaves=leaves, add=lambda a, b: (a[0] + b[0], a[1] + b[1]))


def _as_number(value: Any) -> Any:
    """Return truth values as 0 and 1, and anything else unchanged, to be read like a loss."""
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bool else value
