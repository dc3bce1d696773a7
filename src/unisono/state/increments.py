"""Increments: of large tensors, a checkpoint stores the rows that differ from those of an earlier file, its base.

An increment has the base in its own folder, as a hard link, so it is complete for itself: the space is used once, and
stays in use until the last checkpoint with it is deleted. Rows are compared with the bytes of the base on the disk. So
nobody has to note what was written, and whatever trains the tensors, an increment is exact. Start reading at
`find_increment` and `apply_increment`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.errors import CheckpointError
from unisono.machine import read_ahead
from unisono.shm.unnamed_file import reserve, unnamed_file
from unisono.state.codec import Json
from unisono.state.durable_files import nbytes_of
from unisono.state.regions import FileEntry
from unisono.state.safetensors_format import memory_for, tied_names
from unisono.state.tensor_file import TensorFile, TensorRange

__all__ = [
    "LEAST_NBYTES",
    "BaseFile",
    "Increment",
    "apply_increment",
    "base_name",
    "changed_rows",
    "comparable",
    "differs_mostly",
    "find_increment",
    "is_sound",
    "name_of_rows",
    "sampled_rows",
]


LEAST_NBYTES = 1 << 20
"""Smaller tensors are stored whole."""
_READ_NBYTES = 8 << 20
_MOST_NBYTES = 64 << 20
_SAMPLE = 16
"""The number of rows that are compared first."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class BaseFile:
    """A file of a group with all of its tensors, against which rows are compared."""

    path: Path
    """Where it is, in the newest checkpoint that has it."""
    entry: FileEntry
    described: dict[str, Json]
    """The description of its tensors in the manifest."""
    spent: int = 0
    """Bytes of the increments since it was written."""
    mark: str = ""
    """The name of the folder in which ranks wrote their parts of it; "" if one process wrote it."""

    def open(self) -> TensorFile:
        """Return the file, of which nothing is compared with hashes.

        Raises:
            CheckpointError: It cannot be read.
        """
        return TensorFile(self.path, described=self.described)

    def is_worth(self, nbytes: int) -> bool:
        """Return True if an increment of so many bytes is to be stored, and not the whole group as a new base."""
        return nbytes <= self.entry.nbytes // 2 and self.spent + nbytes <= self.entry.nbytes


class Increment(NamedTuple):
    """The changes of a group that are stored beside its base."""

    tensors: dict[str, Tensor]
    """Whole tensors and changed rows by name, and the numbers of these rows."""
    notes: dict[str, Json]
    """The facts that `apply_increment` needs, for the manifest."""


def base_name(group: str) -> str:
    """Return the name of a group's base, without its suffix."""
    return f"{group}-base"


def name_of_rows(name: str) -> str:
    """Return the name under which the numbers of a tensor's changed rows are stored."""
    return f"{name}~rows"


def find_increment(tensors: Mapping[str, Tensor], base: BaseFile, folder: Path) -> Increment | None:
    """Return what has changed since a base; None if the whole group is to be stored, as a new base.

    That is so if the rows that have changed are half of it, if the increments since the base take more space than it,
    or if the base cannot be read. So over time, increments at most double what a run writes for its bases. Memory: the
    numbers of changed rows, 8 bytes each, and up to 64 MiB of these rows; more of them are in a file without a name,
    where the file system has such files.

    Args:
        tensors: The tensors of the group by name.
        base: Its base.
        folder: Where that file is made.
    """
    tied = tied_names(tensors)
    stored: dict[str, Tensor] = {}
    rows: dict[str, Json] = {}
    aliases: dict[str, Json] = {}
    nbytes = 0
    try:
        file = base.open()
        compared = comparable(tensors, file)
        for name, tensor in tensors.items():
            if tied.get(name) in rows:
                aliases[name] = tied[name]
                continue
            changed = None
            if name in compared and not differs_mostly(file, name, tensor):
                changed = changed_rows(file, name, tensor, range(len(tensor)))
            if changed is None:
                stored[name] = tensor
            else:
                stored[name], stored[name_of_rows(name)] = _rows_of(tensor, changed, folder), changed
                rows[name] = len(tensor)
                nbytes += stored[name_of_rows(name)].nbytes
            nbytes += nbytes_of([(name, stored[name])]) if name not in tied else 0
            if not base.is_worth(nbytes):
                return None
    except CheckpointError:  # it was deleted or cut off
        return None
    if not rows:
        return None
    return Increment(stored, {"described": base.described, "names": [*tensors], "rows": rows, "aliases": aliases})


