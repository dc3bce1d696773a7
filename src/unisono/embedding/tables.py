"""Tables by name, and the object that steps them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Literal

from torch import Tensor, nn

from unisono import recovery_link
from unisono.arguments import flag, whole
from unisono.embedding.rows_ahead import RowsAhead
from unisono.embedding.serving import ServerCounts, Serving, serving_for
from unisono.embedding.table_modules import BagTable, RowTable
from unisono.embedding.table_optimizer import TableOptimizer
from unisono.embedding.table_settings import Table, check_divided, check_room, part_of_host
from unisono.text import a_type

__all__ = ["Tables", "dense_parameters", "lagging", "optimizer_of", "serving_in", "settle", "tables_in"]


class Tables(nn.Module, Mapping[str, nn.Module]):
    """Tables by name. It is a module, and so is each table: put all or some of them into a model, and give the model to
    a Trainer or use it in a loop.

    A Trainer updates tables in the same step as the rest of the model. In a loop of your own, call `step` and
    `zero_grad` beside those of your optimizer, which gets `dense_parameters(model)`.

    Rows begin as those of nn.Embedding do, from torch's generator. A dynamic table, and one with `init_std`, takes its
    seed from there.

    Args:
        tables: The settings of each table, by name.
        servers: The number of server processes that update the rows, as `unisono run --servers` has started; None: as
            many as there are. Without any, or with 0, ranks do.
        consistency: With servers, how many steps old rows may be that a rank reads: "sync" is none, "bounded(4)" at
            most 4, "async" any number.
        placement: How tables are dealt over servers: rows by a "hash" of their number or by "range", each "table" as a
            whole, or of each row a range of columns ("column").
        divided: Where the ranks of a Trainer share no memory, as on several hosts, each keeps a part of the rows, and
            those of others come to it in each lookup. Where they share memory, there is one copy anyhow.
            They stay in memory of the CPU then, also with one rank and a model on a GPU.
        copies: With divided=True, on how many ranks each row is. With 2, on two hosts if several have equally many
            ranks, and one that dies is replaced alone.

    Raises:
        TypeError, ValueError: They are no settings, or there are none; the servers are not those of the job; or a table
            cannot be divided.
        MemoryError: They do not fit the memory that is available. Nothing has been allocated.
        UnisonoError: They do not fit the disk of their directory.
    """

    def __init__(
        self,
        tables: Mapping[str, Table],
        *,
        servers: int | None = None,
        consistency: str = "sync",
        placement: Literal["hash", "range", "table", "column"] = "hash",
        divided: bool = False,
        copies: Literal[1, 2] = 1,
    ) -> None:
        if not tables:
            raise ValueError("there is no table: give Tables at least one, by name")
        for name, table in tables.items():
            if not isinstance(table, Table):
                raise TypeError(f"tables[{name!r}] is {a_type(table)}; give a unisono.embedding.Table")
            if not name or "." in name:
                raise ValueError(
                    f"{name!r} cannot be the name of a table, since it is a part of its parameters' names: give it one "
                    "without dots"
                )
        if whole("copies", copies, least=1) > 2:
            raise ValueError(f"copies={copies!r}: each row is on one rank or on two")
        if flag("divided", divided):
            check_divided(tables)
        elif copies > 1:
            raise ValueError(f"copies={copies} is for rows that are divided over ranks: give divided=True, too")
        self._serving = serving_for(tables, servers, consistency, placement, os.environ)
        # A process that takes the place of a rank maps the files of the others; see `engine/shared/table_files.py`.
        have_files = recovery_link.current is not None and recovery_link.current.is_new
        check_room(tables, have_files=have_files, part=min(copies * part_of_host(os.environ), 1.0) if divided else 1.0)
        super().__init__()
        # Not by add_module, which refuses the names of this class's attributes: a table may be called "items".
        self._modules |= {
            name: (RowTable if table.pooling is None else BagTable)(name, table, divided=divided)
            for name, table in tables.items()
        }
        for module in tables_in([self]).values():
            module.serving, module.keeps_twice = self._serving, copies > 1

    # A mapping is equal to others with the same items, and cannot be hashed; a module must be itself alone.
    __eq__, __hash__ = object.__eq__, object.__hash__

    def __getitem__(self, name: str) -> nn.Module:
        """Return the module of a table."""
        module = self._modules[name]
        assert module is not None
        return module

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._modules)

    def __len__(self) -> int:
        """Return the number of tables."""
        return len(self._modules)

    @cached_property
    def optimizer(self) -> TableOptimizer:
        """The optimizer of all tables, for loops of your own, schedulers and checkpoints."""
        return optimizer_of(tables_in([self]).values())

    def step(self) -> None:
        """Update the rows that have a gradient.

        Raises:
            ValueError: The tables are on servers, or divided over ranks: `unisono.parallel.share_tables` is for loops
                with these.
        """
        if any(m.rows is not None and m.rows.owners is not None for m in tables_in([self]).values()):
            raise ValueError(
                "Tables.step updates the rows of this process, and these tables are divided over ranks: a Trainer "
                "updates them in its step, and in a loop of your own step of what share_tables has returned"
            )
        if self._serving is not None:
            raise ValueError(
                "Tables.step updates the rows of this process, and these tables are on servers: give the model to a "
                "Trainer, or in a loop of your own call step of unisono.parallel.share_tables(tables)"
            )
        self.optimizer.step()

    def prefetch(self, lookups: Mapping[str, Tensor]) -> None:
        """Begin to read rows that will be looked up, with the state of their optimizer, and return at once.

        It is for tables with `directory=`, whose rows may be on the disk: call it for the next batch before the
        computation of this one. For tables in memory it does nothing. No value depends on it.

        Args:
            lookups: The ids by the name of the table, of any shape and order; some may be missing, or be looked up
                never.

        Raises:
            TypeError: These are not tensors of ids by name.
            ValueError: There is no table of a name.
            IndexError: An id is out of range.
        """
        self._rows_ahead.begin([lookups], source="what prefetch gets")

    @cached_property
    def _rows_ahead(self) -> RowsAhead:
        return RowsAhead(tables_in([self]).values())

    def settle(self) -> None:
        """Wait until servers have applied all updates that they were given. Does nothing without servers.

        With consistency="sync", a Trainer's step does so. Otherwise call it before you read rows by your own code;
        checkpoints, digests, `evaluate`, `predict`, `state_dict` and `export_rows` do.
        """
        if self._serving is not None:
            self._serving.settle()

    @property
    def server_counts(self) -> ServerCounts | None:
        """The updates that servers were given and have applied; None without servers, and before the first of them."""
        serving = self._serving
        if serving is None:
            return None
        found = serving.past if serving.counts is None else serving.counts()
        return found if found.steps else None


def tables_in(modules: Iterable[nn.Module]) -> dict[int, RowTable | BagTable]:
    """Return the tables in modules, by the id of their weight."""
    return {
        id(module.weight): module
        for root in modules
        for module in root.modules()
        if isinstance(module, RowTable | BagTable)
    }


def serving_in(modules: Iterable[nn.Module]) -> Serving | None:
    """Return the servers of the tables in modules; None if ranks update them.

    Raises:
        ValueError: Some are updated by servers in another way than others.
    """
    found = {id(module.serving): module.serving for module in tables_in(modules).values()}
    servings = [serving for serving in found.values() if serving is not None]
    kinds = {(serving.consistency.text, serving.placement) for serving in servings}
    if len(kinds) > 1:
        told = " and ".join(f"consistency={mode!r}, placement={placement!r}" for mode, placement in sorted(kinds))
        raise ValueError(f"the tables of one Trainer have {told}: make them by one Tables(...), or give all the same")
    if len(servings) > 1:
        raise ValueError(
            f"the tables of one Trainer on servers come from {len(servings)} objects: make them by one Tables(...)"
        )
    return servings[0] if servings else None


def lagging(modules: Iterable[nn.Module]) -> set[int]:
    """Return the `id` of each table in modules that servers may write to at any time, as no step waits for them."""
    found = tables_in(modules).items()
    return {key for key, m in found if m.serving is not None and m.serving.consistency.bound != 0}


def settle(modules: Iterable[nn.Module]) -> None:
    """Wait until servers have applied all updates of the tables in modules that they were given."""
    for module in tables_in(modules).values():
        if module.serving is not None:
            module.serving.settle()


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model that belong to no table: those for the optimizer of torch beside them."""
    of_tables = {id(p) for module in tables_in([model]).values() for p in module.parameters()}
    return [p for p in model.parameters() if id(p) not in of_tables]


def optimizer_of(modules: Iterable[RowTable | BagTable]) -> TableOptimizer:
    """Return an optimizer of tables."""
    modules = [*modules]
    maps = {module.weight: module.rows for module in modules if module.rows is not None}
    files = {module.weight: module.file for module in modules if module.file is not None}
    return TableOptimizer([(module.weight, module.table.optimizer) for module in modules], maps=maps, files=files)
