"""Embedding tables in a loop of your own: one copy for all ranks of a host, which servers or the ranks update."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from unisono.collectives.world import World
from unisono.embedding.tables import Tables
from unisono.engine import files_of, select_engines, share_files
from unisono.engine.base import Preparation, Trained
from unisono.engine.consistency import StepDescription
from unisono.engine.description import check_equal_documents, describe_row_updates
from unisono.engine.step_transaction import StepTransaction
from unisono.text import a_type

__all__ = ["SharedTables", "share_tables"]


def share_tables(tables: Tables) -> SharedTables:
    """Let the ranks of a host have one copy of tables, in a loop of your own. Every rank must call it.

    Their rows become those of rank 0. Then call `step` of the result after each backward, in place of `tables.step`.
    Give DistributedDataParallel or `replicate` the dense part of the model alone: `step` takes the mean over ranks.

    Args:
        tables: All tables that are to be shared, on the CPU. Servers update them if the job has some
            (`unisono run --servers`); otherwise ranks divide the work.

    Raises:
        TypeError: It is no `Tables`.
        ValueError: The ranks cannot share memory, as on several hosts.
        RankMismatchError: The ranks have other tables, or update rows in another way.
        PeerError: Another rank does not come.
    """
    if not isinstance(tables, Tables):
        raise TypeError(f"tables is {a_type(tables)}; give the object that unisono.embedding.Tables(...) has made")
    return SharedTables(tables)


class SharedTables:
    """Tables that the ranks of a host share; `share_tables` makes it."""

    def __init__(self, tables: Tables) -> None:
        self._world = world = World.connect(torch.device("cpu"))
        named = {name: p for name, p in tables.named_parameters() if p.requires_grad}
        self._trained = Trained(tuple(named), tuple(named.values()))
        optimizer = tables.optimizer
        document = {"the names of the tables": [*self._trained.names], **describe_row_updates({"": tables})}
        check_equal_documents(world, document, given_to="share_tables")
        share_files(world, [tables], [optimizer])
        files = files_of([tables]).values()
        factory = select_engines(
            "shared", world, [tables], [optimizer], virtual_ranks=world.size, overlap=False, protect=False
        )
        if world.group is not None:
            for tensor in tables.state_dict(keep_vars=False).values():
                if any(file.has(tensor) for file in files):
                    continue
                dist.broadcast(tensor, 0, group=world.group)
        self._comparison, self._engine = factory.comparison, factory.engine(optimizer)
        self._transaction = StepTransaction()
        number = int.from_bytes(hashlib.sha256(repr(self._trained.names).encode()).digest()[:7], "big") << 1
        self._intent = StepDescription(number, lambda: {"the tables": ", ".join(self._trained.names)})
        self._comparison.intend(self._intent)

    def step(self) -> None:
        """Update the rows by the mean of all ranks' gradients, which are None afterwards. Every rank must call it.

        A rank may have no gradient for a table. Traffic: the rows of the step, in shared memory.

        Raises:
            LossError: A gradient is dense: something else than its module has used the weight of a table.
            TableFullError: On all ranks, a dynamic table has no row for a new id. No table has been changed.
            PeerError: Another rank has died or does not come. The tables are then of no use.
        """
        engine, step, rank = self._engine, self._transaction, self._world.rank
        gradients = [p.grad for p in self._trained.parameters]
        self._comparison.intend(self._intent)
        engine.start(step, self._trained, leaves=self._world.size)
        try:
            for p, gradient in zip(self._trained.parameters, gradients, strict=True):
                p.grad = gradient
            engine.close_forward(rank, torch.zeros(()), 1.0, new_buffers=False)
            engine.close_leaf(rank)
            engine.flush()
            engine.finish()
            engine.prepare(Preparation(1 / self._world.size, None, None, None))
        except BaseException:
            engine.abort(alike=True)
            raise
        engine.update(None)
        for p in self._trained.parameters:
            p.grad = None
        step.close()
