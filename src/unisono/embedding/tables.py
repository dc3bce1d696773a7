"""Tables by name, and the object that steps them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from torch import nn

from unisono.embedding.table_modules import BagTable, RowTable
from unisono.embedding.table_optimizer import TableOptimizer
from unisono.embedding.table_settings import Table, check_memory
from unisono.text import a_type

__all__ = ["Tables", "dense_parameters", "optimizer_of", "tables_in"]


class Tables(nn.Module, Mapping[str, nn.Module]):
    """Tables by name. It is a module, and so is each table: put all or some of them into a model, and give the model to
    a Trainer or use it in a loop.

    A Trainer updates tables in the same step as the rest of the model. In a loop of your own, call `step` and
    `zero_grad` beside those of your optimizer, which gets `dense_parameters(model)`.

    Rows begin as those of nn.Embedding do, from torch's generator. A dynamic table takes its seed from there.

    Args:
        tables: The settings of each table, by name.

    Raises:
        TypeError, ValueError: They are no settings, or there are none.
        MemoryError: They do not fit the memory that is available. Nothing has been allocated.
    """

    def __init__(self, tables: Mapping[str, Table]) -> None:
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
        check_memory(tables)
        super().__init__()
        # Not by add_module, which refuses the names of this class's attributes: a table may be called "items".
        self._modules |= {
            name: RowTable(name, table) if table.pooling is None else BagTable(name, table)
            for name, table in tables.items()
        }

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
        """Update the rows that have a gradient."""
        self.optimizer.step()


def tables_in(modules: Iterable[nn.Module]) -> dict[int, RowTable | BagTable]:
    """Return the tables in modules, by the id of their weight."""
    return {
        id(module.weight): module
        for root in modules
        for module in root.modules()
        if isinstance(module, RowTable | BagTable)
    }


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model that belong to no table: those for the optimizer of torch beside them."""
    of_tables = {id(p) for module in tables_in([model]).values() for p in module.parameters()}
    return [p for p in model.parameters() if id(p) not in of_tables]


def optimizer_of(modules: Iterable[RowTable | BagTable]) -> TableOptimizer:
    """Return an optimizer of tables."""
    modules = [*modules]
    maps = {module.weight: module.rows for module in modules if module.rows is not None}
    return TableOptimizer([(module.weight, module.table.optimizer) for module in modules], maps=maps)
