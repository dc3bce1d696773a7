"""Tables in files (`embedding.table_file`): all ranks of a host map the file of one of them.

At the start that is the file of rank 0. Later it is the one that ranks share already, so a rank that takes the place of
a killed one maps what the others have, and no row is sent. Files have no names: a rank opens another one's descriptor,
`/proc/PID/fd/N`, as servers do.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.collectives.world import World
from unisono.embedding.table_file import TableFile
from unisono.embedding.table_modules import BagTable, RowTable
from unisono.embedding.table_optimizer import TableOptimizer
from unisono.embedding.tables import tables_in
from unisono.engine.joint_optimizer import parts_of
from unisono.errors import UnisonoError
from unisono.machine import host_id

__all__ = ["files_of", "share_files"]


class _Offer(NamedTuple):
    """The file of a table on one rank."""

    fd: int
    inode: int
    is_shared: bool


def files_of(modules: Iterable[nn.Module]) -> dict[int, TableFile]:
    """Return the files of the tables in modules, by the `id` of the weight."""
    return {key: module.file for key, module in tables_in(modules).items() if module.file is not None}


def share_files(
    world: World, modules: Iterable[nn.Module], optimizers: Iterable[Optimizer], *, divided: bool = False
) -> None:
    """Let all ranks have one file for each table that is in one. Every rank must call it. Nothing is copied.

    It also makes sure that the disk has room for them.

    Args:
        world: The ranks.
        modules: The models.
        optimizers: The optimizers, whose state may be in the files.
        divided: True if rows of tables with divided=True are about to be divided over ranks, as those on several hosts
            are. Each rank then keeps its own file of them.

    Raises:
        ValueError: On all ranks, if they are on several hosts, and a table cannot be divided.
        UnisonoError: On all ranks, if one of them cannot open or map a file, or the disk has no room.
    """
    tables = [
        module
        for module in tables_in(modules).values()
        if module.file is not None and not module.file.is_divided and not (divided and module.is_divided)
    ]
    if not tables or world.group is None:
        return
    files = [module.file for module in tables if module.file is not None]
    own = [_Offer(file.segment.fd, file.inode, file.is_shared) for file in files]
    everyone = world.gather((host_id(), os.getpid(), own), "sharing the files of tables")
    if len({host for host, *_ in everyone}) > 1:
        if all(module.is_divided for module in tables):
            return
        raise ValueError(
            f"table {tables[0].name!r} has directory=, and the {world.size} ranks are on several hosts: they share the "
            "file of one host alone. Start ranks on one host, leave directory= out, or make the tables with "
            "divided=True, with which each rank has a part of the rows in a file of its own."
        )
    states = {p: part.state[p] for each in optimizers for part in parts_of(each) for p in _of_files(part)}
    failure = None
    try:
        for k, module in enumerate(tables):
            offers = [offers[k] for *_, offers in everyone]
            source = next((rank for rank, offer in enumerate(offers) if offer.is_shared), 0)
            _take(module, everyone[source][1], offers[source], states.get(module.weight, {}))
            if source == world.rank:
                files[k].reserve()
    except (OSError, UnisonoError) as error:
        failure = f"rank {world.rank}: {error}"
    # Until all have come here, ranks keep what they have offered.
    failures = [each for each in world.gather(failure, "sharing the files of tables") if each is not None]
    if failures:
        raise UnisonoError(f"ranks cannot share the files of tables: {failures[0]}")
    for file in files:
        file.is_shared = True


def _of_files(optimizer: Optimizer) -> list[Tensor]:
    return [p for p in optimizer.files if optimizer.state.get(p)] if isinstance(optimizer, TableOptimizer) else []


def _take(module: RowTable | BagTable, pid: int, offer: _Offer, state: dict[str, object]) -> None:
    """Let a table and its state have the file of another process."""
    file = module.file
    assert file is not None
    if offer.inode == file.inode:
        return
    fd = os.open(f"/proc/{pid}/fd/{offer.fd}", os.O_RDWR | os.O_CLOEXEC)
    if os.fstat(fd).st_ino != offer.inode:
        os.close(fd)
        raise UnisonoError(f"the process {pid} has no such file any more")
    moved = [key for key, value in state.items() if file.has(value)]
    file.take(fd)
    module.weight.data = file.weight
    state.update({key: file.state[key] for key in moved})
