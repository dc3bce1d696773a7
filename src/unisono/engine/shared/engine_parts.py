"""What the engine works with in the steps of one set of parameters: who updates what, and in what memory.

It is made in the first step, and again when the parameters or their addresses have changed. Start reading at
`make_parts`; `work_division` divides parameters with dense gradients, `table_division` the rows of tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from unisono.embedding.serving import Serving
from unisono.engine.base import Trained
from unisono.engine.joint_optimizer import parts_of, trained_by
from unisono.engine.shared.optimizer_update import OptimizerUpdate
from unisono.engine.shared.parameter_arena import SharedParameters
from unisono.engine.shared.sharded_optimizer import is_elementwise
from unisono.engine.shared.shared_all_gather_v import SharedAllGatherV
from unisono.engine.shared.shared_runtime import SharedRuntime
from unisono.engine.shared.step_metadata import StepMetadata
from unisono.engine.shared.table_division import TableDivision
from unisono.engine.shared.table_servers import TableServers
from unisono.engine.shared.update_protection import UpdateProtection
from unisono.engine.shared.work_division import WorkDivision, divide_work
from unisono.engine.sparse_tables import TableSums, maps_of
from unisono.engine.step_transaction import StepTransaction
from unisono.engine.trainable import sharing_obstacle
from unisono.engine.tree_all_reduce import NodeLayout

__all__ = ["EngineParts", "check_movable", "make_parts"]

_LENGTH = 5
"""A column of the runtime's words, between those of `shared_engine` and `shared_gradients`."""


class EngineParts(NamedTuple):
    """The objects of this rank for the steps of one set of parameters."""

    is_whole: bool
    """True if an optimizer needs whole parameters."""
    work: WorkDivision
    """The pieces of parameters with dense gradients, and their memory."""
    tables: TableSums
    """The sums of tables with sparse gradients."""
    division: TableDivision
    """The rows of tables that this rank updates."""
    metadata: StepMetadata
    updates: list[OptimizerUpdate]
    """For each optimizer, its update of the pieces and rows."""
    servers: TableServers | None
    """None if ranks update all tables themselves."""
    protection: UpdateProtection | None
    """None if an update that a rank's death has interrupted is not to be undone."""


def make_parts(
    runtime: SharedRuntime,
    weights: SharedParameters,
    optimizer: Optimizer,
    *,
    dense: Trained,
    tables: Trained,
    serving: Serving | None,
    widest: NodeLayout,
    protects: bool,
) -> EngineParts:
    """Divide the work of steps among ranks, and allocate its memory. Every rank must call it.

    Args:
        runtime: Allocates shared memory.
        weights: Has the parameters, which are in shared memory already.
        optimizer: The optimizer, or a joint one.
        dense: The parameters with dense gradients.
        tables: The others.
        serving: How servers update tables; None if ranks do.
        widest: The layout with all virtual ranks.
        protects: True if the survivors of a rank's death are to be able to undo an update.
    """
    parameters, maps = dense.parameters, maps_of(optimizer, tables)
    division = TableDivision(optimizer, tables, rank=runtime.rank, size=runtime.size, first=len(parameters), maps=maps)
    all_gather = SharedAllGatherV(runtime, word=_LENGTH)
    sums = TableSums(tables, rank=runtime.rank, all_gather=all_gather, divided=division.divided, maps=maps)
    is_whole = not all(is_elementwise(part) for part in parts_of(optimizer) if trained_by(part, dense).names)
    work = divide_work(
        runtime,
        weights,
        parameters,
        is_whole=is_whole,
        keeps_gradients=protects and division.is_undoable,
        widest=widest,
    )
    if work.is_large and not runtime.awaits_release:
        runtime.awaits_release = True
        runtime.release_gradients()
    metadata = StepMetadata(runtime, widest, [p.numel() for p in parameters])
    every = Trained((*dense.names, *tables.names), (*parameters, *tables.parameters))
    pieces = [*work.parts[runtime.rank], *division.pieces]
    places = [*work.places, *division.places]
    updates = [
        OptimizerUpdate.make(runtime, part, every, pieces, places, guests=division.guests)
        for part in parts_of(optimizer)
    ]
    has_files = [update.share_files() for update in updates]
    if any(has_files):
        runtime.barrier("sharing the state of tables in files", StepTransaction())
        for update in updates:
            update.state.keep()
    servers = protection = None
    if protects:
        protection = UpdateProtection(
            runtime,
            work.parts,
            updates,
            work.row_sets,
            parameters=parameters,
            vectors=[weights.vector(p) for p in parameters],
            tables=sums.tables.parameters,
            keeps_copies=division.is_undoable,
            is_whole=is_whole,
        )
    # Last: tables know their servers from now on, and nobody would close these if a rank died in what follows.
    if serving is not None:
        servers = TableServers(
            runtime,
            serving,
            tables,
            division=division,
            updates=updates,
            first=len(parameters),
            files=[*weights.files],
        )
    return EngineParts(is_whole, work, sums, division, metadata, updates, servers, protection)


def check_movable(runtime: SharedRuntime, trained: Trained, modules: Sequence[nn.Module]) -> None:
    """Raise ValueError on all ranks if parameters, such as ones added to the model later, cannot be shared."""
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    found = runtime.world.gather(sharing_obstacle(trained, tensors))
    rank, obstacle = next(((rank, what) for rank, what in enumerate(found) if what), (0, None))
    if obstacle is not None:
        raise ValueError(
            f"ranks cannot share the weights any more: rank {rank}: {obstacle}. It was not so when the Trainer was "
            'made. Give Trainer engine="collective", or give the parameter memory of its own: p.data = '
            "p.data.contiguous().clone()."
        )
