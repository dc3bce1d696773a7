"""The division of tables over ranks that share no memory, when a Trainer is made. Start reading at `divide_tables`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from unisono.collectives.world import World
from unisono.embedding.tables import tables_in
from unisono.engine import EngineFactory
from unisono.engine.divided_rows import check_equal_rows, divide_rows
from unisono.engine.row_exchange import RowExchange
from unisono.job.ranks import node_rank
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
    if found[0].keeps_twice and world.device.type != "cpu":
        raise ValueError(
            f"table {name!r} has copies=2, for ranks that are replaced alone, and with gradients over nccl rows go "
            'through a group of their own, which takes no new rank: leave copies=2 out, or call unisono.init("gloo")'
        )
    if len({module.keeps_twice for module in found}) > 1:
        raise ValueError("some divided tables of the Trainer have copies=2, and others have not: give all the same")
    if settings.drill is not None:
        raise ValueError(
            f"table {name!r} is divided over ranks (divided=True), and `unisono drill` looks at the whole state on "
            "single ranks: leave divided=True out"
        )
    if settings.digest_every is not None and found[0].keeps_twice:
        raise ValueError(
            f"digest_every={settings.digest_every} reads the rows of all ranks between two steps, and those of table "
            f"{name!r} are on two ranks (copies=2), of which one may be replaced meanwhile: leave one of the two out"
        )
    world = world.on_cpu()
    if position is None:
        check_equal_rows(world, found, before="Trainer")
        shift = _shift(world) if found[0].keeps_twice else 0
    else:
        shift = position.shift
    tables = divide_rows(world, found, optimizers.values(), shift=shift)
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
