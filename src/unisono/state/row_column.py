"""A tensor that is made while it is read, in chunks of rows, for what is too large to be in memory as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

__all__ = ["RowColumn"]


class RowColumn(NamedTuple):
    """A tensor that is made while it is written, in chunks of rows."""

    form: Tensor
    """Of its type and shape. It needs no values."""
    chunks: Callable[[], Iterator[Tensor]]
    """Returns the rows, in order, as contiguous tensors on the CPU."""
