"""Embedding tables whose rows are divided over the ranks of a run, where its state is saved, restored or looked at.

Each rank has tensors of full shape, of which it writes its own rows alone: what is never written takes no memory. So
names, shapes and numbers of rows are those of one rank, and what a checkpoint holds does not depend on the division.
Rank 0 saves tables from a file without a name, which gets the rows of all ranks. `row_division` divides tables. Start
reading at `DividedTables.gather`.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.collectives.world import World, as_bytes
from unisono.embedding.lazy_rows import ReadRows
from unisono.embedding.row_optimizers import rule_named
from unisono.embedding.table_optimizer import TableOptimizer
from unisono.embedding.zero_memory import zero_memory
from unisono.engine.model_contents import parameter_names
from unisono.engine.row_changes import RowChanges
from unisono.engine.row_exchange import DividedTable, RowExchange
from unisono.engine.row_transfer import RowedTensor, RowTransfer
from unisono.errors import CheckpointError, UnisonoError
from unisono.plan.alignment import align_up
from unisono.shm.segment import Segment
from unisono.shm.unnamed_file import reserve, unnamed_file
from unisono.state.digest import digest, exact, same_memory
from unisono.state.durable_files import make_folder
from unisono.state.row_column import RowColumn
from unisono.state.safetensors_format import tied_names
from unisono.state.weight_files import write_rows
from unisono.trainer.rank_errors import raised_on_all
from unisono.trainer.snapshot import model_tensors, optimizer_state

__all__ = ["DividedTables"]

_ALIGNMENT = 4096
Where = tuple[str, str]
"""The group and the name of a tensor in a checkpoint."""


class DividedTables:
    """The divided tables of a run. It has the calls of `ShardGathering` that concern the state as a whole.

    Args:
        world: The ranks.
        modules: The models by the prefix of their names.
        optimizers: The optimizers by name.
        exchange: Their lookups.
        directory: The directory of the run; None: there is none.
    """

    stays_divided = False
    """Whether no rank is expected to have memory for the whole; see `ShardGathering`."""

    def __init__(
        self,
        world: World,
        modules: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        exchange: RowExchange,
        directory: Path | None,
    ) -> None:
        self._world, self._modules, self._optimizers, self._directory = world, modules, optimizers, directory
        self.exchange = exchange
        """Brings rows that others have."""
        self._where: list[Where] = []
        self._transfer = RowTransfer(world, self._listed())
        self._of_table = self._tensors_by_table()
        self._changes = [
            RowChanges(min(self._transfer.tensors[number].chunk_length for number in numbers))
            for numbers in self._of_table
        ]
        self._segment: Segment | None = None
        self._whole: list[Tensor] = []
        """On rank 0, each tensor with the rows of all ranks, in a file."""
        self._gathered_at = -1
        """The number of steps that had begun when the rows came together."""

    def _listed(self) -> list[RowedTensor]:
        names, single = parameter_names(self._modules), [*self._optimizers] == [""]
        listed: list[RowedTensor] = []

        def add(
            table: DividedTable,
            kind: Literal["weight", "written", "state"],
            where: Where,
            form: Tensor,
            get: Callable[[], Tensor],
        ) -> None:
            self._where.append(where)
            listed.append(RowedTensor(table, kind, torch.empty_like(form, device="meta"), get))

        for table in self.exchange.tables:
            weight = table.weight
            table.rows.collect = partial(self._collect, len(listed))
            add(table, "weight", ("model", names[id(weight)]), weight, weight.detach)
            written = table.rows.written
            add(table, "written", ("model", names[id(written)]), written, written.detach)
            for key, optimizer in self._optimizers.items():
                if not isinstance(optimizer, TableOptimizer):
                    continue
                for group in optimizer.param_groups:
                    if not any(p is weight for p in group["params"]):
                        continue
                    rule = rule_named(group["rule"])
                    where = names[id(weight)] if single else f"{key}.{names[id(weight)]}"
                    for of_state in (*rule.per_row, *rule.per_element):
                        form = weight[:, 0] if of_state in rule.per_row else weight
                        get = _StateOf(optimizer, weight, of_state)
                        add(table, "state", ("optimizer", f"{where}.{of_state}"), form, get)
        return listed

    def _tensors_by_table(self) -> list[list[int]]:
        """Return the numbers of the tensors of each table."""
        places = {id(table.rows): place for place, table in enumerate(self.exchange.tables)}
        of_table: list[list[int]] = [[] for _ in places]
        for number, each in enumerate(self._transfer.tensors):
            of_table[places[id(each.table.rows)]].append(number)
        return of_table

    @property
    def names(self) -> set[str]:
        """The names of the divided tensors of models."""
        return {name for group, name in self._where if group == "model"}

    @property
    def is_whole(self) -> bool:
        """True if the rows of all ranks are in the file of rank 0."""
        return self._gathered_at == self.exchange.steps

    @property
    def needs_others(self) -> bool:
        """True if `gather` needs all ranks, since there is something to gather."""
        return not self.is_whole

    def check_whole(self, call: str) -> None:
        """Refuse a call that needs all rows on one rank."""
        raise UnisonoError(f"{call} is not possible with tables that are divided over ranks")

    def gather(self, *, everywhere: bool) -> None:
        """Bring all rows into a file of the run's directory, on rank 0. Every rank must call it; no directory, no file.

        Memory: a chunk of 4 MB. Disk: that of the tables. Traffic: the rows that have changed since the last time, or
        all that have been written if this is the first time, or weights have been loaded.

        Args:
            everywhere: Makes no difference.

        Raises:
            CheckpointError: On all ranks, if the disk has no room.
        """
        if self._directory is None or self.is_whole:
            return
        with raised_on_all(self._world, "gathering the rows of tables"):
            found = self._find_changes()
            # The state of an optimizer is made in the first step.
            tensors = [number for number in range(len(self._where)) if self._exists(number)]
            own = [len(tensors), *(-1 if rows is None else len(rows) for rows in found)]
            of_ranks = [[int(number) for number in each] for each in self._world.gather_numbers(own)]
            changed = [rows for rows in found if rows is not None]
            if any(each[0] != len(tensors) or -1 in each for each in of_ranks):
                self._gather_all()
            else:
                for table, (numbers, rows) in enumerate(zip(self._of_table, changed, strict=True), 1):
                    for number in numbers:
                        if number in tensors:
                            into = self._whole[number] if self._whole else None
                            self._transfer.bring(number, rows, [each[table] for each in of_ranks], into)
        self._note_gathered()

    def _find_changes(self) -> list[Tensor | None]:
        """Return the rows of each table that have changed on this rank since rank 0 got them; None: not known."""
        tensors = self._transfer.tensors
        return [
            changes.find(
                len(table.weight),
                partial(self._transfer.present, table),
                [tensors[n].tensor() for n in numbers if self._exists(n)],
            )
            for table, changes, numbers in zip(self.exchange.tables, self._changes, self._of_table, strict=True)
        ]

    def _gather_all(self) -> None:
        """Bring all rows that are present to rank 0, and zeros in the place of others."""
        with self._serving():
            if self._world.rank == 0:
                for number, whole in enumerate(self._whole):
                    if self._exists(number):
                        start = 0
                        for chunk in self._transfer.column(number).chunks():
                            place = whole[start : start + len(chunk)]
                            if as_bytes(chunk).any() or as_bytes(place).any():
                                place.copy_(chunk)
                            start += len(chunk)

    def _note_gathered(self) -> None:
        """Note that the file of rank 0 has the rows as they were at the last look for changes."""
        for changes in self._changes:
            changes.keep()
        self._gathered_at = self.exchange.steps
        self._release_pages()

    def places(self) -> dict[Where, Tensor]:
        """Return the memory that a checkpoint is read into: on rank 0 a file, on others that of their rows.

        Every rank must call it.

        Raises:
            CheckpointError: On all ranks, if the disk has no room for that file.
        """
        if self._directory is None:
            return {}
        with raised_on_all(self._world, "the directory of a run with divided tables"):
            if self._world.rank == 0:
                self._allocate(self._directory)
        if self._world.rank == 0:
            return dict(zip(self._where, self._whole, strict=True))
        return {where: self._place(number) for number, where in enumerate(self._where)}

    def _place(self, number: int) -> Tensor:
        """Return memory for this rank's rows of a tensor from a checkpoint."""
        group, _ = self._where[number]
        form = self._transfer.tensors[number].form
        if group == "model":
            return self._transfer.tensors[number].tensor()
        return zero_memory(form.shape, form.dtype, small_pages=True)

    def spread(self, groups: Mapping[str, dict[str, Tensor]]) -> None:
        """Let each rank have its rows of what rank 0 has read, and put them into groups. Every rank must call it.

        Args:
            groups: The tensors of the checkpoint, with those that `places` has returned.
        """
        for number, (group, name) in enumerate(self._where):
            if name not in groups.get(group, {}):
                continue
            if self._world.rank == 0:
                groups[group][name] = self._place(number)
            read = partial(_rows_of, self._whole[number]) if self._world.rank == 0 else None
            self._transfer.spread(number, groups[group][name], read)
        self._gathered_at = self.exchange.steps
        self._release_pages()

    def note_restored(self) -> None:
        """Note that the state of this rank is that of the checkpoint that rank 0 has read into its file."""
        self._find_changes()
        self._note_gathered()

    def put_whole(self, groups: Mapping[str, dict[str, Tensor]]) -> None:
        """Put the tensors with all rows into the groups of a checkpoint, on rank 0."""
        stand_ins = self._stand_ins(lambda number: self._whole[number])
        for group in groups.values():
            group |= {name: stand_ins[key] for name, t in group.items() if (key := same_memory(t)) in stand_ins}

    def digest(self) -> str:
        """Return the digest of the whole state; see `Trainer.digest`. Every rank must call it. Memory: a chunk."""

        def compute() -> bytes:
            with self._serving():
                columns = self._stand_ins(self._transfer.column)
                model = model_tensors(self._modules)
                optimizers = {key: optimizer_state(self._modules, each) for key, each in self._optimizers.items()}
                return digest({"model": _with(model, columns), "optimizer": _with(optimizers, columns)}).encode()

        if self._world.rank != 0:
            self._transfer.serve()
        return self._world.broadcast_bytes(compute).decode()

    def export(self, path: Path) -> None:
        """Write the weights of the models into a safetensors file; see `Trainer.export`. Every rank must call it."""
        with raised_on_all(self._world, "trainer.export"), self._serving():
            if self._world.rank == 0:
                tensors = model_tensors(self._modules)
                found = _with(tensors, self._stand_ins(self._transfer.column))
                columns = {
                    name: each if isinstance(each, RowColumn) else RowColumn(each, partial(_only, exact(each, name)))
                    for name, each in found.items()
                }
                write_rows(path, columns, tied_names(tensors))

    def into(self) -> dict[Where, Tensor] | None:
        """Return memory in a file for tensors of a checkpoint that rank 0 reads as a whole; None if there is none.

        Every rank must call it: the file then has not what came together there.
        """
        self._gathered_at = -1
        for changes in self._changes:
            changes.forget()
        return dict(zip(self._where, self._whole, strict=True)) if self._whole else None

    def load(self, name: str, read: Callable[[int, int], Tensor] | None) -> None:
        """Replace the rows of a divided tensor of a model, of all ranks. Every rank must call it.

        Args:
            name: The name of the tensor.
            read: See `RowTransfer.spread`.
        """
        self._gathered_at = -1
        number = self._where.index(("model", name))
        self._transfer.spread(number, self._place(number), read)

    def _collect(self, number: int, write: Callable[[ReadRows], None]) -> None:
        """Let rank 0 write the rows of a table; see `LazyRows.collect`. The next tensor is `written`."""
        fetch = self._transfer.fetch
        with raised_on_all(self._world, "export_rows"), self._serving():
            if self._world.rank == 0:
                write(lambda start, stop: (fetch(number, start, stop), fetch(number + 1, start, stop)))

    @contextmanager
    def _serving(self) -> Iterator[None]:
        """Let rank 0 ask for rows in this context, and others answer before it."""
        if self._world.rank != 0:
            self._transfer.serve()
            yield
            return
        try:
            yield
        finally:
            self._transfer.end()

    def _exists(self, number: int) -> bool:
        get = self._transfer.tensors[number].tensor
        return not isinstance(get, _StateOf) or get.exists

    def _stand_ins(self, make: Callable[[int], Any]) -> dict[tuple[object, ...], Any]:
        tensors = self._transfer.tensors
        return {same_memory(tensors[n].tensor()): make(n) for n in range(len(tensors)) if self._exists(n)}

    def _allocate(self, folder: Path) -> None:
        """Make memory of zeros in a file for all tensors."""
        forms = [each.form for each in self._transfer.tensors]
        sizes = [align_up(form.numel() * form.element_size(), _ALIGNMENT) for form in forms]
        try:
            make_folder(folder)
            segment = unnamed_file(folder, sum(sizes))
            try:
                reserve(segment)
            finally:
                segment.close_descriptor()
        except OSError as error:
            raise CheckpointError(
                f"the rows of divided tables, {sum(sizes):,} bytes with the state of their optimizer, cannot come "
                f"together in {folder}: {error}. A checkpoint needs room for them twice: free space, or choose another "
                "directory."
            ) from error
        starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self._whole = [segment.tensor(start, form.shape, form.dtype) for start, form in zip(starts, forms, strict=True)]
        self._segment = segment

    def _release_pages(self) -> None:
        """Leave the file to the kernel: its pages need not stay in this process."""
        if self._segment is not None:
            self._segment.memory.madvise(mmap.MADV_DONTNEED)


def _rows_of(tensor: Tensor, start: int, stop: int) -> Tensor:
    return tensor[start:stop]


def _only(tensor: Tensor) -> Iterator[Tensor]:
    yield tensor


class _StateOf:
    """A tensor of the state of an optimizer, which is made in the first step."""

    def __init__(self, optimizer: TableOptimizer, weight: Tensor, key: str) -> None:
        self._optimizer, self._weight, self._key = optimizer, weight, key

    @property
    def exists(self) -> bool:
        return self._key in self._optimizer.state.get(self._weight, {})

    def __call__(self) -> Tensor:
        tensor: Tensor = self._optimizer.state[self._weight][self._key]
        return tensor


def _with(values: Any, stand_ins: Mapping[tuple[object, ...], Any]) -> Any:
    """Return nested dicts with other values in the place of some tensors."""
    if isinstance(values, Tensor):
        return stand_ins.get(same_memory(values), values)
    if isinstance(values, Mapping):
        return {key: _with(value, stand_ins) for key, value in values.items()}
    return values
