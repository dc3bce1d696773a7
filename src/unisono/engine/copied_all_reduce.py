"""All-reduce of a vector on a GPU over a backend that moves the memory of the CPU, such as gloo."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.collectives.world import World
from unisono.engine.step_transaction import StepTransaction
from unisono.engine.tree_all_reduce import NodeLayout, TreeAllReduce

__all__ = ["CopiedAllReduce"]


class CopiedAllReduce:
    """An all-reduce of copies on the CPU, with the bits of one on the GPU, since additions round alike there.

    See `AllReduce`. `launch` waits until the GPU has computed the rows. Traffic between GPU and CPU: the rows, and the
    sum.
    """

    phases = TreeAllReduce.phases

    def __init__(
        self, world: World, numel: int, *, widest: NodeLayout, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._copies = TreeAllReduce(world, numel, widest=widest, dtype=dtype, device=torch.device("cpu"))
        self._rank, self._nodes = world.rank, len(widest.nodes[world.rank])
        self.numel = self._copies.numel
        """The length of the vector, padded."""
        self.rows = torch.zeros(len(self._copies.rows), self.numel, dtype=dtype, device=device).unbind()
        """This rank's rows, each of shape [numel]; unused padding stays zero."""

    def start(self, layout: NodeLayout) -> None:
        """Begin a step. The rows may be written after this call."""
        self._nodes = len(layout.nodes[self._rank])
        self._copies.start(layout)

    def launch(self) -> None:
        """Send this rank's rows; see `AllReduce`."""
        for row, copy in zip(self.rows[: self._nodes], self._copies.rows[: self._nodes], strict=True):
            copy.copy_(row)
        self._copies.launch()

    def advance(self) -> None:
        """Perform the work that precedes the wait for the result."""
        self._copies.advance()

    @property
    def total(self) -> Tensor:
        """The buffer, of shape [numel], that holds the sum of this step after `finish` and until the next `start`."""
        return self.rows[0]

    def finish(self, step: StepTransaction) -> Tensor:
        """Wait for the sum, and return it."""
        self.total.copy_(self._copies.finish(step))
        return self.total
