"""A unit: parameters of which each rank keeps a part, and which are brought together while a block computes.

Each rank's part lies in one vector of bytes, its pieces one after the other, so that it is sent without a copy. Pieces
are cut at multiples of `norm.BLOCK` elements: an element-wise optimizer and the norm then see what they see in one
process. A parameter keeps its name, its shape and its identity. While its unit is apart, its values are NaN, expanded
from one number; while it is together, they lie in memory that is given back afterwards and filled again at the same
tensor, to which graphs of autograd refer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.engine.norm import BLOCK, dense_strides, in_memory_order
from unisono.engine.shared.partition import Piece, partition
from unisono.plan.alignment import BUFFER_NUMEL, align_up

__all__ = ["PieceLayout", "ShardedUnit"]


class _Place(NamedTuple):
    """The place of a piece in a vector of bytes."""

    piece: Piece
    start: int
    stop: int


class PieceLayout:
    """The places of some pieces in a vector of bytes, by dtype, each aligned.

    Args:
        pieces: The pieces.
        dtypes: The dtype of each parameter.
    """

    def __init__(self, pieces: Sequence[Piece], dtypes: Sequence[torch.dtype]) -> None:
        self.pieces = tuple(pieces)
        places: dict[Piece, _Place] = {}
        runs: list[tuple[torch.dtype, int, int]] = []
        offset = 0
        for dtype in dict.fromkeys(dtypes[piece.parameter] for piece in pieces):
            first = offset
            for piece in pieces:
                if dtypes[piece.parameter] is dtype:
                    stop = offset + (piece.stop - piece.start) * dtype.itemsize
                    places[piece] = _Place(piece, offset, stop)
                    offset += align_up(stop - offset, BUFFER_NUMEL * dtype.itemsize)
            offset = align_up(offset, 1024)  # where an element of any dtype may begin
            runs.append((dtype, first, offset))
        self._places = [places[piece] for piece in self.pieces]
        self._dtypes = [dtypes[piece.parameter] for piece in self.pieces]
        self._runs = runs
        self.nbytes = offset
        """The length of the vector."""

    def allocate(self, *rows: int) -> Tensor:
        """Return a vector, or some of them. What lies between pieces is zero."""
        return torch.zeros(*rows, self.nbytes, dtype=torch.uint8)

    def views(self, vector: Tensor) -> list[Tensor]:
        """Return the pieces in a vector, each as a vector of its dtype."""
        pairs = zip(self._places, self._dtypes, strict=True)
        return [vector[place.start : place.stop].view(dtype) for place, dtype in pairs]

    def runs(self, vector: Tensor) -> list[Tensor]:
        """Return a vector as one vector for each dtype."""
        return [vector[start:stop].view(dtype) for dtype, start, stop in self._runs]


class ShardedUnit:
    """Some parameters, divided over ranks.

    Args:
        name: The name of the block that computes with them; "" for those of no block.
        parameters: The parameters by name. They are dense, and each has memory of its own.
        rank: This rank.
        ranks: The number of ranks.

    >>> layer = torch.nn.Linear(3, 2)
    >>> unit = ShardedUnit("", dict(layer.named_parameters()), rank=0, ranks=1)
    >>> before = layer.weight.detach().clone()
    >>> unit.divide(keep=True)
    >>> layer.weight.shape, bool(layer.weight.isnan().all()), layer.weight.untyped_storage().nbytes()
    (torch.Size([2, 3]), True, 4)
    >>> unit.join([unit.own])
    >>> torch.equal(layer.weight, before)
    True
    """

    def __init__(self, name: str, parameters: Mapping[str, Tensor], *, rank: int, ranks: int) -> None:
        self.name, self.names, self.parameters = name, tuple(parameters), tuple(parameters.values())
        self._rank = rank
        dtypes = [p.dtype for p in self.parameters]
        parts = partition([p.numel() for p in self.parameters], ranks=ranks, unit=BLOCK)
        self.layouts = [PieceLayout(pieces, dtypes) for pieces in parts]
        """The part of each rank."""
        self.own = self.layouts[rank].allocate()
        """This rank's part, as bytes. It has the weights, except while the run is whole everywhere."""
        # A parameter without dimensions keeps none: its state cannot be told from a number then, and need not be.
        self.places = [
            vector.view(()) if not self.parameters[piece.parameter].dim() else vector
            for piece, vector in zip(self.pieces, self.layouts[rank].views(self.own), strict=True)
        ]
        """The pieces in it, which the optimizer updates."""
        self.strides = [dense_strides(p) for p in self.parameters]
        """The strides of each parameter, and of its gradient."""
        self._whole = [
            torch.empty_strided(p.shape, strides, dtype=p.dtype, device=p.device)
            for p, strides in zip(self.parameters, self.strides, strict=True)
        ]
        for whole in self._whole:
            whole.untyped_storage().resize_(0)
        self._apart = [
            torch.full((), torch.nan if p.is_floating_point() or p.is_complex() else 0, dtype=p.dtype).expand(p.shape)
            for p in self.parameters
        ]
        self.is_together = True
        """True if the parameters have their values on this rank."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """This rank's pieces."""
        return self.layouts[self._rank].pieces

    def storages(self) -> list[int]:
        """Return the identities of the memory of the parameters when they are together."""
        return [whole.untyped_storage()._cdata for whole in self._whole]

    def placeholders(self) -> list[int]:
        """Return the identities of the memory of the parameters when they are apart."""
        return [apart.untyped_storage()._cdata for apart in self._apart]

    @torch.no_grad()
    def divide(self, *, keep: bool) -> None:
        """Give back the memory of the parameters.

        Args:
            keep: True to take this rank's part from their present values first.
        """
        if keep:
            for piece, place in zip(self.pieces, self.places, strict=True):
                values = in_memory_order(self.parameters[piece.parameter].data, self.strides[piece.parameter])
                place.view(-1).copy_(values[piece.start : piece.stop])
        for p, apart, whole in zip(self.parameters, self._apart, self._whole, strict=True):
            p.data = apart
            whole.untyped_storage().resize_(0)
        self.is_together = False

    @torch.no_grad()
    def join(self, parts: Sequence[Tensor]) -> None:
        """Give the parameters memory, and fill it.

        Args:
            parts: The part of each rank, as bytes.
        """
        vectors = []
        for whole in self._whole:
            whole.untyped_storage().resize_(whole.numel() * whole.dtype.itemsize)
            vectors.append(whole.as_strided((whole.numel(),), (1,)))
        for layout, part in zip(self.layouts, parts, strict=True):
            for piece, values in zip(layout.pieces, layout.views(part), strict=True):
                vectors[piece.parameter][piece.start : piece.stop].copy_(values)
        for p, whole in zip(self.parameters, self._whole, strict=True):
            p.data = whole
        self.is_together = True
