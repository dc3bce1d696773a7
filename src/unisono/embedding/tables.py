"""Tables, as modules to be used in a model, and the object that steps them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, cast

import torch
from torch import Tensor, nn

from unisono.arguments import choice, whole
from unisono.embedding.huge_pages import advise_huge_pages
from unisono.embedding.id_checks import check_ids, check_offsets
from unisono.embedding.lookup import Bags, look_up, pool
from unisono.embedding.row_optimizers import RowOptimizer
from unisono.embedding.table_optimizer import TableOptimizer
from unisono.machine import available_bytes
from unisono.text import a_type

__all__ = ["BagTable", "RowTable", "Table", "Tables", "dense_parameters", "tables_in"]


@dataclass(frozen=True, kw_only=True)
class Table:
    """The settings of a table.

    Raises:
        TypeError, ValueError: A setting is of the wrong type or out of its range.
    """

    rows: int
    """The number of rows; ids are 0 to rows - 1."""
    dim: int
    """The length of a row."""
    optimizer: RowOptimizer
    """How its rows are updated."""
    pooling: Literal["sum", "mean"] | None = None
    """How the rows of a bag are put together, as by nn.EmbeddingBag; None: each id gives a row, as by nn.Embedding."""
    padding_idx: int | None = None
    """An id that adds nothing to a bag, and whose row is never updated; without pooling, its row begins as zeros."""
    include_last_offset: bool = False
    """True if the offsets of bags end with the number of ids."""
    dtype: torch.dtype = torch.float32
    """The type of the elements: float32 or float64."""

    def __post_init__(self) -> None:
        """Check the settings."""
        whole("rows", self.rows, least=1)
        whole("dim", self.dim, least=1)
        choice("pooling", self.pooling, ("sum", "mean", None))
        if not isinstance(self.optimizer, RowOptimizer):
            raise TypeError(
                f"optimizer is {a_type(self.optimizer)}; give one of unisono.embedding, such as RowwiseAdagrad(lr=0.05)"
            )
        if self.padding_idx is not None and not 0 <= whole("padding_idx", self.padding_idx) < self.rows:
            raise ValueError(f"padding_idx={self.padding_idx} is no id of a table with ids 0 to {self.rows - 1}")
        if self.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype={self.dtype}: a table has torch.float32 or torch.float64")

    @property
    def nbytes(self) -> int:
        """The bytes of the rows."""
        return self.rows * self.dim * self.dtype.itemsize

    @property
    def state_nbytes(self) -> int:
        """The bytes of the optimizer's state, which is made in the first step."""
        rule = self.optimizer
        return self.rows * (len(rule.per_row) + self.dim * len(rule.per_element)) * self.dtype.itemsize


class RowTable(nn.Embedding):
    """A table whose ids give a row each. It is an nn.Embedding with sparse gradients, of one pass over memory.

    Args:
        name: Its name, for messages.
        table: Its settings.
    """

    def __init__(self, name: str, table: Table) -> None:
        super().__init__(table.rows, table.dim, padding_idx=table.padding_idx, sparse=True, _weight=_unwritten(table))
        self.reset_parameters()
        self.name, self.table = name, table

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """Return the rows of ids of any shape, [*input.shape, dim].

        Raises:
            TypeError: The ids are not int32 or int64.
            IndexError: An id is out of range.
        """
        check_ids(self.name, input, rows=self.num_embeddings)
        return look_up(self.weight, input, padding=self.padding_idx)


