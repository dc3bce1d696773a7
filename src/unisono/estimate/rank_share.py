"""What a rank computes in a step, and which parts of parameters ranks update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unisono.engine.norm import BLOCK
from unisono.engine.shared.partition import Piece, partition
from unisono.engine.tree_all_reduce import NodeLayout
from unisono.estimate.model_profile import ParameterSize, StepRecord
from unisono.plan import Node

__all__ = ["RankShare", "fractions_of", "nbytes_of", "parts_of"]


class RankShare(NamedTuple):
    """What a rank computes in a step."""

    record: StepRecord
    layout: NodeLayout
    rank: int
    micro_batches: int
    """Those of a virtual rank's share."""
    batch_nbytes: int
    """The rank's part of a batch."""
    buffers_nbytes: int = 0

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The rank's nodes of the tree."""
        return self.layout.nodes[self.rank]

    @property
    def parameters_nbytes(self) -> int:
        """The size of the model."""
        return sum(parameter.nbytes for parameter in self.record.parameters)


def parts_of(parameters: Sequence[ParameterSize], ranks: int) -> list[list[Piece]]:
    """Return the pieces that each rank updates."""
    return partition([parameter.numel for parameter in parameters], ranks=ranks, unit=BLOCK)


def nbytes_of(parameters: Sequence[ParameterSize], piece: Piece) -> int:
    """Return the size of a piece."""
    parameter = parameters[piece.parameter]
    return (piece.stop - piece.start) * parameter.nbytes // max(1, parameter.numel)


def fractions_of(parameters: Sequence[ParameterSize], pieces: Sequence[Piece]) -> dict[int, float]:
    """Return which part of each parameter some pieces are."""
    return {piece.parameter: (piece.stop - piece.start) / max(1, parameters[piece.parameter].numel) for piece in pieces}
