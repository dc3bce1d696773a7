"""The traffic of ranks that compute with a divided model: weights when a rank needs them, and gradients.

Ranks take different ways through a step: they have unequally many shares, and a model may call its blocks in another
order or another number of times. So ranks agree on each exchange anew. In a *round*, each rank tells all others which
unit it needs next, or that it has done all of its work, and which units' gradients it has complete; a few bytes. Units
that some rank needs are then sent to the ranks that need them, and the gradients of units that are complete on all
ranks are summed. A rank that fails tells it in the same way, so none waits for it.

Where sums are divided, the gradients of each turn of leaves are summed before the next turn begins (`meet`).

The sum of a unit's gradients follows the plan's tree: each rank gets the rows of all others for its own part, and
finishes the tree there. This is the first phase of `engine.tree_all_reduce`. In the place of its second phase, ranks
that keep the same weights send each other their updated parts (`spread`); without replicas there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.activity import Wait
from unisono.collectives.world import World, as_bytes
from unisono.engine.norm import in_memory_order
from unisono.engine.sharded.grid import ShardGrid
from unisono.engine.sharded.unit import PieceLayout, ShardedUnit
from unisono.engine.step_transaction import STEP_UNDONE
from unisono.engine.tree_all_reduce import NodeLayout
from unisono.errors import PeerError, UnisonoError
from unisono.job.user_function import uncounted_collectives
from unisono.plan import Node, fold

__all__ = ["GradientRow", "UnitExchange", "add_runs"]

GradientRow = Mapping[int, Tensor | None]
"""The sums of a unit's gradients over a node, by the number of the parameter in the unit."""

_DONE, _FAILED, _MET = -1, -2, -3
_BITS = 62
"""Flags in a number of 64 bits."""
_BROKEN = (
    "an earlier exchange between ranks broke off, so that they no longer agree on what comes next: end the job and "
    "start it again; it resumes from the last checkpoint."
)


