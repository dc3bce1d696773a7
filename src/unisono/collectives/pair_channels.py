"""Messages between two ranks of a group that are under way in both directions at once, as those of a pipeline are."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Channel", "PairChannels"]

Channel = tuple[int, int]
"""The numbers of the two ends, which no other channel has."""

_numbers = itertools.count()
"""Numbers of the channels of this process. Ranks make them in the same order."""


class PairChannels:
    """Channels from one rank of a group to another, in which messages arrive in the order in which they were sent.

    Backends of the CPU match a message by its tag, so channels need nothing of their own. NCCL does not know tags: what
    a rank sends to others and receives from them over one communicator takes place in the order of its calls, and a
    receive that is posted early would keep back all that is sent after it. So over NCCL each channel has a communicator
    of its own.

    Args:
        group: The group. Every rank must make its channels in the same order.
        device: From where messages travel: the GPU over NCCL, otherwise the CPU.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self.device = group, device
        self._name = f"unisono_channels_{next(_numbers)}/{group.group_name}"
        self._pairs: dict[Channel, Any] = {}

    def open(self, channel: Channel, *, sends: bool) -> None:
        """Open a channel, which waits for the rank at the other end.

        Every rank must open its channels in the same order, so that none waits for one that waits for another.

        Args:
            channel: The channel.
            sends: True on the rank that sends, False on the one that receives.
        """
        if self.device.type == "cpu" or channel in self._pairs:
            return
        store = dist.distributed_c10d._get_default_store()
        name = f"{self._name}/{channel[0]}-{channel[1]}"
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._group._get_backend(self.device).options._timeout
        pair = dist.ProcessGroupNCCL(dist.PrefixStore(name, store), 0 if sends else 1, 2, options)  # type: ignore[attr-defined]
        pair.eager_connect_single_device(self.device)
        self._pairs[channel] = pair

    def send(self, message: Tensor, rank: int, channel: Channel, *, tag: int) -> dist.Work:
        """Begin to send a message, which must stay as it is until the work is done.

        Args:
            message: The message.
            rank: The receiver, as the group counts it.
            channel: The channel, which is open.
            tag: Tells the messages of all channels apart.
        """
        if self.device.type == "cpu":
            work = dist.isend(message, group=self._group, group_dst=rank, tag=tag)
            assert work is not None
            return work
        pair = self._pairs[channel]
        pair._start_coalescing()  # torch warns of operations between two ranks that are not in a batch
        pair.send([message], 1, 0)
        sent: dist.Work = pair._end_coalescing()
        return sent

    def receive(self, memory: Tensor, rank: int, channel: Channel, *, tag: int) -> dist.Work:
        """Begin to receive a message; see `send`."""
        if self.device.type == "cpu":
            work = dist.irecv(memory, group=self._group, group_src=rank, tag=tag)
            assert work is not None
            return work
        pair = self._pairs[channel]
        pair._start_coalescing()
        pair.recv([memory], 0, 0)
        received: dist.Work = pair._end_coalescing()
        return received

    def close(self) -> None:
        """End the communicators. No message may be under way."""
        for pair in self._pairs.values():
            pair.shutdown()
        self._pairs.clear()