def apply_increment(
    stored: Mapping[str, Tensor],
    notes: Mapping[str, Any],
    base: TensorFile,
    *,
    into: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return the tensors of a group from its increment and its base.

    Args:
        stored: The tensors of the increment.
        notes: Those of the manifest.
        base: The base; what is read of it is compared with its hashes.
        into: Memory for some of them by name; see `read_tensors`.

    Raises:
        CorruptCheckpointError: The base is damaged.
        KeyError, TypeError, ValueError, RuntimeError or IndexError: The notes are not those of `find_increment`.
    """
    found: dict[str, Tensor] = {}
    for name in notes["names"]:
        if name in notes["aliases"]:
            found[name] = found[notes["aliases"][name]]
            continue
        if name not in notes["rows"]:
            found[name] = stored[name]
            continue
        values, form = stored[name], base.forms[name]
        whole = memory_for(name, (notes["rows"][name], *form.shape[1:]), form.dtype, into)
        base.read([TensorRange(name, 0, whole[: len(form)])])
        whole[stored[name_of_rows(name)]] = values
        found[name] = whole
    return found


def is_sound(notes: Any) -> bool:
    """Return True if notes have the form that `find_increment` gives them."""
    return (
        isinstance(notes["names"], list)
        and isinstance(notes["rows"], dict)
        and isinstance(notes["aliases"], dict)
        and all(type(length) is int and length > 0 for length in notes["rows"].values())
        and all(isinstance(notes["described"][key], kind) for key, kind in (("names", list), ("dtypes", dict)))
    )


def _is_comparable(tensor: Tensor, form: Tensor | None) -> bool:
    """Return True if a tensor is large, plain, and has the rows of one in a base, or more."""
    return (
        form is not None
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and tensor.nbytes >= LEAST_NBYTES
        and tensor.is_contiguous()
        and not tensor.is_complex()
        and tensor.dtype == form.dtype
        and tensor.dim() == form.dim() > 0
        and tensor.shape[1:] == form.shape[1:]
        and len(tensor) >= len(form) > 0
    )


def comparable(tensors: Mapping[str, Tensor], file: TensorFile) -> list[str]:
    """Return the names of the tensors of a group of which changed rows may be stored.

    Args:
        tensors: The tensors by name.
        file: The base.
    """
    tied = tied_names(tensors)
    return [
        name
        for name, tensor in tensors.items()
        if name not in tied and name_of_rows(name) not in tensors and _is_comparable(tensor, file.forms.get(name))
    ]


def sampled_rows(count: int) -> range:
    """Return the rows of a table in a base that are compared first.

    If most of them have changed, so has most of the table: it is stored whole.
    """
    return range(0, count, -(-count // _SAMPLE))


def differs_mostly(file: TensorFile, name: str, tensor: Tensor) -> bool:
    """Return True if most of a sample of the rows of a tensor differ from those of a base."""
    places, row = sampled_rows(len(file.forms[name])), tensor[0].numel()
    sample = torch.empty((len(places), *tensor.shape[1:]), dtype=tensor.dtype)
    file.read([TensorRange(name, place * row, sample[i]) for i, place in enumerate(places)])
    return 2 * len(_differing(sample, tensor[list(places)])) > len(places)


def changed_rows(file: TensorFile, name: str, tensor: Tensor, span: range) -> Tensor:
    """Return the numbers of the rows in a span that differ from those of a base, or are not in it, ascending."""
    row = tensor[:1].numel()
    count = min(max(len(file.forms[name]), span.start), span.stop)
    together = max(1, _READ_NBYTES // (row * tensor.element_size()))
    part = torch.empty((min(together, count - span.start), *tensor.shape[1:]), dtype=tensor.dtype)
    found = []
    for start in range(span.start, count, together):
        before = part[: min(together, count - start)]
        ahead = tensor[start : min(start + 2 * together, count)]
        read_ahead(ahead.data_ptr(), ahead.nbytes)
        file.read([TensorRange(name, start * row, before)])
        found.append(_differing(before, tensor[start : start + len(before)]) + start)
    return torch.cat([*found, torch.arange(count, span.stop)])


def _rows_of(tensor: Tensor, which: Tensor, folder: Path) -> Tensor:
    """Return some rows of a tensor: if they are many, in a mapped file, so that they need not fit into memory."""
    shape, nbytes = (len(which), *tensor.shape[1:]), len(which) * tensor[:1].nbytes
    if nbytes <= _MOST_NBYTES:
        return tensor[which]
    try:
        segment = unnamed_file(folder, nbytes)
    except OSError:  # a file system that has none
        return tensor[which]
    try:
        reserve(segment)
    except OSError:
        return tensor[which]
    finally:
        segment.close_descriptor()
    return torch.index_select(tensor.detach(), 0, which, out=segment.tensor(0, shape, tensor.dtype))


def _differing(first: Tensor, second: Tensor) -> Tensor:
    """Return the numbers of the rows whose bytes differ: a NaN is equal to itself, and -0.0 is not 0.0."""
    rows = [each.detach().reshape(len(each), -1) for each in (first, second)]
    nbytes = rows[0].shape[1] * first.element_size()
    wide = nbytes % 8 == 0 and all(each.data_ptr() % 8 == 0 for each in rows)
    ones, others = (each.view(torch.int64 if wide else _WORDS[first.element_size()]) for each in rows)
    return (ones != others).any(1).nonzero().flatten()
