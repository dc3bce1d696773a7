"""Embedding tables whose rows are divided over the ranks of a run, where its state is saved, restored or looked at.

Each rank has tensors of full shape, of which it writes its own rows alone: what is never written takes no memory. So
names, shapes and numbers of rows are those of one rank, and what a checkpoint holds does not depend on the division.
`row_division` divides tables, `table_parts` saves them, and `table_restoration` restores them. Start reading at
`DividedTables.contents` and `DividedTables.digest`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.collectives.rank_errors import raised_on_all
from unisono.collectives.world import World
from unisono.engine.row_changes import RowChanges
from unisono.engine.row_exchange import RowExchange
from unisono.engine.rowed_tensors import NamedTensors
from unisono.errors import UnisonoError
from unisono.state.digest import digest, exact, same_memory
from unisono.state.row_column import RowColumn
from unisono.state.safetensors_format import tied_names
from unisono.state.weight_files import write_rows
from unisono.trainer.part_saving import PartPlace, PartSaving
from unisono.trainer.snapshot import Subjects, model_tensors, optimizer_state
from unisono.trainer.table_changes import SavedRows, spans_of
from unisono.trainer.table_parts import TableContents

__all__ = ["ROWS_LOST_TWICE", "DividedTables"]

ROWS_LOST_TWICE = "the two ranks that kept the same rows of a divided embedding table died together"


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
        self.tensors = NamedTensors(world, modules, optimizers, exchange.tables)
        """What is divided, by its names."""
        self._transfer = self.tensors.transfer
        self._changes: dict[tuple[str, int], RowChanges] = {}
        """By group and table, which rows have changed."""
        self._subjects: Subjects | None = None
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
        for number, (group, name) in enumerate(self.tensors.names):
            if self.tensors.exists(number):
                key = (group, tables[id(self._transfer.tensors[number].table.rows)])
                numbers.setdefault(key, {})[name] = number
        for key, of_table in numbers.items():
            length = min(self._transfer.tensors[number].chunk_length for number in of_table.values())
            self._changes.setdefault(key, RowChanges(length))
        return [
            SavedRows(self.exchange.tables[key[1]], key[0], of_table, self._changes[key])
            for key, of_table in numbers.items()
        ]

    @property
    def names(self) -> set[str]:
        """The names of the divided tensors of models."""
        return {name for group, name in self.tensors.names if group == "model"}

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
        self._transfer.replenish(ranks, self.tensors.present)

    def lost_with(self, ranks: Collection[int]) -> bool:
        """Return True if some rows are kept by these ranks alone."""
        shift, size = self.exchange.shift, self._world.size
        return any(rank in ranks and (rank + shift) % size in ranks for rank in range(size))

    def divided(self, group: str) -> dict[str, int]:
        """Return the numbers of the divided tensors of a group of a checkpoint, by name."""
        return {name: number for number, (of, name) in enumerate(self.tensors.names) if of == group}

    def form(self, number: int) -> Tensor:
        """Return a tensor of the type and shape of a divided one, on the meta device."""
        return self._transfer.tensors[number].form

    def distribute(self, number: int, into: Tensor, spans: Sequence[range], read: Callable[[int, int], Tensor]) -> None:
        """Let each rank have its rows of a divided tensor; see `RowTransfer.distribute`."""
        self._transfer.distribute(number, into, spans, read)

    def digest(self) -> str:
        """Return the digest of the whole state; see `Trainer.digest`. Every rank must call it. Memory: a chunk."""

        def compute() -> bytes:
            with self.tensors.serving():
                columns = self._stand_ins(self._transfer.column)
                model = model_tensors(self._modules)
                optimizers = {key: optimizer_state(self._modules, each) for key, each in self._optimizers.items()}
                return digest({"model": _with(model, columns), "optimizer": _with(optimizers, columns)}).encode()

        if self._world.rank != 0:
            self._transfer.serve()
        return self._world.broadcast_bytes(compute).decode()

    def read_weights(self, read: Callable[[Mapping[str, Tensor | RowColumn]], None], *, call: str) -> None:
        """Call a function on rank 0 with the tensors of the models, those that are divided in chunks.

        Every rank must call it, and raises an error if that of rank 0 does.

        Args:
            read: The function.
            call: What reads them, for messages.
        """
        with raised_on_all(self._world, call), self.tensors.serving():
            if self._world.rank == 0:
                read(_with(model_tensors(self._modules), self._stand_ins(self._transfer.column)))

    def export(self, path: Path) -> None:
        """Write the weights of the models into a safetensors file; see `Trainer.export`. Every rank must call it."""

        def write(tensors: Mapping[str, Tensor | RowColumn]) -> None:
            columns = {
                name: each if isinstance(each, RowColumn) else RowColumn(each, partial(_only, exact(each, name)))
                for name, each in tensors.items()
            }
            write_rows(path, columns, tied_names(model_tensors(self._modules)))

        self.read_weights(write, call="trainer.export")

    def load(self, name: str, read: Callable[[int, int], Tensor] | None) -> None:
        """Replace the rows of a divided tensor of a model, of all ranks. Every rank must call it.

        Args:
            name: The name of the tensor.
            read: Returns rows start <= row < stop, contiguous, on rank 0; None on the others.
        """
        self.exchange.drop_ahead()
        number = self.tensors.names.index(("model", name))
        rowed = self._transfer.tensors[number]
        spans = spans_of(len(rowed.form), [0], self._world.size)
        self._transfer.distribute(number, rowed.tensor(), spans, read or _unread)

    def _stand_ins(self, make: Callable[[int], Any]) -> dict[tuple[object, ...], Any]:
        tensors = self._transfer.tensors
        return {same_memory(tensors[n].tensor()): make(n) for n in range(len(tensors)) if self.tensors.exists(n)}


def _unread(start: int, stop: int) -> Tensor:
    raise AssertionError(f"rank 0 reads rows {start} to {stop}")


def _only(tensor: Tensor) -> Iterator[Tensor]:
    yield tensor


def _with(values: Any, stand_ins: Mapping[tuple[object, ...], Any]) -> Any:
    """Return nested dicts with other values in the place of some tensors."""
    if isinstance(values, Tensor):
        return stand_ins.get(same_memory(values), values)
    if isinstance(values, Mapping):
        return {key: _with(value, stand_ins) for key, value in values.items()}
    return values
