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
from unisono.engine.row_exchange import DividedTable
from unisono.errors import RankMismatchError, UnisonoError
from unisono.state.digest import digest

__all__ = ["check_equal_rows", "divide_rows", "reserve_files"]


def check_equal_rows(world: World, modules: Sequence[RowTable | BagTable], *, before: str) -> None:
    """Compare the rows of tables that were written before they are divided: all ranks have all of these.

    Every rank must call it.

    Args:
        world: The ranks.
        modules: The tables.
        before: What divides them, for messages.

    Raises:
        RankMismatchError: On all ranks, if they differ.
    """
    own = []
    for module in modules:
        assert module.rows is not None
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
    world: World, module: RowTable | BagTable, optimizers: Iterable[Optimizer], *, shift: int = 0
) -> DividedTable:
    """Leave to this rank the rows of a table that it keeps, and those of the state of its optimizer. Local.

    Args:
        world: The ranks.
        module: The table.
        optimizers: The optimizers, one of which may have it.
        shift: See `RowOwners`.
    """
    weight, rows, file = module.weight, module.rows, module.file
    assert rows is not None
    row_nbytes = weight.shape[1] * weight.element_size()
    there = _present(rows, len(weight))
    owners = rows.owners = RowOwners(
        len(weight), row_nbytes, rank=world.rank, ranks=world.size, shift=shift, in_file=file is not None
    )
    kept = there[owners.keep(there)]
    if file is not None:
        file.divide(owners.kept_ranges())

    def part(tensor: Tensor, in_file: Tensor | None) -> Tensor:
        made = zero_memory(tensor.shape, tensor.dtype, small_pages=True) if in_file is None else in_file
        return made.index_copy_(0, kept, tensor.detach()[kept])

    weight.data = part(weight, None if file is None else file.weight)
    if isinstance(rows, LazyRows):
        rows.written.zero_()
        rows.written[kept] = 1
    for optimizer in optimizers:
        if isinstance(optimizer, TableOptimizer) and (state := optimizer.state.get(weight)):
            in_file = {} if file is None else file.reserved_state()
            rowed = {k: v for k, v in state.items() if isinstance(v, Tensor) and len(v) == len(weight)}
            state.update({k: part(v, in_file.get(k)) for k, v in rowed.items()})
    padding = module.padding_idx if isinstance(module, RowTable) else None
    return DividedTable(module.name, weight, rows, owners, padding, file)


def reserve_files(world: World, tables: Iterable[DividedTable]) -> None:
    """Make sure that disks have room for the rows of this rank. Every rank must call it, or a new one alone.

    Raises:
        UnisonoError: On all ranks, if one has no room.
    """
    failure = None
    try:
        for table in tables:
            if table.file is not None:
                table.file.reserve()
    except UnisonoError as error:
        failure = f"rank {world.rank}: {error}"
    failures = [each for each in world.gather(failure, "reserving the files of tables") if each is not None]
    if failures:
        raise UnisonoError(failures[0])


def _present(rows: LocatedRows, length: int) -> Tensor:
    """Return the rows of a table that have values, before they are divided."""
    return rows.present(0, length).nonzero().view(-1)
