"""Alignment of data in buffers and messages."""

from __future__ import annotations

__all__ = ["BUFFER_NUMEL", "WIRE_NBYTES", "align_up"]

BUFFER_NUMEL = 64
"""Parameters and the shares of ranks begin at multiples of this number of elements in a buffer, which is 64 bytes or
more in every dtype. Bits depend on it: SIMD bodies see the same elements on any number of ranks."""

WIRE_NBYTES = 16
"""Parts of a message begin at multiples of this number of bytes, the size of the largest element, a complex128."""


def align_up(count: int, unit: int) -> int:
    """Round a count up to a multiple of a unit.

    >>> align_up(0, 16), align_up(1, 16), align_up(16, 16)
    (0, 16, 16)
    """
    return -(-count // unit) * unit
