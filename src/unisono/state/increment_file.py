"""A group of which a checkpoint has changed rows and a base: parts of its tensors are read as from a single file.

Start reading at `IncrementFile.read`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from unisono.errors import CorruptCheckpointError
from unisono.state.increments import name_of_rows
from unisono.state.tensor_file import TensorFile, TensorRange, TensorSource

__all__ = ["IncrementFile"]

_PIECE_NBYTES = 8 << 20
"""Of a tensor with changed rows, so many bytes are read at once."""


class IncrementFile(TensorSource):
    """The tensors of a group. Memory: the numbers of the changed rows, 8 bytes each.

    Args:
        stored: The file with what has changed.
        base: The file with all tensors as they were before.
        notes: Those of `increments.find_increment`.

    Raises:
        CorruptCheckpointError: The files do not fit together, or are damaged.
    """

    def __init__(self, stored: TensorFile, base: TensorFile, notes: Mapping[str, Any]) -> None:
        self._file, self._base = stored, base
        self._changed: dict[str, Tensor] = {}
        """By name, the numbers of the rows that have changed, ascending."""
        self._lengths: dict[str, int] = notes["rows"]
        try:
            self.forms = {}
            for name in notes["names"]:
                owner = notes["aliases"].get(name)
                self.forms[name] = self.forms[owner] if owner is not None else self._form(name)
            self._owners = {name: notes["aliases"].get(name, name) for name in notes["names"]}
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
            raise self._not_fitting(f"{type(error).__name__}: {error}") from error
        own = {*stored.stored, *self._changed}
        self.stored = [name for name in notes["names"] if name in own]

    def read(self, ranges: Iterable[TensorRange]) -> None:
        """Read ranges of tensors; see `TensorSource`. Memory: up to 8 MiB of changed rows."""
        plain: list[TensorRange] = []
        for name, start, into in ranges:
            owner, form = self._owners[name], self.forms[name]
            if owner not in self._changed:
                plain.append(TensorRange(owner, start, into))
                continue
            if into.dtype != form.dtype or not 0 <= start <= start + into.numel() <= form.numel():
                raise ValueError(
                    f"{into.numel()} elements of {into.dtype} from {start} on are not in {name}, which has "
                    f"{form.numel()} of {form.dtype}"
                )
            self._read_rows(owner, start, into.view(-1))
        self._file.read(plain)

    def _form(self, name: str) -> Tensor:
        if name not in self._lengths:
            return self._file.forms[name]
        values, form = self._file.forms[name], self._base.forms[name]
        changed = self._file.read_tensor(name_of_rows(name))
        length = self._lengths[name]
        if changed.dtype != torch.int64 or changed.dim() != 1 or len(changed) != len(values):
            raise ValueError(f"{len(values)} rows of {name} have changed, and their numbers are {changed.shape}")
        if values.shape[1:] != form.shape[1:] or values.dtype != form.dtype or len(form) > length:
            raise ValueError(f"{name} has other rows than in the base")
        new = torch.arange(len(form), length)
        is_ascending = bool((changed[1:] > changed[:-1]).all())
        if len(changed) and not (is_ascending and int(changed[0]) >= 0 and int(changed[-1]) < length):
            raise IndexError(f"the numbers of changed rows of {name} are not ascending, or not below {length}")
        if not torch.equal(changed[len(changed) - len(new) :], new):
            raise IndexError(f"rows of {name} are neither in the base nor among those that have changed")
        self._changed[name] = changed
        return torch.empty((length, *form.shape[1:]), dtype=form.dtype, device="meta")

    def _read_rows(self, name: str, start: int, into: Tensor) -> None:
        """Read some elements of a tensor with changed rows."""
        width, of_base = self.forms[name][:1].numel(), self._base.forms[name].numel()
        step = max(1, _PIECE_NBYTES // (width * into.element_size())) * width
        while into.numel():
            count = min(into.numel(), step - start % step)
            own, into = into[:count], into[count:]
            stop = start + count
            if start < of_base:
                self._base.read([TensorRange(name, start, own[: min(stop, of_base) - start])])
            changed = self._changed[name]
            bounds = torch.tensor([start // width, -(-stop // width)])
            low, high = torch.searchsorted(changed, bounds).tolist()
            if high > low:
                values = torch.empty((high - low) * width, dtype=own.dtype)
                self._file.read([TensorRange(name, low * width, values)])
                _put(own, start, changed[low:high], values.view(-1, width))
            start = stop

    def _not_fitting(self, told: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._base.path} does not hold the rows that its manifest describes: {told}. Take an older checkpoint."
        )


def _put(into: Tensor, start: int, rows: Tensor, values: Tensor) -> None:
    """Write rows over elements of a tensor that begin with element `start`, where both have the same.

    Args:
        into: The elements.
        start: The first one.
        rows: Numbers of rows, ascending, of which at most the first and the last are not as a whole in `into`.
        values: [rows, width].
    """
    width = values.shape[1]
    firsts = rows * width - start
    is_inside = (firsts >= 0) & (firsts + width <= into.numel())
    inside = firsts[is_inside]
    if len(inside):
        into.index_put_(((inside[:, None] + torch.arange(width)),), values[is_inside])
    for place in (~is_inside).nonzero().view(-1).tolist():
        first = int(firsts[place])
        low, high = max(first, 0), min(first + width, into.numel())
        into[low:high] = values[place, low - first : high - first]
