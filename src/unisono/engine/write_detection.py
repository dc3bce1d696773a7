"""Detects writes to parameters in the forward pass.

Each virtual rank has its own forward pass, so a write to a parameter there happens once for each virtual rank that a
rank computes: the number of ranks would decide how often. Writes are found by the version that torch counts for each
tensor, by the address of its memory and by two of its values, since torch does not count writes to `p.data`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from torch import Tensor

__all__ = ["WriteDetector"]

_version_of = attrgetter("_version")
_WORD_NBYTES = 4


class WriteDetector:
    """The state of parameters at the beginning of a step. A check takes 0.25 µs for each parameter.

    Args:
        parameters: The parameters to check, on any device; values are compared on the CPU only.
        move: True if their memory comes and goes, so that only versions can be compared.
        unread: Those whose values are not compared, by `id`, as other processes write them at any time.
    """

    def __init__(self, parameters: Sequence[Tensor], *, move: bool = False, unread: Collection[int] = ()) -> None:
        self._parameters, self._move = parameters, move
        self._read_ones = [p for p in parameters if id(p) not in unread]
        self._addresses: list[int] = []
        self._versions: list[int] = []
        self._read: Callable[[], Any] = tuple
        """Reads the values, all by one call."""
        self._values: Any = ()

    def remember(self) -> None:
        """Record the present state as the one at the beginning of a step."""
        if self._move:
            self._versions = list(map(_version_of, self._parameters))
            return
        addresses = list(map(Tensor.data_ptr, self._parameters))
        if addresses != self._addresses:
            self._addresses = addresses
            self._read = _reader([word for p in self._read_ones for word in _words(p)])
        self._versions = list(map(_version_of, self._parameters))
        self._values = self._read()

    def written(self) -> Tensor | None:
        """Return a parameter that was written to since `remember`, or None."""
        return next(iter(self.all_written()), None)

    def all_written(self) -> list[Tensor]:
        """Return the parameters that were written to since `remember`."""
        if self._move:
            pairs = zip(self._parameters, self._versions, strict=True)
            return [p for p, version in pairs if p._version != version]
        versions, addresses = list(map(_version_of, self._parameters)), list(map(Tensor.data_ptr, self._parameters))
        found: set[int] = set()
        if versions != self._versions or addresses != self._addresses:
            before = zip(versions, self._versions, addresses, self._addresses, strict=True)
            changed = [version != known or address != at for version, known, address, at in before]
            found = {id(p) for p, is_changed in zip(self._parameters, changed, strict=True) if is_changed}
        # Where an address has changed, the memory at the old one may be gone.
        if addresses == self._addresses and (values := self._read()) != self._values:
            owners = [p for p in self._read_ones for _ in _words(p)]
            found |= {id(p) for p, now, then in zip(owners, values, self._values, strict=False) if now != then}
        return [p for p in self._parameters if id(p) in found] if found else []


def _words(parameter: Tensor) -> Sequence[int]:
    """Return the addresses of the words with two elements of a parameter: the first one and one in the middle."""
    if parameter.device.type != "cpu" or not parameter.numel():
        return ()
    flat = parameter.detach()
    middle = flat[tuple(size // 2 for size in flat.shape)]
    last = parameter.element_size() - 1
    words = {
        place // _WORD_NBYTES * _WORD_NBYTES
        for address in (flat.data_ptr(), middle.data_ptr())
        for place in (address, address + last)  # of a large element, the first and the last word
    }
    return sorted(words)


def _reader(addresses: Sequence[int]) -> Callable[[], Any]:
    """Return a function that reads the words at some addresses."""
    if not addresses:
        return tuple
    # A view from the first word to the last, of whose memory only the words are read. In this way one call reads all.
    first = min(addresses)
    count = (max(addresses) - first) // _WORD_NBYTES + 1
    memory = memoryview((ctypes.c_uint32 * count).from_address(first)).cast("B").cast("I")
    places = [(address - first) // _WORD_NBYTES for address in addresses]
    return partial(itemgetter(*places, places[-1]), memory)  # at least two, since itemgetter returns a single one bare