class UnitExchange:
    """Exchanges the weights and gradients of units. The calls are `begin`, `need` and `complete`, and `end` or `fail`.

    Where the gradients of leaves are summed in turns, `meet` is called between two leaves of a rank.

    Args:
        world: The ranks.
        units: The units, the same on all ranks.
        grid: This rank's place.
    """

    def __init__(self, world: World, units: Sequence[ShardedUnit], grid: ShardGrid) -> None:
        self._world, self._units, self._grid = world, units, grid
        self._words = -(-len(units) // _BITS)
        self._votes = [torch.zeros(1 + self._words, dtype=torch.int64, device=world.device) for _ in range(world.size)]
        self._is_open = self._is_broken = False
        self._complete: set[int] = set()
        self._reduced: set[int] = set()
        self._reduce: Callable[[int], None] = _reduce_nothing
        self.turn = 0
        """How often ranks have met since `begin`. Equal on all ranks."""

    def begin(self, reduce: Callable[[int], None] | None = None) -> None:
        """Begin to compute. Every rank must call it.

        Args:
            reduce: Called with the number of each unit whose gradients are complete on all ranks, in the same order on
                all of them. None: there are no gradients.
        """
        if self._is_broken:
            raise UnisonoError(_BROKEN)
        self._is_open, self.turn = True, 0
        self._complete, self._reduced = set(), set()
        self._reduce = _reduce_nothing if reduce is None else reduce

    def need(self, unit: int) -> None:
        """Bring a unit together on this rank. Waits until all others are in a round, too.

        Raises:
            PeerError: Another rank has failed.
        """
        self._round(unit)

    def complete(self, unit: int) -> None:
        """Note that this rank has all of its gradients of a unit. They are summed in a later round."""
        self._complete.add(unit)

    def meet(self) -> None:
        """Wait until the gradients of this turn are summed, before this rank begins another leaf.

        Ranks without another one have called `end`. So no rank is ahead of others by a leaf: the flags of a round
        belong to one turn, and no gradients wait for those of slower ranks.

        Raises:
            PeerError: Another rank has failed.
        """
        self._complete.update(range(len(self._units)))
        turn = self.turn
        while self.turn == turn:
            self._round(_MET)
        self._complete = set()

    def end(self) -> None:
        """Take part in rounds until all ranks have done their work. Every rank must call it.

        Raises:
            PeerError: Another rank has failed.
        """
        self._complete.update(range(len(self._units)))
        while self._is_open:
            self._round(_DONE)

    def fail(self) -> None:
        """Tell the others that this rank has failed, if they may wait for it."""
        if self._is_open and not self._is_broken:
            self._round(_FAILED)

    def gather(self, unit: int, ranks: Collection[int]) -> None:
        """Bring a unit together on some ranks, at a moment when all ranks call this."""
        with self._unbroken(), uncounted_collectives():
            self._send_weights(unit, ranks)

    def spread(self, unit: int) -> None:
        """Send this rank's updated part of a unit to all ranks that keep it, at a moment when all ranks call this.

        Traffic: with R replicas divided over S ranks each, a rank sends and gets (R - 1)/(R S) of the unit.
        """
        own = self._units[unit]
        received = own.updated()
        if received:
            with self._unbroken(), uncounted_collectives():
                self._transfer(dict.fromkeys(received, own.own), received)
        own.settle(received)

    def assemble(self, own: Tensor, numels: Mapping[int, int], *, owner: int) -> Tensor | None:
        """Put the parts of a vector together on one rank, at a moment when all ranks call this; None on the others.

        Args:
            own: This rank's part; on a rank that has none, an empty vector.
            numels: The number of elements of the part of each rank that has one, in the order of the vector.
            owner: The rank that gets the vector.
        """
        rank = self._world.rank
        if rank != owner:
            with self._unbroken(), uncounted_collectives():
                self._transfer({owner: as_bytes(own.contiguous())} if rank in numels else {}, {})
            return None
        vector = own.new_empty(sum(numels.values()))
        parts = dict(zip(numels, torch.split(vector, [*numels.values()]), strict=True))
        if rank in parts:
            parts.pop(rank).copy_(own)
        with self._unbroken(), uncounted_collectives():
            self._transfer({}, {peer: as_bytes(part) for peer, part in parts.items()})
        return vector

    def _round(self, wanted: int) -> None:
        if not self._is_open:
            raise UnisonoError(
                "a part of a model that is divided over ranks was called, or a backward pass through it run, outside "
                "of the steps and evaluations of its run: the other ranks do not send their parts then"
            )
        with self._unbroken(), uncounted_collectives():
            self._vote(wanted)
            votes: list[list[int]] = torch.stack(self._votes).tolist()
            failed = [rank for rank, vote in enumerate(votes) if vote[0] == _FAILED]
            if failed:
                self._is_open = False
            else:
                needed = {vote[0] for vote in votes} - {_DONE, _MET}
                for unit in sorted(needed):
                    self._send_weights(unit, [rank for rank, vote in enumerate(votes) if vote[0] == unit])
                everywhere = [_flags(vote[1:]) for vote in votes]
                for unit in sorted(set.intersection(*everywhere) - self._reduced):
                    self._reduced.add(unit)
                    self._reduce(unit)
                self._is_open = any(vote[0] != _DONE for vote in votes)
                if self._is_open and not needed:  # all units are complete on all ranks
                    self.turn, self._reduced = self.turn + 1, set()
        if failed and wanted != _FAILED:
            raise PeerError(
                f"rank {failed[0]} failed while this rank needed its part of the model; its own error says why. "
                f"{STEP_UNDONE}"
            )

    def _vote(self, wanted: int) -> None:
        """Tell all ranks what this one needs, and learn what they need."""
        own = self._votes[self._world.rank]
        words = [0] * self._words
        for unit in self._complete:
            words[unit // _BITS] |= 1 << unit % _BITS
        own.copy_(torch.tensor([wanted, *words], dtype=torch.int64), non_blocking=True)
        self._transfer(dict.fromkeys(self._peers(), own), {peer: self._votes[peer] for peer in self._peers()})

    def _send_weights(self, number: int, ranks: Collection[int]) -> None:
        """Send a unit to some ranks, each within its replica."""
        unit, rank, replica = self._units[number], self._world.rank, self._grid.replica
        wanted = rank in ranks
        own = unit.held.to(unit.device) if wanted else unit.held
        sent = own if own.device == self._world.device else unit.held
        columns = [
            own
            if each == rank
            else torch.empty(unit.held_nbytes(each) if wanted else 0, dtype=torch.uint8, device=unit.device)
            for each in replica
        ]
        peers = [peer for peer in self._peers() if peer in replica]
        self._transfer(
            {peer: sent for peer in peers if peer in ranks},
            {peer: columns[peer - replica.start] for peer in peers if wanted},
        )
        if wanted:
            unit.join(columns)

    def sum_rows(
        self,
        unit: ShardedUnit,
        layouts: Sequence[PieceLayout],
        rows: list[GradientRow],
        nodes: NodeLayout,
        *,
        out: Tensor,
    ) -> None:
        """Sum a unit's gradients over all ranks, for this rank's part. Every rank must call it.

        Memory: this rank's rows, twice for a moment, and those of all ranks for its own part. Traffic: each row but for
        the own part.

        Args:
            unit: The unit.
            layouts: The pieces of each rank that have gradients.
            rows: A row for each of this rank's nodes. The list is emptied, so that gradients are given back early.
            nodes: The nodes of all ranks.
            out: Gets the sum, as bytes.
        """
        rank = self._world.rank
        packed = [_pack(unit, layout, rows) for layout in layouts]
        rows.clear()
        received = {
            peer: torch.empty(len(nodes.nodes[peer]), layouts[rank].nbytes, dtype=torch.uint8, device=unit.device)
            for peer in self._peers()
        }
        self._transfer({peer: packed[peer] for peer in self._peers()}, received)
        received[rank] = packed[rank]
        values: dict[Node, list[Tensor]] = {}
        for peer, of_peer in enumerate(nodes.nodes):
            for node, row in zip(of_peer, received[peer], strict=True):
                values[node] = layouts[rank].runs(row)
        totals = fold(values, leaves=nodes.leaves, add=add_runs)
        for place, total in zip(layouts[rank].runs(out), totals, strict=True):
            place.copy_(total)

    def give_parts(
        self, unit: ShardedUnit, layouts: Sequence[PieceLayout], row: dict[int, Tensor | None] | None, *, givers: int
    ) -> list[Tensor]:
        """Send a leaf's gradients of a unit to the ranks that keep their sums. Every rank must call it.

        Memory: the row and a copy of it, and this rank's part of those of all ranks. Traffic: the row but for this
        rank's part.

        Args:
            unit: The unit.
            layouts: The pieces of each rank that have gradients.
            row: The gradients of this rank's leaf; None if it has none. It is emptied.
            givers: How many ranks have a leaf: the first ones.

        Returns:
            This rank's part of the gradients of these ranks, each as bytes.
        """
        rank, sent = self._world.rank, {}
        received = {
            peer: torch.empty(layouts[rank].nbytes, dtype=torch.uint8, device=unit.device)
            for peer in self._peers()
            if peer < givers
        }
        if row is not None:
            sent = {peer: _pack(unit, layout, [row])[0] for peer, layout in enumerate(layouts)}
            row.clear()
        own = {rank: sent.pop(rank)} if row is not None else {}
        self._transfer(sent, received)
        received |= own
        return [received[giver] for giver in range(givers)]

    def _peers(self) -> list[int]:
        return [(self._world.rank + i) % self._world.size for i in range(1, self._world.size)]

    def _transfer(self, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
        group, device = self._world.group, self._world.device
        if group is None:
            return  # one rank
        # Where tensors are on a GPU and travel from the CPU, copies of them do: one for all peers that get the same.
        copies = {id(tensor): tensor.to(device) for tensor in sends.values()}
        goes = {peer: copies[id(tensor)] for peer, tensor in sends.items() if tensor.numel()}
        comes = {
            peer: torch.empty_like(tensor, device=device) if tensor.device.type != device.type else tensor
            for peer, tensor in receives.items()
            if tensor.numel()
        }
        if device.type == "cpu":
            works = [("recv", peer, group.recv([tensor], peer, 0)) for peer, tensor in comes.items()]
            works += [("send", peer, group.send([tensor], peer, 0)) for peer, tensor in goes.items()]
            for name, peer, work in works:
                self._world.waiter.wait(work, Wait(name, group.group_name, self._world.size, 0, peer))
        elif goes or comes:
            operations = [
                dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for peer, tensor in comes.items()
            ]
            operations += [
                dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for peer, tensor in goes.items()
            ]
            for work in dist.batch_isend_irecv(operations):
                self._world.waiter.wait(work)
        for peer, tensor in comes.items():
            if tensor is not receives[peer]:
                receives[peer].copy_(tensor)

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Note an exchange that ends with an error: the other ranks no longer know what comes next."""
        try:
            yield
        except BaseException:
            self._is_broken = True
            raise


def _pack(unit: ShardedUnit, layout: PieceLayout, rows: Sequence[GradientRow]) -> Tensor:
    """Return the pieces of a rank in some rows, as rows of bytes."""
    packed = layout.allocate(len(rows), device=unit.device)
    for row, bytes_of_row in zip(rows, packed, strict=True):
        for piece, place in zip(layout.pieces, layout.views(bytes_of_row), strict=True):
            gradient = row[piece.parameter]
            if gradient is not None:
                vector = in_memory_order(gradient, unit.strides[piece.parameter])
                place.copy_(vector[piece.start : piece.stop])
    return packed


def add_runs(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    """Return the sum of two parts of gradients, one vector for each dtype, in place on the left."""
    for a, b in zip(left, right, strict=True):
        a.add_(b)
    return left


def _flags(words: Sequence[int]) -> set[int]:
    return {i * _BITS + bit for i, word in enumerate(words) for bit in range(_BITS) if word >> bit & 1}


def _reduce_nothing(unit: int) -> None:
    """Do nothing: there are no gradients."""
