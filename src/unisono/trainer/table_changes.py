"""The rows of a group of a checkpoint that have changed since its base, where tables are divided over ranks.

Owners know by hashes which of their rows have changed (`engine.row_changes`). Of other large tensors, each rank that
writes compares a span with the base on the disk. All ranks learn how many rows there are in each span, and so come to
the same decision as `state.increments.find_increment`. Start reading at `TableChanges`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.collectives.world import World
from unisono.engine.row_changes import RowChanges
from unisono.engine.row_requests import DividedTable
from unisono.engine.row_transfer import RowTransfer
from unisono.errors import CheckpointError
from unisono.state.codec import Json
from unisono.state.durable_files import nbytes_of
from unisono.state.increments import (
    LEAST_NBYTES,
    BaseFile,
    changed_rows,
    comparable,
    differs_mostly,
    name_of_rows,
    sampled_rows,
)
from unisono.state.regions import FileEntry
from unisono.state.safetensors_format import tied_names
from unisono.trainer.part_saving import PartPlace

__all__ = ["PlannedIncrement", "SavedRows", "TableChanges", "by_rank", "spans_of"]

_UNKNOWN = -1


class SavedRows(NamedTuple):
    """Tensors with a row for each row of one table, in one group of a checkpoint."""

    table: DividedTable
    group: str
    numbers: dict[str, int]
    """By name in the group, the numbers of the tensors that are there, for `RowTransfer`."""
    changes: RowChanges


class PlannedIncrement(NamedTuple):
    """What is stored of a group of which some rows have changed."""

    forms: dict[str, Tensor]
    """By name, without values."""
    counts: dict[str, list[int]]
    """By the name of a tensor of which changed rows are stored, how many are in the span of each rank."""
    notes: dict[str, Json]
    """See `increments.Increment`."""


class _KnownBase(NamedTuple):
    """A base as all ranks know it."""

    file: BaseFile
    compared: list[str]
    """The tensors that all ranks have, of which changed rows are looked for."""


def spans_of(rows: int, ranks: Sequence[int], size: int) -> list[range]:
    """Return the rows that each rank writes or reads.

    Args:
        rows: The number of rows.
        ranks: The ranks that do.
        size: The number of all ranks.

    >>> spans_of(5, [0, 2], 3)
    [range(0, 2), range(0, 0), range(2, 5)]
    """
    spans = [range(0)] * size
    for number, rank in enumerate(ranks):
        spans[rank] = range(rows * number // len(ranks), rows * (number + 1) // len(ranks))
    return spans


def by_rank(rows: Tensor, spans: Sequence[range]) -> list[Tensor]:
    """Return those of some rows, ascending, that are in the span of each rank."""
    bounds = torch.searchsorted(rows, torch.tensor([[span.start, span.stop] for span in spans]))
    return [rows[start:stop] for start, stop in bounds.tolist()]


class TableChanges:
    """What has changed of the groups of a checkpoint. Every rank must make it.

    Memory: the numbers of the rows of this rank that have changed, 8 bytes each.

    Args:
        world: The ranks.
        transfer: Has the tensors that are divided.
        saved: What is divided.
        place: The checkpoint.
        groups: The groups; of divided tensors, what this rank has.
    """

    def __init__(
        self,
        world: World,
        transfer: RowTransfer,
        saved: Sequence[SavedRows],
        place: PartPlace,
        groups: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
        self._world, self._transfer, self._saved, self._place, self._groups = world, transfer, saved, place, groups
        self.of_tables: dict[int, Tensor] = {}
        """By the place in `saved`, the rows of this rank that have changed."""
        self.of_common: dict[tuple[str, str], Tensor] = {}
        """By group and name of a tensor that all ranks have, the rows of this rank's span that have changed."""
        self.increments: dict[str, PlannedIncrement] = {}
        """By group, what is stored. Of groups that are not in it, all is stored."""
        if place.bases is not None:
            self._look()
            self.increments = self._find_increments()

    def keep(self) -> None:
        """Note that the groups of which all is stored are bases from now on."""
        for each in self._saved:
            if self._place.bases is not None and each.group not in self.increments:
                each.changes.keep(self._place.folder.name)
            each.changes.drop()

    def _spans(self, rows: int) -> list[range]:
        """Return the rows that each rank writes."""
        return spans_of(rows, self._place.ranks, self._world.size)

    def _look(self) -> None:
        """Hash the rows of this rank."""
        for each in self._saved:
            tensors = [self._transfer.tensors[number].tensor() for number in each.numbers.values()]
            each.changes.look(len(each.table.weight), partial(self._transfer.present, each.table), tensors)

    def _find_increments(self) -> dict[str, PlannedIncrement]:
        """Return the groups of which changed rows are stored."""
        bases = self._tell_bases()
        numbers: list[int] = []
        for group, base in bases.items():
            for place, each in enumerate(self._saved):
                if each.group == group:
                    numbers += self._count_changes(place, each, base.file)
            for name in base.compared:
                numbers.append(self._count_compared(group, name, base.file))
        told = self._world.gather_numbers(numbers) if numbers else []
        columns = iter([[int(number) for number in column] for column in zip(*told, strict=True)])
        found = {group: self._increment(group, base, columns) for group, base in bases.items()}
        return {group: increment for group, increment in found.items() if increment is not None}

    def _tell_bases(self) -> dict[str, _KnownBase]:
        """Let all ranks know the bases."""

        def describe() -> bytes:
            told: dict[str, Json] = {}
            for group, base in (self._place.bases or {}).items():
                divided = {name for each in self._saved if each.group == group for name in each.numbers}
                try:
                    file, own = base.open(), self._groups.get(group, {})
                    compared: list[Json] = [
                        name
                        for name in comparable(own, file)
                        if name not in divided and not differs_mostly(file, name, own[name])
                    ]
                except CheckpointError:  # it was deleted or cut off
                    continue
                head: list[Json] = [str(base.path.absolute()), base.entry.nbytes, base.spent, base.mark]
                told[group] = [*head, base.described, compared]
            return json.dumps(told).encode()

        found: dict[str, _KnownBase] = {}
        for group, (path, nbytes, spent, mark, described, compared) in json.loads(
            self._world.broadcast_bytes(describe)
        ).items():
            entry = FileEntry(name="", nbytes=nbytes, regions=())
            found[group] = _KnownBase(BaseFile(Path(path), entry, described, spent, mark), compared)
        return found

    def _count_changes(self, place: int, each: SavedRows, base: BaseFile) -> list[int]:
        """Return how many of this rank's rows of a table have changed: of the sample, and of the span of each rank.

        If it is not known, the first number is `_UNKNOWN`.
        """
        rows, changed = len(each.table.weight), each.changes.since(base.mark)
        if changed is None:
            return [_UNKNOWN] + [0] * self._world.size
        self.of_tables[place] = changed
        sampled = sampled_rows(rows)
        return [int((changed % sampled.step == 0).sum()), *map(len, by_rank(changed, self._spans(rows)))]

    def _count_compared(self, group: str, name: str, base: BaseFile) -> int:
        """Return how many rows of this rank's span of a tensor have changed; `_UNKNOWN` if the base cannot be read."""
        tensor, changed = self._groups[group][name], torch.empty(0, dtype=torch.int64)
        span = self._spans(len(tensor))[self._world.rank]
        if len(span):
            try:
                changed = changed_rows(base.open(), name, tensor, span)
            except CheckpointError:
                return _UNKNOWN
        self.of_common[group, name] = changed
        return len(changed)

    def _increment(self, group: str, base: _KnownBase, columns: Iterator[list[int]]) -> PlannedIncrement | None:
        """Return what is stored of a group, from what all ranks have counted; None: all of it."""
        tensors, counts = self._groups[group], dict[str, list[int]]()
        is_known = True
        for each in self._saved:
            if each.group != group:
                continue
            rows = len(each.table.weight)
            sampled = next(columns)
            of_ranks = [sum(next(columns)) for _ in range(self._world.size)]
            if _UNKNOWN in sampled:
                is_known = False
            elif 2 * sum(sampled) <= len(sampled_rows(rows)) and each.table.weight.nbytes >= LEAST_NBYTES:
                counts |= dict.fromkeys(each.numbers, of_ranks)
        for name in base.compared:
            counts[name] = next(columns)
            is_known = is_known and _UNKNOWN not in counts[name]
        if not is_known or not counts:
            return None
        tied = tied_names(tensors)
        forms: dict[str, Tensor] = {}
        lengths: dict[str, Json] = {}
        aliases: dict[str, Json] = {}
        for name, tensor in tensors.items():
            if tied.get(name) in lengths:
                aliases[name] = tied[name]
            elif name in counts:
                lengths[name] = len(tensor)
                changed = sum(counts[name])
                forms[name] = torch.empty((changed, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
                forms[name_of_rows(name)] = torch.empty(changed, dtype=torch.int64, device="meta")
            else:
                forms[name] = tensor
        nbytes = nbytes_of([(name, form) for name, form in forms.items() if name not in tied])
        if not base.file.is_worth(nbytes):
            return None
        notes: dict[str, Json] = {
            "described": base.file.described,
            "names": [*tensors],
            "rows": lengths,
            "aliases": aliases,
        }
        return PlannedIncrement(forms, counts, notes)
