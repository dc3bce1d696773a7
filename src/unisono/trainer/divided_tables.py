"""Embedding tables whose rows are divided over the ranks of a run, where its state is saved, restored or looked at.

Each rank has tensors of full shape, of which it writes its own rows alone: what is never written takes no memory. So
names, shapes and numbers of rows are those of one rank, and what a checkpoint holds does not depend on the division.
`row_division` divides tables, `table_parts` saves them, and `table_restoration` restores them. Start reading at
`DividedTables.contents` and `DividedTables.digest`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.collectives.world import World
from unisono.embedding.lazy_rows import LazyRows
from unisono.embedding.located_rows import ReadRows
from unisono.embedding.row_map import RowMap
from unisono.embedding.row_optimizers import rule_named
from unisono.embedding.table_optimizer import TableOptimizer
from unisono.engine.model_contents import parameter_names
from unisono.engine.row_changes import RowChanges
from unisono.engine.row_exchange import DividedTable, RowExchange
from unisono.engine.row_transfer import RowedTensor, RowTransfer
from unisono.errors import UnisonoError
from unisono.state.digest import digest, exact, same_memory
from unisono.state.row_column import RowColumn
from unisono.state.safetensors_format import tied_names
from unisono.state.weight_files import write_rows
from unisono.trainer.part_saving import PartPlace, PartSaving
from unisono.trainer.rank_errors import raised_on_all
from unisono.trainer.snapshot import Subjects, model_tensors, optimizer_state
from unisono.trainer.table_changes import SavedRows, spans_of
from unisono.trainer.table_parts import TableContents

__all__ = ["ROWS_LOST_TWICE", "DividedTables"]

ROWS_LOST_TWICE = "the two ranks that kept the same rows of a divided embedding table died together"

Where = tuple[str, str]
"""The group and the name of a tensor in a checkpoint."""


class DividedTables:
    """The divided tables of a run; see `StageGathering`, whose calls that concern the state as a whole it has.

    Args:
        world: The ranks.
        modules: The models by the prefix of their names.
        optimizers: The optimizers by name.
        exchange: Their lookups.
    """

    stays_divided = True
    """No rank is expected to have memory for the whole."""
    is_divided = True
    """Each rank has its own rows."""
    needs_others = True
    """All ranks are needed to save."""

    @property
    def is_replaceable(self) -> bool:
        """True if a rank that dies can be replaced alone."""
        return bool(self.exchange.shift)

    def __init__(
        self,
        world: World,
        modules: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        exchange: RowExchange,
    ) -> None:
        self._world, self._modules, self._optimizers = world, modules, optimizers
        self.exchange = exchange
        """Brings rows that others have."""
        self._where: list[Where] = []
        self._transfer = RowTransfer(world, self._listed())
        self._changes: dict[tuple[str, int], RowChanges] = {}
        """By group and table, which rows have changed."""
        self._subjects: Subjects | None = None
        self.call: Callable[[str, Callable[[], None]], None] = _call
        """Makes a call in which ranks need each other, as its recovery does; see `Recovery.call`."""
        self.saving = PartSaving(world, self, always=True)
        """Lets each rank write a part of a checkpoint, or rank 0 all of it."""

    def begin(self, subjects: Subjects) -> None:
        """Note the objects of the run. The next calls save or restore."""
        self._subjects = subjects

    def describe(self) -> None:
        """Do nothing: ranks tell each other what they have in `contents`."""

    def contents(self, tables: Sequence[None], place: PartPlace) -> TableContents:
        """Return what is written to a checkpoint. Every rank must call it. For errors see `TableContents`."""
        assert self._subjects is not None
        return TableContents(self._world, self._subjects, self._transfer, self._saved(), place)

    def _saved(self) -> list[SavedRows]:
        """Return what is divided of the present state, by group and table."""
        numbers: dict[tuple[str, int], dict[str, int]] = {}
        tables = {id(table.rows): place for place, table in enumerate(self.exchange.tables)}
        for number, (group, name) in enumerate(self._where):
            if self._exists(number):
                key = (group, tables[id(self._transfer.tensors[number].table.rows)])
                numbers.setdefault(key, {})[name] = number
        for key, of_table in numbers.items():
            length = min(self._transfer.tensors[number].chunk_length for number in of_table.values())
            self._changes.setdefault(key, RowChanges(length))
        return [
            SavedRows(self.exchange.tables[key[1]], key[0], of_table, self._changes[key])
            for key, of_table in numbers.items()
        ]

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
            of_weight = ("model", names[id(weight)])
            if isinstance(table.rows, LazyRows):
                add(table, "weight", of_weight, weight, weight.detach)
                written = table.rows.written
                add(table, "written", ("model", names[id(written)]), written, written.detach)
            else:
                add(table, "state", of_weight, weight, weight.detach)  # a row may have values without an id
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

    @property
    def names(self) -> set[str]:
        """The names of the divided tensors of models."""
        return {name for group, name in self._where if group == "model"}

    @property
    def is_whole(self) -> bool:
        """True on ranks that are not to save the state on their own."""
        return self._world.rank > 0

    def check_whole(self, call: str) -> None:
        """Refuse a call that needs all rows on one rank."""
        raise UnisonoError(f"{call} is not possible with tables that are divided over ranks")

    def divide_again(self) -> None:
        """Do nothing; see `ShardGathering`."""

    def gather(self, *, everywhere: bool) -> None:
        """Do nothing: what needs all rows reads them in chunks.

        Args:
            everywhere: Makes no difference.
        """

    def replenish(self, *, lacks: bool) -> None:
        """Bring rows to ranks that have none, from those that keep the same ones. Every rank must call it.

        Args:
            lacks: True on a rank that has none.

        Raises:
            UnisonoError: All ranks that kept some rows are gone.
        """
        told = self._world.gather_numbers([lacks])
        ranks = [rank for rank, (is_new,) in enumerate(told) if is_new]
        if self.lost_with(ranks):
            raise UnisonoError(ROWS_LOST_TWICE)
        self._transfer.replenish(ranks, [number for number in range(len(self._where)) if self._exists(number)])

    def lost_with(self, ranks: Collection[int]) -> bool:
        """Return True if some rows are kept by these ranks alone."""
        shift, size = self.exchange.shift, self._world.size
        return any(rank in ranks and (rank + shift) % size in ranks for rank in range(size))

    def divided(self, group: str) -> dict[str, int]:
        """Return the numbers of the divided tensors of a group of a checkpoint, by name."""
        return {name: number for number, (of, name) in enumerate(self._where) if of == group}

    def form(self, number: int) -> Tensor:
        """Return a tensor of the type and shape of a divided one, on the meta device."""
        return self._transfer.tensors[number].form

    def distribute(self, number: int, into: Tensor, spans: Sequence[range], read: Callable[[int, int], Tensor]) -> None:
        """Let each rank have its rows of a divided tensor; see `RowTransfer.distribute`."""
        self._transfer.distribute(number, into, spans, read)

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

    def load(self, name: str, read: Callable[[int, int], Tensor] | None) -> None:
        """Replace the rows of a divided tensor of a model, of all ranks. Every rank must call it.

        Args:
            name: The name of the tensor.
            read: Returns rows start <= row < stop, contiguous, on rank 0; None on the others.
        """
        number = self._where.index(("model", name))
        rowed = self._transfer.tensors[number]
        spans = spans_of(len(rowed.form), [0], self._world.size)
        self._transfer.distribute(number, rowed.tensor(), spans, read or _unread)

    def _collect(self, number: int, write: Callable[[ReadRows], None]) -> None:
        """Let rank 0 write the rows of a table; see `LocatedRows.collect`. The next tensor is `written`."""
        fetch, table = self._transfer.fetch, self._transfer.tensors[number].table

        def export() -> None:
            order = table.rows.in_order() if isinstance(table.rows, RowMap) else None

            def read(start: int, stop: int) -> tuple[Tensor, Tensor]:
                values = fetch(number, start, stop, order)
                if order is not None:
                    return values, torch.ones(len(values), dtype=torch.uint8)
                return values, fetch(number + 1, start, stop)

            with raised_on_all(self._world, "export_rows"), self._serving(order):
                if self._world.rank == 0:
                    write(read)

        self.call(f"export_rows of table {table.name!r}", export)

    @contextmanager
    def _serving(self, order: Tensor | None = None) -> Iterator[None]:
        """Let rank 0 ask for rows in this context, and others answer before it; see `RowTransfer.serve`."""
        if self._world.rank != 0:
            self._transfer.serve(order)
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


def _call(_name: str, body: Callable[[], None]) -> None:
    body()


def _unread(start: int, stop: int) -> Tensor:
    raise AssertionError(f"rank 0 reads rows {start} to {stop}")


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
