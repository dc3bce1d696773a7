"""The settings of a table, and the memory that tables take."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from unisono.arguments import choice, real, whole
from unisono.embedding.lazy_rows import LazyRows
from unisono.embedding.row_map import map_nbytes
from unisono.embedding.row_optimizers import RowOptimizer
from unisono.embedding.row_policy import RowPolicy
from unisono.embedding.table_file import check_directory, free_bytes
from unisono.errors import UnisonoError
from unisono.machine import available_bytes, file_system_of
from unisono.text import a_type

__all__ = ["Table", "check_divided", "check_room", "part_of_host"]

_INT64 = -(2**63), 2**63 - 1
_IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files are in memory."""


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
    init_std: float | None = None
    """The standard deviation of first values that follow from torch's seed and the id. A row is then written for the
    first time when it is first updated. None: 1.0 for a dynamic table; with `rows`, all are written at the start, with
    normal values from torch's generator, as nn.Embedding does."""
    directory: str | os.PathLike[str] | None = None
    """A folder on a disk of this machine: rows and the state of their optimizer are in a file there, which is mapped
    into memory and may be larger than it. The file has no name, and is gone when the program ends. None: they are in
    memory. With `rows`, give `init_std`, too."""
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
            if self.policy != RowPolicy():
                raise ValueError(
                    "admit_after, waiting_capacity, evict_after and when_full are for tables with capacity=: one with "
                    "rows= has a row for each id from the start"
                )
        elif whole("capacity", self.capacity, least=1) >= 2**31:
            raise ValueError(f"capacity={self.capacity}: a dynamic table has at most {2**31 - 1} rows")
        if self.init_std is not None and not 0 <= real("init_std", self.init_std) < float("inf"):
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
        if self.directory is not None:
            self._check_directory()

    def _check_directory(self) -> None:
        if not isinstance(self.directory, (str, os.PathLike)):
            raise TypeError(f"directory is {a_type(self.directory)}; give the path of a folder")
        if self.rows is not None and self.init_std is None:
            raise ValueError(
                "a table with rows= and directory= needs init_std=, such as init_std=0.01: then a row is written when "
                "it is first updated. Without it, all rows of the file would be written at the start."
            )
        if self.when_full == "grow":
            raise ValueError(
                'when_full="grow" is for tables in memory: give one with directory= the capacity that it may need, '
                "as rows that are free take room on the disk alone"
            )

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
    def is_lazy(self) -> bool:
        """True for a table with fixed rows that are written when they are first updated."""
        return self.rows is not None and self.init_std is not None

    @property
    def length(self) -> int:
        """The number of rows that there is memory for."""
        length = self.capacity if self.rows is None else self.rows
        assert length is not None
        return length

    @property
    def nbytes(self) -> int:
        """The bytes of the rows."""
        return self.length * self.dim * self.dtype.itemsize

    @property
    def state_nbytes(self) -> int:
        """The bytes of the optimizer's state, which is made in the first step."""
        rule = self.optimizer
        return self.length * (len(rule.per_row) + self.dim * len(rule.per_element)) * self.dtype.itemsize

    @property
    def beside_nbytes(self) -> int:
        """The bytes of memory beside them: of the ids of a dynamic table, and of what is known of each row."""
        if self.rows is None:
            return map_nbytes(self.policy, self.length)
        return self.length * LazyRows.NBYTES_PER_ROW if self.is_lazy else 0


def check_divided(tables: Mapping[str, Table]) -> None:
    """Raise ValueError if rows of tables cannot be divided over ranks."""
    for name, table in tables.items():
        why = None
        if table.when_full == "grow":
            why = 'it has when_full="grow": give it the capacity that it may need, as free rows take no memory'
        elif table.rows is not None and table.init_std is None:
            why = "it needs init_std=, such as init_std=0.01: without it, each rank would write all rows at the start"
        if why is not None:
            raise ValueError(f"divided=True is not possible for table {name!r}: {why}")


def part_of_host(environ: Mapping[str, str]) -> float:
    """Return the part of all ranks of a job that is on this host, as its launcher says.

    >>> part_of_host({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}), part_of_host({})
    (0.25, 1.0)
    """
    ranks, local = environ.get("WORLD_SIZE", ""), environ.get("LOCAL_WORLD_SIZE", "")
    if not (ranks.isdecimal() and local.isdecimal()) or not 0 < int(local) <= int(ranks):
        return 1.0
    return int(local) / int(ranks)


def check_room(tables: Mapping[str, Table], *, have_files: bool = False, part: float = 1.0) -> None:
    """Check that tables and their state fit the memory and the disks that they are to be in.

    Args:
        tables: The settings of each table, by name.
        have_files: True if other ranks have files of tables in a directory, with the space that they need.
        part: The part of rows and state that is on this host.

    Raises:
        ValueError: Files of tables cannot be in a directory.
        MemoryError: There is not enough memory.
        UnisonoError: There is not enough room on a disk.
    """
    of_disks: dict[int, list[str]] = {}
    in_memory: dict[str, int] = {}
    for name, table in tables.items():
        in_memory[name] = table.beside_nbytes
        if table.directory is not None:
            check_directory(directory := Path(table.directory))
            of_disks.setdefault(directory.stat().st_dev, []).append(name)
        if table.directory is None or (file_system_of(directory) in _IN_MEMORY and not have_files):
            in_memory[name] += int(part * (table.nbytes + table.state_nbytes))
    _check_memory(tables, in_memory, part)
    if have_files:
        return
    for names in of_disks.values():
        directory = Path(tables[names[0]].directory or "")
        wanted, free = sum(tables[name].nbytes + tables[name].state_nbytes for name in names), free_bytes(directory)
        wanted = int(part * wanted)
        if wanted > free:
            raise UnisonoError(
                f"the rows and the state of {' and '.join(map(repr, names))} take {wanted / 1e9:.3g} GB in "
                f"{directory}, where {free / 1e9:.3g} GB are free. Make room, or give a folder on another disk."
            )


def _check_memory(tables: Mapping[str, Table], in_memory: Mapping[str, int], part: float) -> None:
    wanted, available = sum(in_memory.values()), available_bytes()
    if available is None or wanted <= available:
        return
    name = max(in_memory, key=lambda each: in_memory[each])
    largest = tables[name]
    if largest.directory is not None:
        raise MemoryError(
            f"the tables take {wanted / 1e9:.3g} GB of memory, and {available / 1e9:.3g} GB are available. Table "
            f"{name!r} takes {in_memory[name] / 1e9:.3g} GB of it for what is known of each of its {largest.length} "
            "rows, beside its file. Take fewer rows, or a machine with more memory."
        )
    rule = largest.optimizer
    if part < 1:
        raise MemoryError(
            f"this host's part of the tables, {part:.3g} of rows and state, takes {wanted / 1e9:.3g} GB, and "
            f"{available / 1e9:.3g} GB of memory are available. Take more hosts, or fewer rows of table {name!r}, "
            f"which has {largest.length} × {largest.dim}."
        )
    remedy = "RowwiseAdagrad, which keeps one number for each row" if rule.per_element else "a machine with more memory"
    raise MemoryError(
        f"the tables take {wanted / 1e9:.3g} GB, and {available / 1e9:.3g} GB of memory are available. Table {name!r}, "
        f"{largest.length} rows × {largest.dim}, takes {(largest.nbytes + largest.beside_nbytes) / 1e9:.3g} GB, and "
        f"{largest.state_nbytes / 1e9:.3g} GB for the state of {type(rule).__name__}. Take fewer rows, a smaller dim, "
        f"{remedy}, or directory=, a folder for rows and state."
    )
