"""What a rank takes and gives back for units of which it has a part. Start reading at `DividedSteps`."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.engine.sharded.grid import ShardGrid
from unisono.estimate.memory_trace import GRADIENTS, HOST, PARAMETERS, Gradients, MemoryTrace, Update
from unisono.estimate.model_profile import ParameterSize
from unisono.estimate.rank_share import RankShare, fractions_of, nbytes_of, parts_of

__all__ = ["DividedSteps", "DividedUnit"]

_TRIMMED_NBYTES = 32 << 20
"""Parameters from which on free memory is given back before each step; see `engine.sharded.sharded_engine`."""


class DividedUnit:
    """A unit of a divided model; see `ShardedUnit`.

    Args:
        members: The numbers of its parameters.
        parameters: All parameters.
        grid: The rank's place.
    """

    def __init__(self, members: Sequence[int], parameters: Sequence[ParameterSize], grid: ShardGrid) -> None:
        self.members, self.grid = members, grid
        self.sizes = {i: parameters[i].nbytes for i in members}
        own = [parameters[i] for i in members]
        parts = parts_of(own, grid.ranks)
        self.part_nbytes = [sum(nbytes_of(own, piece) for piece in pieces) for pieces in parts]
        """The part that each rank updates."""
        self.pieces = [{members[i]: part for i, part in fractions_of(own, pieces).items()} for pieces in parts]
        """For each rank, the part of each parameter that it updates."""
        self.together: Gradients = {}
        """The memory of the parameters."""
        self.rows: list[int] = []
        """The gradients that are to be summed."""
        self.missing = 0

    @property
    def nbytes(self) -> int:
        """The size of the parameters."""
        return sum(self.sizes.values())

    def held_nbytes(self, rank: int) -> int:
        """Return what a rank keeps."""
        return sum(self.part_nbytes[holder] for holder in self.grid.holders(rank))


class DividedSteps:
    """The steps of a rank with a part of the state; see `ShardedEngine` and `UnitExchange`.

    Args:
        share: What the rank computes.
        units: The numbers of the parameters of each unit.
        replicas: How often all weights are kept.
        trace: Gets the operations. None: a new one.
        offloads: True if the rank's parts are in memory of the CPU, and models compute on a GPU.
        keeps: True if the GPU has all weights then, too.
        divides_sums: True if gradients are summed after each leaf, which are dealt in turn.
    """

    def __init__(
        self,
        share: RankShare,
        units: Sequence[Sequence[int]],
        replicas: int,
        trace: MemoryTrace | None = None,
        *,
        offloads: bool = False,
        keeps: bool = False,
        divides_sums: bool = False,
    ) -> None:
        weights_kind, sums_kind = (HOST, HOST) if offloads else (PARAMETERS, GRADIENTS)
        self.share, self.trace = share, MemoryTrace() if trace is None else trace
        parameters = share.record.parameters
        self.grid = ShardGrid(
            rank=share.rank, ranks=len(share.layout.nodes), replicas=replicas, stays_apart=offloads and not keeps
        )
        self.units = [DividedUnit(unit, parameters, self.grid) for unit in units if unit]
        self.unit_of = {i: unit for unit in self.units for i in unit.members}
        self.complete: list[DividedUnit] = []
        self._rows = [1 if divides_sums else len(nodes) for nodes in share.layout.nodes]
        """The rows that each rank sends at once."""
        self._sums: list[int] = []
        """This rank's part of the sums of leaves so far, but for the first, which has the memory of the whole sum."""
        trace = self.trace
        trace.map(share.buffers_nbytes, PARAMETERS)
        whole = [trace.map(parameters[i].nbytes, PARAMETERS) for i in self.unit_of]
        for unit in self.units:
            held = unit.part_nbytes[share.rank] if self.keeps_weights else unit.held_nbytes(share.rank)
            trace.take(_pinned(held) if offloads else held, weights_kind)
        if not self.keeps_weights:
            for block in whole:
                trace.give(block)
        trace.trim()
        for unit in self.units:
            own = unit.part_nbytes[share.rank]
            trace.take(_pinned(own) if offloads else own, sums_kind)
        parts = {i: part for unit in self.units for i, part in unit.pieces[share.rank].items()}
        self.update = Update(trace, share.record, parts, on_host=offloads)

    @property
    def keeps_weights(self) -> bool:
        """True if all weights are here at any time."""
        return self.grid.keeps_weights

    def begin(self) -> None:
        """Begin a step."""
        self.begin_leaf()
        if sum(unit.nbytes for unit in self.units) >= _TRIMMED_NBYTES:
            self.trace.trim()

    def begin_leaf(self) -> None:
        """Await all gradients."""
        self.complete = []
        for unit in self.units:
            unit.rows = []
            unit.missing = sum(self.share.record.parameters[i].gradient is not None for i in unit.members)

    def end_turn(self, number: int) -> None:
        """Sum the gradients of the leaves that all ranks have computed at once; see `DividedSumsEngine`."""
        self.sum_complete()
        self.begin_leaf()
        leaves = min((number + 1) * len(self._rows), self.share.layout.leaves)
        whole = leaves == self.share.layout.leaves
        count = 0 if whole else leaves.bit_count() - 1
        own = [unit.part_nbytes[self.share.rank] for unit in self.units]
        before, self._sums = self._sums, [self.trace.take(nbytes, GRADIENTS) for nbytes in own * count]
        for block in before:
            self.trace.give(block)

    def bring(self, unit: DividedUnit) -> None:
        """Bring a unit together, and sum the gradients of those that are complete."""
        rank, trace = self.share.rank, self.trace
        columns = [trace.take(unit.held_nbytes(each), PARAMETERS) for each in self.grid.replica if each != rank]
        unit.together = {i: trace.take(nbytes, PARAMETERS) for i, nbytes in unit.sizes.items()}
        for column in columns:
            trace.give(column)
        self.sum_complete()

    def divide(self, unit: DividedUnit) -> None:
        """Give back the parameters of a unit."""
        self.trace.give_all(unit.together)
        unit.together = {}

    def sum_of(self, parameter: int, left: int | None, gradient: int | None) -> None:
        """Keep the sum of a parameter for `sum_complete`."""
        if left is not None:
            self.trace.give(gradient)
        unit, block = self.unit_of[parameter], gradient if left is None else left
        if block is not None:
            unit.rows.append(block)
        unit.missing -= 1
        if not unit.missing:
            self.complete.append(unit)

    def node(self, _: int, sums: Gradients) -> None:
        """Keep the sums of a node that is not the last one."""
        for parameter, block in sums.items():
            self.unit_of[parameter].rows.append(block)

    def sum_complete(self) -> None:
        """Sum the gradients of units that are complete; see `UnitExchange.sum_rows`."""
        trace, rank = self.trace, self.share.rank
        counts = self._rows
        for unit in self.complete:
            packed = [trace.take(counts[rank] * nbytes, GRADIENTS) for nbytes in unit.part_nbytes]
            for block in unit.rows:
                trace.give(block)
            unit.rows = []
            received = [
                trace.take(count * unit.part_nbytes[rank], GRADIENTS)
                for peer, count in enumerate(counts)
                if peer != rank
            ]
            for block in (*packed, *received):
                trace.give(block)
        self.complete = []

    def spread(self) -> None:
        """Send updated parts to ranks that keep all weights."""
        if self.keeps_weights:
            for unit in self.units:
                others = [nbytes for peer, nbytes in enumerate(unit.part_nbytes) if peer != self.share.rank]
                for block in [self.trace.take(nbytes, PARAMETERS) for nbytes in others]:
                    self.trace.give(block)


def _pinned(nbytes: int) -> int:
    """Return what torch takes for pinned memory: a power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0