class BagTable(nn.EmbeddingBag):
    """A table whose ids come in bags. It is an nn.EmbeddingBag with sparse gradients.

    Args:
        name: Its name, for messages.
        table: Its settings.
    """

    def __init__(self, name: str, table: Table) -> None:
        assert table.pooling is not None
        super().__init__(
            table.rows,
            table.dim,
            mode=table.pooling,
            padding_idx=table.padding_idx,
            include_last_offset=table.include_last_offset,
            sparse=True,
            _weight=_unwritten(table),
        )
        self.reset_parameters()
        self.name, self.table = name, table

    def forward(
        self,
        input: Tensor,  # noqa: A002  torch's name
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Return the sum or mean of each bag, [bags, dim].

        Args:
            input: Ids, [bags, width], or [n] with offsets.
            offsets: Where each bag begins in ids of one dimension, ascending from 0.
            per_sample_weights: A factor for each id, of the shape of `input`; for sums only.

        Raises:
            TypeError: Ids or offsets are not int32 or int64.
            IndexError: An id is out of range.
            ValueError: Shapes do not fit each other, or offsets do not ascend.
        """
        bags = self._bags(input, offsets)
        mode = cast(Literal["sum", "mean"], self.mode)
        scale = per_sample_weights
        if scale is not None:
            if mode != "sum":
                raise ValueError(f'table {self.name!r} takes per_sample_weights with pooling="sum" only')
            if scale.shape != input.shape:
                raise ValueError(
                    f"table {self.name!r}: per_sample_weights have the shape {list(scale.shape)}, and the ids "
                    f"{list(input.shape)}"
                )
            scale = scale.reshape(-1).to(self.weight.dtype)
        return pool(self.weight, bags, scale, mode=mode, padding=self.padding_idx)

    def _bags(self, ids: Tensor, offsets: Tensor | None) -> Bags:
        rows = self.num_embeddings
        if not isinstance(ids, Tensor) or ids.dim() == 2:
            check_ids(self.name, ids, rows=rows)
            if offsets is not None:
                raise ValueError(f"table {self.name!r}: ids of two dimensions are bags already; leave offsets out")
            bags, width = ids.shape
            begins = torch.arange(0, bags * width, width, device=ids.device, dtype=ids.dtype) if width else None
            return Bags(ids.reshape(-1), ids.new_zeros(bags) if begins is None else begins, width)
        if ids.dim() != 1 or offsets is None:
            raise ValueError(
                f"table {self.name!r}: ids of shape {list(ids.shape)}: give [bags, width], or one dimension and offsets"
            )
        begins = check_offsets(self.name, offsets, ids=len(ids), includes_last=self.include_last_offset)
        check_ids(self.name, ids, rows=rows, begins=begins)
        return Bags(ids, begins.to(ids.dtype), None)


class Tables(Mapping[str, nn.Module]):
    """Tables by name. Each is a module: put it into a model, and give the model to a Trainer or use it in a loop.

    A Trainer updates tables in the same step as the rest of the model. In a loop of your own, call `step` and
    `zero_grad` beside those of your optimizer, which gets `dense_parameters(model)`.

    Rows begin as those of nn.Embedding do, from torch's generator.

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
        _check_memory(tables)
        self._modules: dict[str, RowTable | BagTable] = {
            name: RowTable(name, table) if table.pooling is None else BagTable(name, table)
            for name, table in tables.items()
        }

    def __getitem__(self, name: str) -> nn.Module:
        """Return the module of a table."""
        return self._modules[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._modules)

    def __len__(self) -> int:
        """Return the number of tables."""
        return len(self._modules)

    @cached_property
    def optimizer(self) -> TableOptimizer:
        """The optimizer of all tables, for loops of your own, schedulers and checkpoints."""
        return TableOptimizer([(module.weight, module.table.optimizer) for module in self._modules.values()])

    def step(self) -> None:
        """Update the rows that have a gradient."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for module in self._modules.values():
            module.weight.grad = None


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
    of_tables = tables_in([model])
    return [p for p in model.parameters() if id(p) not in of_tables]


def _unwritten(table: Table) -> Tensor:
    weight = torch.empty(table.rows, table.dim, dtype=table.dtype)
    advise_huge_pages(weight)
    return weight


def _check_memory(tables: Mapping[str, Table]) -> None:
    wanted = sum(table.nbytes + table.state_nbytes for table in tables.values())
    available = available_bytes()
    if available is None or wanted <= available:
        return
    name, largest = max(tables.items(), key=lambda item: item[1].nbytes + item[1].state_nbytes)
    rule = largest.optimizer
    remedy = "RowwiseAdagrad, which keeps one number for each row" if rule.per_element else "a machine with more memory"
    raise MemoryError(
        f"the tables take {wanted / 1e9:.3g} GB, and {available / 1e9:.3g} GB of memory are available. Table {name!r}, "
        f"{largest.rows} rows × {largest.dim}, takes {largest.nbytes / 1e9:.3g} GB, and "
        f"{largest.state_nbytes / 1e9:.3g} GB for the state of {type(rule).__name__}. Take fewer rows, a smaller dim, "
        f"or {remedy}."
    )
