"""Messages between two ranks of a group: sends and receives with tags, from one rank or from any.

Every pair of ranks has a ring in each direction (`ring_buffer`), in which messages keep their order. A receive takes
the first message with its tag. A message without a receive stays in the ring, which blocks its sender, unless a message
behind it may be awaited: then it is put aside in private memory. `point_to_point_progress` decides which thread moves
messages and which sleeps. Start reading at `PointToPoint.send` and `PointToPoint.receive`.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Collection

import torch
from torch import Tensor
from torch.distributed import DistBackendError

from unisono.shm.peer_wait import PeerWait
from unisono.shm.peers import Peers
from unisono.shm.point_to_point_progress import PointToPointProgress, Transfer
from unisono.shm.ring_buffer import RingReader, RingWriter, create_ring, ring_nbytes
from unisono.shm.segment import Segment, aligned
from unisono.shm.semaphore import SEMAPHORE_NBYTES, Semaphore

__all__ = ["PointToPoint"]

_LARGEST_CELL, _SMALLEST_CELL = 256 * 1024, 4 * 1024
BUDGET_NBYTES = 32 * 1024 * 1024
"""Size of all rings of a group together. The cells of rings without messages are never touched and cost nothing."""


class _SharedMessage:
    """A message that has begun to arrive."""

    __slots__ = ("address", "arrived", "buffer", "receive", "tag", "total")

    def __init__(self, tag: int, total: int) -> None:
        self.tag, self.total, self.arrived = tag, total, 0
        self.receive: Transfer | None = None
        self.buffer: Tensor | None = None
        self.address = 0
        """Where its bytes are written; 0 if they do not fit and are dropped."""

    def keep(self) -> None:
        """Allocate private memory for the message."""
        self.buffer = torch.empty(self.total, dtype=torch.uint8)
        self.address = self.buffer.data_ptr()


class PointToPoint:
    """Sends and receives of one rank in its group. Thread-safe.

    Args:
        segment: The segment of the group.
        offset: The aligned offset of the rings in the segment, where one rank has called `create` before.
        peers: The processes of the group.
        waiting: Waits for ranks of the group.
        budget_nbytes: The limit for all rings of the group together, the same on every rank.
    """

    def __init__(
        self, segment: Segment, offset: int, peers: Peers, waiting: PeerWait, *, budget_nbytes: int = BUDGET_NBYTES
    ) -> None:
        self.rank, self.size = peers.rank, peers.size
        self._pid = os.getpid()
        self._waiting = waiting
        others = [r for r in range(self.size) if r != self.rank]
        cell_nbytes = _cell_nbytes(self.size, budget_nbytes)
        self._cell_nbytes = cell_nbytes

        def place(source: int, target: int) -> int:
            return offset + _ring_offset(source, target, self.size, cell_nbytes)

        self._writers = {r: RingWriter(segment, place(self.rank, r), cell_nbytes=cell_nbytes) for r in others}
        self._readers = {r: RingReader(segment, place(r, self.rank), cell_nbytes=cell_nbytes) for r in others}
        self._wakeups = [Semaphore(segment.address + offset + r * SEMAPHORE_NBYTES, segment) for r in range(self.size)]
        self._progress = PointToPointProgress(
            self._wakeups[self.rank],
            waiting,
            others=others,
            advance=self._advance,
            awaited=self._awaited,
            fail=self._end_all,
            part_with=self._end_with,
        )
        # The attributes below are guarded by the condition of the progress engine.
        self._sends: dict[int, deque[Transfer]] = {}
        """By target, the sends that are not completely in the ring yet; no empty queues."""
        self._receives: list[Transfer] = []
        """Receives without a message, in the order of their calls."""
        self._arriving: dict[int, _SharedMessage] = {}
        """By source, the message that is partly read."""
        self._aside: list[list[_SharedMessage]] = [[] for _ in range(self.size)]
        """By source, messages that were read before their receive was called, complete or still arriving."""
        self._last_any = self.rank
        """The source of the latest message for a receive from any rank. The next such receive begins after it."""
        self._failure: Exception | None = None

    @staticmethod
    def nbytes(size: int, budget_nbytes: int = BUDGET_NBYTES) -> int:
        """Return the size of the rings in a segment: at most the budget, unless the smallest rings need more."""
        return _ring_offset(size, 0, size, _cell_nbytes(size, budget_nbytes))

    @staticmethod
    def create(segment: Segment, offset: int, size: int, budget_nbytes: int = BUDGET_NBYTES) -> None:
        """Initialize the memory. Call it once, before the segment is shared."""
        for rank in range(size):
            Semaphore(segment.address + offset + rank * SEMAPHORE_NBYTES).create()
        cell_nbytes = _cell_nbytes(size, budget_nbytes)
        for source in range(size):
            for target in range(size):
                if source != target:
                    create_ring(segment, offset + _ring_offset(source, target, size, cell_nbytes))

    def send(self, tensor: Tensor, peer: int, tag: int) -> Transfer:
        """Begin to send a tensor to a rank of the group. Does not wait.

        The work is done when the tensor may be changed again: its bytes are then in the ring, or received.

        Raises:
            RuntimeError: The tensor is not dense and contiguous on the CPU, or `tag` is negative.
            ValueError: The peer is not in the group.
            DistBackendError: The group is aborted.
        """
        self._check(tensor, peer, tag)
        progress = self._progress
        transfer = Transfer(progress, tensor, peer=peer, tag=tag, sends=True)
        with progress.changed:
            self._refuse_if_failed()
            progress.begin()
            if peer == self.rank:
                self._send_to_self(transfer)
            else:
                self._sends.setdefault(peer, deque()).append(transfer)
                self._push(peer)
        progress.hand_over(transfer)
        return transfer

    def receive(self, tensor: Tensor, peer: int | None, tag: int) -> Transfer:
        """Begin to receive a tensor from a rank of the group, or from any (None). Does not wait.

        A message that is shorter than the tensor fills its beginning; one that is longer is an error of this work only.
        Once the work is done, its `source_rank()` returns the sender. Raises the same errors as `send`.
        """
        self._check(tensor, peer, tag)
        progress = self._progress
        transfer = Transfer(progress, tensor, peer=peer, tag=tag, sends=False)
        with progress.changed:
            self._refuse_if_failed()
            progress.begin()
            if not self._find_aside(transfer):
                self._receives.append(transfer)
                for source in self._sources(transfer):
                    self._pull(source, False)
                    if transfer.over:
                        break
        progress.hand_over(transfer)
        return transfer

    def close(self) -> None:
        """End pending transfers with an error, and the worker. Peers can still receive messages that are in rings."""
        if os.getpid() == self._pid:
            self._progress.close(DistBackendError("the process group was destroyed before this transfer ended"))

    # The methods below are called with the condition held.

    def _advance(self, makes_room: bool) -> bool:
        """Move all data that can be moved. Return True if there was any."""
        moved = False
        for peer in list(self._sends):
            moved |= self._push(peer)
        named = {receive.peer for receive in self._receives}
        for source in self._turns() if makes_room or None in named else [*self._arriving, *named]:
            if source is not None and source != self.rank:
                moved |= self._pull(source, makes_room)
        return moved

    def _push(self, peer: int) -> bool:
        """Fill cells of the ring to a peer. Return True if any was filled."""
        queue, writer, semaphore, moved = self._sends[peer], self._writers[peer], self._wakeups[peer], False
        while queue and writer.may_write():
            transfer = queue[0]
            piece = min(self._cell_nbytes, transfer.nbytes - transfer.moved)
            writer.write(transfer.tag, transfer.nbytes, transfer.address + transfer.moved, piece)
            semaphore.post()
            moved = True
            transfer.moved += piece
            if transfer.moved == transfer.nbytes:
                queue.popleft()
                self._progress.end(transfer)
        if not queue:
            del self._sends[peer]
        return moved

    def _pull(self, source: int, makes_room: bool) -> bool:
        """Empty cells of the ring from a peer, if a receive may need them or to make room. Return True if any was."""
        reader, moved = self._readers[source], False
        while reader.may_read():
            message = self._arriving.get(source)
            if message is None:
                message = self._open(source, *reader.header(), makes_room=makes_room)
                if message is None:
                    break
                self._arriving[source] = message
            piece = min(self._cell_nbytes, message.total - message.arrived)
            fits = message.address != 0
            if reader.read(message.address + message.arrived, piece if fits else 0):
                self._wakeups[source].post()
            moved = True
            message.arrived += piece
            if message.arrived == message.total:
                del self._arriving[source]
                if message.receive is not None:
                    self._deliver(message, message.receive, source)
        return moved

    def _open(self, source: int, tag: int, total: int, *, makes_room: bool) -> _SharedMessage | None:
        """Begin to read a message: into its receive, or put it aside. Return None if it is to stay in the ring."""
        wanted = makes_room
        for receive in self._receives:
            if receive.peer is None or receive.peer == source:
                if receive.tag == tag:
                    self._receives.remove(receive)
                    if receive.peer is None:
                        self._last_any = source
                    message = _SharedMessage(tag, total)
                    message.receive = receive
                    message.address = receive.address if total <= receive.nbytes else 0
                    return message
                wanted = True  # its message may be behind this one
        if not wanted:
            return None
        message = _SharedMessage(tag, total)
        message.keep()
        self._aside[source].append(message)
        return message

    def _deliver(self, message: _SharedMessage, receive: Transfer, source: int) -> None:
        """End a receive whose message has arrived."""
        if message.total > receive.nbytes:
            error = RuntimeError(
                f"{self._progress.describe(receive)}: {self._waiting.names([source])} sent {message.total} bytes, "
                "which do not fit. Receive into a tensor of the size and dtype that was sent."
            )
            self._progress.end(receive, error, source=source)
            return
        if message.buffer is not None and message.total:
            ctypes.memmove(receive.address, message.address, message.total)
        if message.buffer is not None:
            self._aside[source].remove(message)
        self._progress.end(receive, source=source)

    def _find_aside(self, receive: Transfer) -> bool:
        """Match a new receive with the first message put aside for it. Return True if there is one."""
        for source in self._turns() if receive.peer is None else (receive.peer,):
            for message in self._aside[source]:
                if message.tag == receive.tag and message.receive is None:
                    message.receive = receive
                    if receive.peer is None:
                        self._last_any = source
                    if message.arrived == message.total:
                        self._deliver(message, receive, source)
                    return True
        return False

    def _send_to_self(self, transfer: Transfer) -> None:
        message = self._open(self.rank, transfer.tag, transfer.nbytes, makes_room=True)
        assert message is not None
        if message.address and transfer.nbytes:
            ctypes.memmove(message.address, transfer.address, transfer.nbytes)
        message.arrived = message.total
        self._progress.end(transfer)
        if message.receive is not None:
            self._deliver(message, message.receive, self.rank)

    def _sources(self, receive: Transfer) -> list[int]:
        """Return the ranks whose rings may contain the message of a receive; from any: all others, in turn."""
        return [r for r in (self._turns() if receive.peer is None else (receive.peer,)) if r != self.rank]

    def _turns(self) -> list[int]:
        """Return all ranks, beginning after the one that was received from last: a busy one starves no other."""
        return [(self._last_any + 1 + i) % self.size for i in range(self.size)]

    def _awaited(self) -> list[int]:
        """Return the ranks that pending transfers name."""
        arriving = [source for source, message in self._arriving.items() if message.receive is not None]
        return [*{*self._sends, *arriving, *(r.peer for r in self._receives if r.peer is not None)} - {self.rank}]

    def _end_all(self, error: Exception) -> None:
        """End pending transfers with an error, and refuse new ones."""
        self._failure = error
        receives = [*self._receives, *(m.receive for ms in self._aside for m in ms if m.receive is not None)]
        receives += [m.receive for m in self._arriving.values() if m.receive is not None and m.buffer is None]
        for transfer in [*receives, *(t for queue in self._sends.values() for t in queue)]:
            self._progress.end(transfer, error)
        self._receives, self._sends, self._arriving = [], {}, {}
        self._aside = [[] for _ in range(self.size)]

    def _end_with(self, ranks: Collection[int], error: Exception) -> None:
        """End pending transfers with some ranks, which will move no data any more."""
        for rank in ranks:
            ended = [receive for receive in self._receives if receive.peer == rank]
            ended += [message.receive for message in self._aside[rank] if message.receive is not None]
            arriving = self._arriving.pop(rank, None)
            if arriving is not None and arriving.receive is not None and arriving.buffer is None:
                ended.append(arriving.receive)
            for transfer in [*ended, *self._sends.pop(rank, ())]:
                self._progress.end(transfer, error)
            self._receives = [receive for receive in self._receives if receive.peer != rank]
            self._aside[rank] = [message for message in self._aside[rank] if message.arrived == message.total]

    def _refuse_if_failed(self) -> None:
        if self._failure is not None:
            raise DistBackendError(f"{self._failure}. Nothing can be sent in this group any more: make a new one")

    def _check(self, tensor: Tensor, peer: int | None, tag: int) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"process {os.getpid()} was forked from rank {self.rank} and is not part of the group: let the rank "
                "itself send and receive, or start a group among the new processes"
            )
        self._waiting.check()
        if peer is not None and not 0 <= peer < self.size:
            raise ValueError(f"rank {peer} is not in the group, which has {self.size} ranks")
        if tag < 0:
            raise RuntimeError(f"Tag must be nonnegative, and is {tag}")
        if tensor.layout != torch.strided:
            raise RuntimeError(f"input tensor has to be dense, and is {tensor.layout}: send its parts, or to_dense()")
        if tensor.device.type != "cpu":
            raise RuntimeError(f"shm moves tensors of the CPU, and this one is on {tensor.device}: send tensor.cpu()")
        if not tensor.is_contiguous():
            raise RuntimeError(
                f"input tensor has to be contiguous, and has shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}: use tensor.contiguous()"
            )
        if tensor.is_neg() or tensor.is_conj():
            raise RuntimeError("a view that shows its memory negated or conjugated cannot travel: use tensor.clone()")


def _cell_nbytes(size: int, budget_nbytes: int) -> int:
    """Return the size of a cell: the largest power of two, within limits, with which all rings fit the budget."""
    rings = max(1, size * (size - 1))
    cell = _LARGEST_CELL
    while cell > _SMALLEST_CELL and rings * ring_nbytes(cell) > budget_nbytes:
        cell //= 2
    return cell


def _ring_offset(source: int, target: int, size: int, cell_nbytes: int) -> int:
    """Return the offset of a ring from the beginning of the messages. There is none from a rank to itself."""
    number = source * (size - 1) + (target - 1 if target > source else target)
    return aligned(size * SEMAPHORE_NBYTES) + number * ring_nbytes(cell_nbytes)
