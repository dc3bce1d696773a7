"""A unit: parameters of which each rank keeps a part, and which are brought together while a block computes.

Each rank updates a part, whose pieces lie one after the other in a vector of bytes, so that it is sent without a copy.
Pieces are cut at multiples of `norm.BLOCK` elements: an element-wise optimizer and the norm then see what they see in
one process. With several replicas, a rank also keeps the parts that its holders in other replicas update, behind each
other in one vector (`held`): together they are the part that it sends within its replica. A parameter keeps its name,
its shape and its identity. While its unit is apart, its values are NaN, expanded from one number; while it is together,
they lie in memory that is given back afterwards and filled again at the same tensor, to which graphs of autograd refer.

With as many replicas as ranks, parameters stay where the user made them, and a rank's part is a copy for the update.
"""

from __future__ import annotations

import cmath
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.engine.norm import BLOCK, dense_strides, in_memory_order
from unisono.engine.sharded.grid import ShardGrid
from unisono.engine.shared.partition import Piece, partition
from unisono.plan.alignment import BUFFER_NUMEL, align_up

__all__ = ["PieceLayout", "ShardedUnit", "are_kept", "fill_of"]


class _PieceRange(NamedTuple):
    """The place of a piece in a vector of bytes."""

    piece: Piece
    start: int
    stop: int


def fill_of(parameter: Tensor) -> float:
    """Return the number that stands for the values of a parameter without memory: NaN, or 0 among whole numbers."""
    return torch.nan if parameter.is_floating_point() or parameter.is_complex() else 0


def are_kept(numbers: Sequence[Tensor], fills: Sequence[float]) -> list[bool]:
    """Return whether tensors of one number each still have what `fill_of` has returned. Waits for a device once."""
    if all(number.device.type == "cpu" for number in numbers):
        values = [number.item() for number in numbers]
        return [cmath.isnan(value) if fill else not value for value, fill in zip(values, fills, strict=True)]
    pairs = zip(numbers, fills, strict=True)
    kept: list[bool] = torch.stack([number.isnan() if fill else number == 0 for number, fill in pairs]).tolist()
    return kept


