"""The settings of a table, and the memory that tables take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from unisono.arguments import choice, real, whole
from unisono.embedding.row_map import map_nbytes
from unisono.embedding.row_optimizers import RowOptimizer
from unisono.embedding.row_policy import RowPolicy
from unisono.machine import available_bytes
from unisono.text import a_type

__all__ = ["Table", "check_memory"]

_INT64 = -(2**63), 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Table:
    """The settings of a table.

    Raises:
        TypeError, ValueError: A setting is of the wrong type or out of its range.
    """

    dim: int
    """The length of a row."""
    optimizer: RowOptimizer
    """How its rows are updated."""
    rows: int | None = None
    """The number of rows; ids are 0 to rows - 1. None: the table is dynamic, and `capacity` is given."""
    capacity: int | None = None
    """The number of rows of a dynamic table, whose ids are any integers of 64 bits. An id gets a row in the first step
    that has a gradient for it."""
    pooling: Literal["sum", "mean"] | None = None
    """How the rows of a bag are put together, as by nn.EmbeddingBag; None: each id gives a row, as by nn.Embedding."""
    padding_idx: int | None = None
    """An id that adds nothing to a bag, and whose row is never updated; without pooling, its row begins as zeros."""
    include_last_offset: bool = False
    """True if the offsets of bags end with the number of ids."""
    init_std: float = 1.0
    """The standard deviation of the first values of a dynamic table's rows."""
    admit_after: int = 1
    """An id of a dynamic table gets a row in the step of this number that has a gradient for it."""
    waiting_capacity: int | None = None
    """The number of ids that can wait for that; None: as many as `capacity`, and at least 65536."""
    evict_after: int | None = None
    """A row of a dynamic table is given up after so many steps without a gradient for its id; None: it is kept."""
    when_full: Literal["raise", "grow", "evict_oldest", "evict_rarest"] = "raise"
    """The behaviour of a dynamic table without rows for new ids: refuse the step, double its capacity, or give up rows
    of the ids that were seen longest ago, or in the fewest steps."""
    dtype: torch.dtype = torch.float32
    """The type of the elements: float32 or float64."""

    def __post_init__(self) -> None:
        """Check the settings."""
        if (self.rows is None) == (self.capacity is None):
            given = "neither" if self.rows is None else f"rows={self.rows} and capacity={self.capacity}"
            raise ValueError(
                f"a table has rows=, for ids from 0 to rows - 1, or capacity=, for ids of any value; given is {given}"
            )
        if self.rows is not None:
            whole("rows", self.rows, least=1)
            if self.init_std != 1.0:
                raise ValueError(
                    f"init_std={self.init_std} is for tables with capacity=: with rows=, write to the rows before "
                    "training, as nn.init.normal_ does"
                )
            if self.policy != RowPolicy():
                raise ValueError(
                    "admit_after, waiting_capacity, evict_after and when_full are for tables with capacity=: one with "
                    "rows= has a row for each id from the start"
                )
        elif whole("capacity", self.capacity, least=1) >= 2**31:
            raise ValueError(f"capacity={self.capacity}: a dynamic table has at most {2**31 - 1} rows")
        if not 0 <= real("init_std", self.init_std) < float("inf"):
            raise ValueError(f"init_std={self.init_std!r}: give a finite number of 0 or more")
        whole("dim", self.dim, least=1)
        choice("pooling", self.pooling, ("sum", "mean", None))
        if not isinstance(self.optimizer, RowOptimizer):
            raise TypeError(
                f"optimizer is {a_type(self.optimizer)}; give one of unisono.embedding, such as RowwiseAdagrad(lr=0.05)"
            )
        if self.padding_idx is not None:
            least, most = _INT64 if self.rows is None else (0, self.rows - 1)
            if not least <= whole("padding_idx", self.padding_idx) <= most:
                raise ValueError(f"padding_idx={self.padding_idx} is no id of a table with ids {least} to {most}")
        if self.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype={self.dtype}: a table has torch.float32 or torch.float64")

    @property
    def policy(self) -> RowPolicy:
        """Which ids of a dynamic table get a row, and which rows it gives up."""
        return RowPolicy(
            admit_after=self.admit_after,
            waiting_capacity=self.waiting_capacity,
            evict_after=self.evict_after,
            when_full=self.when_full,
        )

    @property
    def length(self) -> int:
        """The number of rows that there is memory for."""
        length = self.capacity if self.rows is None else self.rows
        assert length is not None
        return length

    @property
    def nbytes(self) -> int:
        """The bytes of the rows, and of the ids of a dynamic table."""
        of_map = map_nbytes(self.policy, self.length) if self.rows is None else 0
        return self.length * self.dim * self.dtype.itemsize + of_map

    @property
    def state_nbytes(self) -> int:
        """The bytes of the optimizer's state, which is made in the first step."""
        rule = self.optimizer
        return self.length * (len(rule.per_row) + self.dim * len(rule.per_element)) * self.dtype.itemsize


def check_memory(tables: Mapping[str, Table]) -> None:
    """Raise MemoryError if tables and their state do not fit the memory that is available."""
    wanted = sum(table.nbytes + table.state_nbytes for table in tables.values())
    available = available_bytes()
    if available is None or wanted <= available:
        return
    name, largest = max(tables.items(), key=lambda item: item[1].nbytes + item[1].state_nbytes)
    rule = largest.optimizer
    remedy = "RowwiseAdagrad, which keeps one number for each row" if rule.per_element else "a machine with more memory"
    raise MemoryError(
        f"the tables take {wanted / 1e9:.3g} GB, and {available / 1e9:.3g} GB of memory are available. Table {name!r}, "
        f"{largest.length} rows × {largest.dim}, takes {largest.nbytes / 1e9:.3g} GB, and "
        f"{largest.state_nbytes / 1e9:.3g} GB for the state of {type(rule).__name__}. Take fewer rows, a smaller dim, "
        f"or {remedy}."
    )
