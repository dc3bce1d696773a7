"""The tensors of divided tables that have a row for each row of a table, under the names that a model gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.collectives.rank_errors import raised_on_all
from unisono.collectives.world import World
from unisono.embedding.lazy_rows import LazyRows
from unisono.embedding.located_rows import ReadRows
from unisono.embedding.row_map import RowMap
from unisono.embedding.row_optimizers import rule_named
from unisono.embedding.table_optimizer import TableOptimizer
from unisono.embedding.zero_memory import zero_memory
from unisono.engine.model_contents import parameter_names
from unisono.engine.row_requests import DividedTable
from unisono.engine.row_transfer import RowedTensor, RowTransfer

__all__ = ["NamedTensors", "Where"]

Where = tuple[str, str]
"""The group and the name of a tensor in a checkpoint."""


class NamedTensors:
    """The tensors of divided tables and of their optimizers, and how they travel.

    It lets `export_rows` read the rows of all ranks.

    Args:
        world: The ranks.
        modules: The models by the prefix of their names.
        optimizers: The optimizers by name.
        tables: The tables.
    """

    def __init__(
        self,
        world: World,
        modules: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        tables: Sequence[DividedTable],
    ) -> None:
        self._world = world
        self.names: list[Where] = []
        """The name of each tensor, by its number."""
        self.call: Callable[[str, Callable[[], None]], None] = _call
        """Makes a call in which ranks need each other, as its recovery does; see `Recovery.call`."""
        self.transfer = RowTransfer(world, self._listed(modules, optimizers, tables))

    def exists(self, number: int) -> bool:
        """Return True if there is the tensor: state of an optimizer is made in the first step."""
        get = self.transfer.tensors[number].tensor
        return not isinstance(get, _StateOf) or get.exists

    @property
    def present(self) -> list[int]:
        """The numbers of the tensors that there are."""
        return [number for number in range(len(self.names)) if self.exists(number)]

    def new_state(self, number: int, form: Tensor) -> Tensor:
        """Return memory of zeros for a tensor of the state of an optimizer.

        Args:
            number: The number of the tensor.
            form: Of its shape and type, as they are in a checkpoint.
        """
        file = self.transfer.tensors[number].table.file
        if file is not None:
            return file.zeros(self.names[number][1].rpartition(".")[2])
        return zero_memory(form.shape, form.dtype, small_pages=True)

    @contextmanager
    def serving(self, order: Tensor | None = None) -> Iterator[None]:
        """Let rank 0 ask for rows in this context, and others answer before it; see `RowTransfer.serve`."""
        if self._world.rank != 0:
            self.transfer.serve(order)
            yield
            return
        try:
            yield
        finally:
            self.transfer.end()

    def _listed(
        self, modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer], tables: Sequence[DividedTable]
    ) -> list[RowedTensor]:
        names, single = parameter_names(modules), [*optimizers] == [""]
        listed: list[RowedTensor] = []

        def add(
            table: DividedTable,
            kind: Literal["weight", "written", "state"],
            where: Where,
            form: Tensor,
            get: Callable[[], Tensor],
        ) -> None:
            self.names.append(where)
            listed.append(RowedTensor(table, kind, torch.empty_like(form, device="meta"), get))

        for table in tables:
            weight = table.weight
            table.rows.collect = partial(self._collect, len(listed))
            of_weight = ("model", names[id(weight)])
            if isinstance(table.rows, LazyRows):
                add(table, "weight", of_weight, weight, weight.detach)
                written = table.rows.written
                add(table, "written", ("model", names[id(written)]), written, written.detach)
            else:
                add(table, "state", of_weight, weight, weight.detach)  # a row may have values without an id
            for key, optimizer in optimizers.items():
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

    def _collect(self, number: int, write: Callable[[ReadRows], None]) -> None:
        """Let rank 0 write the rows of a table; see `LocatedRows.collect`. The next tensor is `written`."""
        fetch, table = self.transfer.fetch, self.transfer.tensors[number].table

        def export() -> None:
            order = table.rows.in_order() if isinstance(table.rows, RowMap) else None

            def read(start: int, stop: int) -> tuple[Tensor, Tensor]:
                values = fetch(number, start, stop, order)
                if order is not None:
                    return values, torch.ones(len(values), dtype=torch.uint8)
                return values, fetch(number + 1, start, stop)

            with raised_on_all(self._world, "export_rows"), self.serving(order):
                if self._world.rank == 0:
                    write(read)

        self.call(f"export_rows of table {table.name!r}", export)


def _call(_name: str, body: Callable[[], None]) -> None:
    body()


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
