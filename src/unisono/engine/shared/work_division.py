"""The division of a step's work among ranks: which pieces of the parameters each sums and updates, and in what memory.

Start reading at `divide_work`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from unisono.engine.norm import BLOCK
from unisono.engine.shared.batched_rows import BatchedRows
from unisono.engine.shared.direct_rows import DirectRows
from unisono.engine.shared.gradient_rows import GradientRows
from unisono.engine.shared.paired_rows import PairedRows
from unisono.engine.shared.parameter_arena import SharedParameters
from unisono.engine.shared.partition import Piece, assign_whole, partition
from unisono.engine.shared.shared_runtime import SharedRuntime
from unisono.engine.shared.update_protection import TURNS
from unisono.engine.tree_all_reduce import NodeLayout

__all__ = ["WorkDivision", "divide_work"]

# If the gradients are smaller than this, they are taken at the end of backward, when they are still in the cache: a
# hook costs 25 µs. 66 thousand parameters in 6 tensors then take 1.2 ms of CPU time per step instead of 1.35. Such
# models have two sets of rows, so that a rank need not wait until all others have begun the step.
_CACHE_NBYTES = 1024 * 1024


class WorkDivision(NamedTuple):
    """The pieces of all ranks, and the memory of those of this rank."""

    is_large: bool
    """True if gradients do not stay in the cache until the end of a backward pass."""
    parts: Sequence[Sequence[Piece]]
    """The pieces of each rank."""
    row_sets: list[GradientRows[Any]]
    """The sets of rows, which take turns."""
    places: list[Tensor]
    """The weights of each piece of this rank, or the parameter if ranks update whole ones."""
    gradients: list[list[Tensor]]
    """For each set of rows, the summed gradient of each piece of this rank, in the shape of its place."""


def divide_work(
    runtime: SharedRuntime,
    weights: SharedParameters,
    parameters: Sequence[Tensor],
    *,
    is_whole: bool,
    keeps_gradients: bool,
    widest: NodeLayout,
) -> WorkDivision:
    """Divide the parameters among ranks, and allocate their rows. Every rank must call it.

    Args:
        runtime: Allocates shared memory.
        weights: The memory of the parameters.
        parameters: Those with dense gradients.
        is_whole: True if an optimizer needs whole parameters.
        keeps_gradients: True if those of the last steps of a large model are to be kept, for updates that are repeated.
        widest: The layout with all virtual ranks.
    """
    numels = [p.numel() for p in parameters]
    parts = assign_whole(numels, ranks=runtime.size) if is_whole else partition(numels, ranks=runtime.size, unit=BLOCK)
    pieces = parts[runtime.rank]
    is_large = sum(p.numel() * p.element_size() for p in parameters) >= _CACHE_NBYTES
    make: type[GradientRows[Any]] = BatchedRows
    if is_large:
        make = PairedRows if runtime.size > 2 else DirectRows
    # The gradients of some steps are kept, in rows that take turns, if portions are copied in turn.
    spare = TURNS - 1 if is_large and keeps_gradients and not is_whole else 0
    row_sets = [make(runtime, parameters, parts, widest=widest, spare=spare) for _ in range(1 if is_large else 2)]
    row_sets += [row_sets[0].turned(number) for number in range(spare)]
    for rows in row_sets:
        rows.prepare()
    if is_whole:
        places = [parameters[piece.parameter] for piece in pieces]
        gradients = [[rows.gradients[piece.parameter] for piece in pieces] for rows in row_sets]
        return WorkDivision(is_large, parts, row_sets, places, gradients)
    # A parameter without dimensions keeps none: its state cannot be told from a number then, and need not be.
    shapes = [() if not parameters[i].dim() else (stop - start,) for i, start, stop in pieces]
    vectors = [weights.vector(parameters[i])[start:stop] for i, start, stop in pieces]
    places = [vector.view(shape) for vector, shape in zip(vectors, shapes, strict=True)]
    gradients = [[total.view(shape) for total, shape in zip(rows.totals, shapes, strict=True)] for rows in row_sets]
    return WorkDivision(is_large, parts, row_sets, places, gradients)
