"""The division of the rows of tables over ranks that share no memory: each keeps its own, in tensors of full shape.

What is never written to takes no memory. So names, shapes and numbers of rows are those of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.collectives.world import World
from unisono.embedding.lazy_rows import LazyRows
from unisono.embedding.located_rows import LocatedRows
from unisono.embedding.row_map import RowMap
from unisono.embedding.row_owners import RowOwners
from unisono.embedding.table_modules import BagTable, RowTable
from unisono.embedding.table_optimizer import TableOptimizer
from unisono.embedding.zero_memory import zero_memory
from unisono.engine.row_requests import DividedTable
from unisono.errors import RankMismatchError, UnisonoError
from unisono.state.digest import digest

__all__ = ["check_equal_rows", "divide_rows"]


def check_equal_rows(world: World, modules: Sequence[RowTable | BagTable], *, before: str) -> None:
    """Compare the rows of tables that were written before they are divided: all ranks have all of these.

    Every rank must call it.

    Args:
        world: The ranks.
        modules: The tables.
        before: What divides them, for messages.

    Raises:
        RankMismatchError: On all ranks, if they differ.
        UnisonoError: A table is divided already.
    """
    own = []
    for module in modules:
        assert module.rows is not None
        if module.rows.owners is not None:
            raise UnisonoError(
                f"table {module.name!r} is divided over ranks already, by a Trainer or by share_tables, whose part of "
                "the rows each rank has: make another one"
            )
        which = _present(module.rows, len(module.weight))
        found = {"which": which, "rows": module.weight.detach()[which]}
        if isinstance(module.rows, RowMap):
            found["ids"] = module.rows.ids.detach()[which]
        own.append((module.name, digest(found)))
    for rank, theirs in enumerate(world.gather(own, f"{before} dividing tables")):
        differing = [name for (name, mine), (_, other) in zip(own, theirs, strict=True) if mine != other]
        if differing:
            raise RankMismatchError(
                f"the rows of table {differing[0]!r} that were written before {before} are not the same on rank "
                f"{rank} and on rank {world.rank}: write or load the same on every rank"
            )


@torch.no_grad()
def divide_rows(
    world: World, modules: Iterable[RowTable | BagTable], optimizers: Iterable[Optimizer], *, shift: int = 0
) -> list[DividedTable]:
    """Leave to this rank the rows of tables that it keeps, and those of the state of their optimizers.

    Every rank must call it, or alone one that takes the place of another.

    Args:
        world: The ranks.
        modules: The tables.
        optimizers: The optimizers, some of which may have them.
        shift: See `RowOwners`.

    Raises:
        UnisonoError: On all ranks, if a disk has no room for the files of a rank.
    """
    optimizers, parts = [*optimizers], []
    for module in modules:
        weight, rows = module.weight, module.rows
        assert rows is not None
        there = _present(rows, len(weight))
        row_nbytes, in_file = weight.shape[1] * weight.element_size(), module.file is not None
        rows.owners = RowOwners(
            len(weight), row_nbytes, rank=world.rank, ranks=world.size, shift=shift, in_file=in_file
        )
        parts.append((module, rows, rows.owners, there[rows.owners.keep(there)]))
    _divide_files(world, parts)
    tables = []
    for module, rows, owners, kept in parts:
        weight, file = module.weight, module.file
        weight.data = _part(weight, kept, None if file is None else file.weight)
        if isinstance(rows, LazyRows):
            rows.written.zero_()
            rows.written[kept] = 1
        for optimizer in optimizers:
            if isinstance(optimizer, TableOptimizer) and (state := optimizer.state.get(weight)):
                places = {} if file is None else file.reserved_state()
                rowed = {k: v for k, v in state.items() if isinstance(v, Tensor) and len(v) == len(weight)}
                state.update({key: _part(value, kept, places.get(key)) for key, value in rowed.items()})
        padding = module.padding_idx if isinstance(module, RowTable) else None
        tables.append(DividedTable(module.name, weight, rows, owners, padding, file))
    return tables


def _divide_files(world: World, parts: Sequence[tuple[RowTable | BagTable, LocatedRows, RowOwners, Tensor]]) -> None:
    """Let this rank have files of its own, for its part of tables, and make sure that disks have room for them."""
    failure = None
    try:
        for module, _, owners, _ in parts:
            if module.file is not None:
                module.file.divide(owners.kept_ranges())
                module.file.reserve()
    except UnisonoError as error:
        failure = f"rank {world.rank}: {error}"
    failures = [each for each in world.gather(failure, "dividing the files of tables") if each is not None]
    if failures:
        raise UnisonoError(failures[0])


def _part(tensor: Tensor, kept: Tensor, place: Tensor | None) -> Tensor:
    """Return memory for a tensor in which some rows have their values: `place`, if there is one, and all are zeros."""
    made = zero_memory(tensor.shape, tensor.dtype, small_pages=True) if place is None else place
    return made.index_copy_(0, kept, tensor.detach()[kept])


def _present(rows: LocatedRows, length: int) -> Tensor:
    """Return the rows of a table that have values, before they are divided."""
    return rows.present(0, length).nonzero().view(-1)
