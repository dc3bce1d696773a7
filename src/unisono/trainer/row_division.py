"""The division of tables over ranks that share no memory, when a Trainer is made. Start reading at `divide_tables`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.collectives.world import World
from unisono.embedding.lazy_rows import LazyRows
from unisono.embedding.located_rows import LocatedRows
from unisono.embedding.row_map import RowMap
from unisono.embedding.row_owners import RowOwners
from unisono.embedding.table_modules import BagTable, RowTable
from unisono.embedding.table_optimizer import TableOptimizer
from unisono.embedding.tables import tables_in
from unisono.embedding.zero_memory import zero_memory
from unisono.engine import EngineFactory
from unisono.engine.row_exchange import DividedTable, RowExchange
from unisono.errors import RankMismatchError
from unisono.job.ranks import node_rank
from unisono.state.digest import digest
from unisono.trainer.divided_tables import DividedTables
from unisono.trainer.rank_positions import Position
from unisono.trainer.settings import TrainerSettings

__all__ = ["ROWS_LOST", "divide_tables", "has_divided"]

ROWS_LOST = (
    "rows of an embedding table that is divided over ranks die with the rank that has them, unless the table was "
    "made with copies=2"
)


def has_divided(modules: Mapping[str, nn.Module]) -> bool:
    """Return True if models have tables whose rows are divided where ranks share no memory."""
    return any(module.is_divided for module in tables_in(modules.values()).values())


def divide_tables(
    world: World,
    modules: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    engines: EngineFactory,
    settings: TrainerSettings,
    *,
    position: Position | None,
) -> DividedTables | None:
    """Divide the tables that were made with divided=True over ranks that share no memory. Every rank must call it.

    A rank that takes the place of another one does what the others have done, without them.

    Args:
        world: The ranks.
        modules: The models by the prefix of their names.
        optimizers: The optimizers by name.
        engines: Tells whether ranks share the weights.
        settings: The arguments of the Trainer.
        position: Where the other ranks are, on a new rank.

    Returns:
        None if nothing is divided: there is no such table, or one rank, or ranks have one copy anyhow.

    Raises:
        ValueError: Tables cannot be divided with these settings.
        RankMismatchError: On all ranks, if rows that were written before differ between ranks.
    """
    found = [module for module in tables_in(modules.values()).values() if module.is_divided]
    if not found or (world.group is None or engines.shares if position is None else not position.divides):
        return None
    name = found[0].name
    if any(module.weight.device.type != "cpu" for module in found) or world.device.type != "cpu":
        raise ValueError(
            f"table {name!r} has divided=True, and ranks keep their rows in memory of the CPU: give Trainer "
            f'device="cpu", or leave divided=True out'
        )
    if len({module.keeps_twice for module in found}) > 1:
        raise ValueError("some divided tables of the Trainer have copies=2, and others have not: give all the same")
    for what, given in (("digest_every=", settings.digest_every), ("`unisono drill`", settings.drill)):
        if given is not None:
            raise ValueError(
                f"table {name!r} is divided over ranks (divided=True), and {what} looks at the whole state on single "
                "ranks: leave one of the two out"
            )
    if position is None:
        _check_equal(world, found)
        shift = _shift(world) if found[0].keeps_twice else 0
    else:
        shift = position.shift
    tables = [_divided(world, module, optimizers, shift) for module in found]
    exchange = RowExchange(world, tables)
    if position is None:
        exchange.connect()
    return DividedTables(world, modules, optimizers, exchange)


def _shift(world: World) -> int:
    """Return how much greater the number of the rank that keeps a row, too, is, so that few pairs are on one host."""
    hosts, size = [host for (host,) in world.gather_numbers([node_rank()])], world.size

    def together(shift: int) -> int:
        return sum(hosts[rank] == hosts[(rank + shift) % size] for rank in range(size))

    return min(range(1, size), key=together)


def _check_equal(world: World, modules: list[RowTable | BagTable]) -> None:
    """Compare the rows that were written before they are divided: all ranks have all of these."""
    own = []
    for module in modules:
        assert module.rows is not None
        which = _present(module.rows, len(module.weight))
        found = {"which": which, "rows": module.weight.detach()[which]}
        if isinstance(module.rows, RowMap):
            found["ids"] = module.rows.ids.detach()[which]
        own.append((module.name, digest(found)))
    for rank, theirs in enumerate(world.gather(own, "Trainer dividing tables")):
        differing = [name for (name, mine), (_, other) in zip(own, theirs, strict=True) if mine != other]
        if differing:
            raise RankMismatchError(
                f"the rows of table {differing[0]!r} that were written before the Trainer are not the same on rank "
                f"{rank} and on rank {world.rank}: write or load the same on every rank"
            )


@torch.no_grad()
def _divided(
    world: World, module: RowTable | BagTable, optimizers: Mapping[str, Optimizer], shift: int
) -> DividedTable:
    """Leave to this rank the rows of a table that it keeps, and of the state of its optimizer."""
    weight, rows = module.weight, module.rows
    assert rows is not None
    row_nbytes = weight.shape[1] * weight.element_size()
    there = _present(rows, len(weight))
    owners = rows.owners = RowOwners(len(weight), row_nbytes, rank=world.rank, ranks=world.size, shift=shift)
    kept = there[owners.keep(there)]

    def part(tensor: Tensor) -> Tensor:
        made = zero_memory(tensor.shape, tensor.dtype, small_pages=True)
        return made.index_copy_(0, kept, tensor.detach()[kept])

    weight.data = part(weight)
    if isinstance(rows, LazyRows):
        rows.written.zero_()
        rows.written[kept] = 1
    for optimizer in optimizers.values():
        if isinstance(optimizer, TableOptimizer) and (state := optimizer.state.get(weight)):
            state.update({k: part(v) for k, v in state.items() if isinstance(v, Tensor) and len(v) == len(weight)})
    padding = module.padding_idx if isinstance(module, RowTable) else None
    return DividedTable(module.name, weight, rows, owners, padding)


def _present(rows: LocatedRows, length: int) -> Tensor:
    """Return the rows of a table that have values, before they are divided."""
    return rows.present(0, length).nonzero().view(-1)