class PieceLayout:
    """The places of some pieces in a vector of bytes, by dtype, each aligned.

    Args:
        pieces: The pieces.
        dtypes: The dtype of each parameter.
    """

    def __init__(self, pieces: Sequence[Piece], dtypes: Sequence[torch.dtype]) -> None:
        self.pieces = tuple(pieces)
        places: dict[Piece, _PieceRange] = {}
        runs: list[tuple[torch.dtype, int, int]] = []
        offset = 0
        for dtype in dict.fromkeys(dtypes[piece.parameter] for piece in pieces):
            first = offset
            for piece in pieces:
                if dtypes[piece.parameter] is dtype:
                    stop = offset + (piece.stop - piece.start) * dtype.itemsize
                    places[piece] = _PieceRange(piece, offset, stop)
                    offset += align_up(stop - offset, BUFFER_NUMEL * dtype.itemsize)
            offset = align_up(offset, 1024)  # where an element of any dtype may begin
            runs.append((dtype, first, offset))
        self._places = [places[piece] for piece in self.pieces]
        self._dtypes = [dtypes[piece.parameter] for piece in self.pieces]
        self._runs = runs
        self.nbytes = offset
        """The length of the vector."""

    def allocate(self, *rows: int, device: torch.device) -> Tensor:
        """Return a vector, or some of them. What lies between pieces is zero."""
        return torch.zeros(*rows, self.nbytes, dtype=torch.uint8, device=device)

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
        grid: This rank's place.
        device: Where the parameters are to be while they are together; None: where they are.
        on_cpu: True to keep this rank's parts in memory of the CPU, which is pinned if the device is an NVIDIA GPU.

    >>> layer = torch.nn.Linear(300, 200)
    >>> unit = ShardedUnit("", dict(layer.named_parameters()), ShardGrid(rank=0, ranks=2))
    >>> before = layer.weight.detach().clone()
    >>> other = ShardedUnit("", dict(layer.named_parameters()), ShardGrid(rank=1, ranks=2))
    >>> for each in (other, unit):
    ...     each.keep()
    >>> unit.divide()
    >>> layer.weight.shape, bool(layer.weight.isnan().all()), layer.weight.untyped_storage().nbytes()
    (torch.Size([200, 300]), True, 4)
    >>> unit.join([unit.held, other.held])
    >>> torch.equal(layer.weight, before)
    True
    """

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, Tensor],
        grid: ShardGrid,
        *,
        device: torch.device | None = None,
        on_cpu: bool = False,
    ) -> None:
        self.name, self.names, self.parameters = name, tuple(parameters), tuple(parameters.values())
        self._grid, self._rank = grid, grid.rank
        own = self.parameters[0].device if self.parameters else torch.device("cpu")
        self.device = own if device is None else device
        """Where the parameters are while they are together."""
        self._on_cpu, self._pinned = on_cpu, on_cpu and self.device.type == "cuda"
        dtypes = [p.dtype for p in self.parameters]
        parts = partition([p.numel() for p in self.parameters], ranks=grid.ranks, unit=BLOCK)
        self.layouts = [PieceLayout(pieces, dtypes) for pieces in parts]
        """The part that each rank updates."""
        holders = (grid.rank,) if grid.keeps_weights else grid.holders(grid.rank)
        held_nbytes = sum(self.layouts[rank].nbytes for rank in holders)
        self.held = self.kept_bytes(held_nbytes)
        """The parts that this rank keeps, as bytes. They have the weights, except while the run is whole everywhere."""
        self._parts_of_holders = dict(zip(holders, self._split(self.held, holders), strict=True))
        self.own = self._parts_of_holders[grid.rank]
        """The part that this rank updates."""
        # A parameter without dimensions keeps none: its state cannot be told from a number then, and need not be.
        self.places = [
            vector.view(()) if not self.parameters[piece.parameter].dim() else vector
            for piece, vector in zip(self.pieces, self.layouts[grid.rank].views(self.own), strict=True)
        ]
        """The pieces in it, which the optimizer updates."""
        self.strides = [dense_strides(p) for p in self.parameters]
        """The strides of each parameter, and of its gradient."""
        self._whole = [
            torch.empty_strided(p.shape, strides, dtype=p.dtype, device=self.device)
            for p, strides in zip(self.parameters, self.strides, strict=True)
        ]
        for whole in self._whole:
            whole.untyped_storage().resize_(0)
        self._fills = [fill_of(p) for p in self.parameters]
        self._numbers = [
            torch.full((), fill, dtype=d, device=self.device) for fill, d in zip(self._fills, dtypes, strict=True)
        ]
        """The number of which the values of each parameter consist while it is apart."""
        self._apart = [number.expand(p.shape) for number, p in zip(self._numbers, self.parameters, strict=True)]
        self._versions = [p._version for p in self.parameters]
        """The versions of the parameters when they came apart."""
        self.is_together = True
        """True if the parameters have their values on this rank."""

    @property
    def cpu_nbytes(self) -> int:
        """The size of the parameters, if they come together in memory of the CPU; otherwise 0."""
        return sum(p.numel() * p.element_size() for p in self.parameters) if self.device.type == "cpu" else 0

    @property
    def keeps_weights(self) -> bool:
        """True if each rank has all values of the parameters at any time."""
        return self._grid.keeps_weights

    def kept_bytes(self, nbytes: int) -> Tensor:
        """Return memory for what this rank keeps, of zeros."""
        where = torch.device("cpu") if self._on_cpu else self.device
        return torch.zeros(nbytes, dtype=torch.uint8, device=where, pin_memory=self._pinned)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces that this rank updates."""
        return self.layouts[self._rank].pieces

    def is_row_major(self, number: int) -> bool:
        """Return True if the elements of a parameter lie in memory in the order of their indices."""
        shape, strides = self.parameters[number].shape, self.strides[number]
        return torch.empty_strided(shape, strides, device="meta").is_contiguous()

    def updated_values(self) -> list[tuple[Piece, Tensor]]:
        """Return the pieces that this rank updates, with their present values as vectors. Copies nothing."""
        if not self._grid.keeps_weights:
            return [*zip(self.pieces, self.layouts[self._rank].views(self.own), strict=True)]
        whole = [in_memory_order(p.data, own) for p, own in zip(self.parameters, self.strides, strict=True)]
        return [(piece, whole[piece.parameter][piece.start : piece.stop]) for piece in self.pieces]

    def held_places(self) -> list[tuple[Piece, Tensor]]:
        """Return the pieces that this rank keeps, with the vectors that hold them while the unit is apart."""
        return [
            pair
            for rank, part in self._parts_of_holders.items()
            for pair in zip(self.layouts[rank].pieces, self.layouts[rank].views(part), strict=True)
        ]

    def storages(self) -> list[int]:
        """Return the identities of the memory of the parameters when they are together."""
        return [whole.untyped_storage()._cdata for whole in self._whole]

    def placeholders(self) -> list[int]:
        """Return the identities of the memory of the parameters when they are apart."""
        return [apart.untyped_storage()._cdata for apart in self._apart]

    def held_nbytes(self, rank: int) -> int:
        """Return the length of `held` on a rank."""
        return sum(self.layouts[holder].nbytes for holder in self._grid.holders(rank))

    @torch.no_grad()
    def keep(self) -> None:
        """Take what this rank keeps from the present values of the parameters."""
        for rank, part in self._parts_of_holders.items():
            layout = self.layouts[rank]
            for piece, place in zip(layout.pieces, layout.views(part), strict=True):
                values = in_memory_order(self.parameters[piece.parameter].data, self.strides[piece.parameter])
                place.copy_(values[piece.start : piece.stop])

    @torch.no_grad()
    def divide(self) -> None:
        """Give back the memory of the parameters."""
        for p, apart, whole in zip(self.parameters, self._apart, self._whole, strict=True):
            p.data = apart
            whole.untyped_storage().resize_(0)
        self._versions = [p._version for p in self.parameters]
        self.is_together = False

    @torch.no_grad()
    def written_apart(self) -> str | None:
        """Return the name of a parameter that was written to since it came apart, and drop all such values.

        torch refuses most writes there, but lets `fill_` and `zero_` write the one number of which the values consist.
        """
        if self.is_together:
            return None
        found = None
        kept = are_kept(self._numbers, self._fills)
        for i, number in enumerate(self._numbers):
            if not kept[i] or self.parameters[i]._version != self._versions[i]:
                number.fill_(self._fills[i])
                self._versions[i] = self.parameters[i]._version
                found = found or self.names[i]
        return found

    @torch.no_grad()
    def converted(self) -> str | None:
        """Return the name of a parameter that has got another type, other strides or other memory; None if none has.

        So do `model.to(...)` and `p.data = ...`. Where the parameters are apart, what they have got is dropped.
        """
        if self._grid.keeps_weights:
            forms = zip(self.names, self.parameters, self._whole, self.strides, strict=True)
            return next((n for n, p, own, strides in forms if p.dtype != own.dtype or p.stride() != strides), None)
        found, memory = None, self._whole if self.is_together else self._apart
        for name, p, own in zip(self.names, self.parameters, memory, strict=True):
            if p.untyped_storage()._cdata != own.untyped_storage()._cdata:
                p.data, found = own, found or name
        return found

    @torch.no_grad()
    def join(self, columns: Sequence[Tensor]) -> None:
        """Give the parameters memory, and fill it.

        Args:
            columns: `held` of each rank of a replica.
        """
        vectors = []
        for whole in self._whole:
            whole.untyped_storage().resize_(whole.numel() * whole.dtype.itemsize)
            vectors.append(whole.as_strided((whole.numel(),), (1,)))
        for shard, column in enumerate(columns):
            holders = self._grid.holders(shard)
            for rank, part in zip(holders, self._split(column, holders), strict=True):
                self._write(vectors, rank, part)
        for p, whole in zip(self.parameters, self._whole, strict=True):
            p.data = whole
        self.is_together = True

    def updated(self) -> dict[int, Tensor]:
        """Return where updated parts of other ranks are to be received, by rank; then call `settle` with it."""
        if self._grid.keeps_weights:
            others = [rank for rank in range(self._grid.ranks) if rank != self._rank]
            return {
                rank: torch.empty(self.layouts[rank].nbytes, dtype=torch.uint8, device=self.device) for rank in others
            }
        return {rank: part for rank, part in self._parts_of_holders.items() if rank != self._rank}

    @torch.no_grad()
    def settle(self, received: Mapping[int, Tensor]) -> None:
        """Write the updated parts of all ranks into the parameters, if this rank keeps these whole."""
        if self._grid.keeps_weights:
            vectors = [in_memory_order(p.data, own) for p, own in zip(self.parameters, self.strides, strict=True)]
            for rank, part in {**received, self._rank: self.own}.items():
                self._write(vectors, rank, part)

    def _write(self, vectors: Sequence[Tensor], rank: int, part: Tensor) -> None:
        layout = self.layouts[rank]
        for piece, values in zip(layout.pieces, layout.views(part), strict=True):
            vectors[piece.parameter][piece.start : piece.stop].copy_(values)

    def _split(self, column: Tensor, holders: Sequence[int]) -> Sequence[Tensor]:
        return torch.split(column, [self.layouts[rank].nbytes for rank in holders])
