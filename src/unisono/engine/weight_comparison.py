"""Finds the weights that a loop has written between two steps, where each rank has a copy of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from unisono.engine.base import Trained
from unisono.engine.write_detection import WriteDetector

__all__ = ["WeightComparison"]

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightComparison:
    """Knows the weights as the last step has left them: equal on all ranks.

    Args:
        trained: The parameters that the step trains.
        without: Those among them that are not compared.
    """

    def __init__(self, trained: Trained, *, without: Collection[Tensor] = ()) -> None:
        left_out = set(map(id, without))
        self._names = {id(p): name for name, p in zip(*trained, strict=True) if id(p) not in left_out}
        self._parameters = [p for p in trained.parameters if id(p) in self._names]
        self._detector = WriteDetector(self._parameters)
        self._is_known = False

    def remember(self) -> None:
        """Take the present weights as those that all ranks have. Takes 0.25 µs for each parameter."""
        self._detector.remember()
        self._is_known = True

    def find(self) -> Mapping[str, int]:
        """Return the checksums of the weights that were written since `remember`, by name; at first, of all.

        Takes 0.25 µs for each parameter, and reads those that were written.
        """
        return self._checksums(self._detector.all_written() if self._is_known else self._parameters)

    def describe(self) -> list[str]:
        """Return the names and checksums of all weights."""
        return [f"{name} = {found % 2**32:08x}" for name, found in self._checksums(self._parameters).items()]

    def _checksums(self, parameters: Sequence[Tensor]) -> dict[str, int]:
        """Return the checksums of parameters by name. The host waits once for each device."""
        of_device: dict[torch.device, list[Tensor]] = defaultdict(list)
        for p in parameters:
            of_device[p.device].append(p)
        found = {
            id(p): number
            for those in of_device.values()
            for p, number in zip(those, torch.stack([_sum_of_bits(p) for p in those]).tolist(), strict=True)
        }
        return {self._names[id(p)]: found[id(p)] for p in parameters}


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of the bits of all elements, as numbers: another one, nearly always, if an element is another.

    >>> [_sum_of_bits(torch.tensor(values)).item() for values in ([0.0], [-0.0], [1.0, 1.0])]
    [0, -2147483648, 2130706432]
    """
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    return values.view(_WORDS[values.element_size()]).sum(dtype=torch.int64)
