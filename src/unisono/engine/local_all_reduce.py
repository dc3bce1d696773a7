"""The all-reduce of one rank, in engines that are made for several."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.engine.step_transaction import StepTransaction
from unisono.engine.tree_all_reduce import NodeLayout

__all__ = ["LocalAllReduce"]


class LocalAllReduce:
    """The all-reduce of a rank that is alone, whose row is the sum; see `AllReduce`."""

    phases = 0

    def __init__(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.numel = numel
        """The length of the vector."""
        self.rows = (torch.zeros(numel, dtype=dtype, device=device),)
        """The one row."""

    def start(self, layout: NodeLayout) -> None:
        """Begin a step."""

    def launch(self) -> None:
        """Do nothing: there is nobody to send to."""

    def advance(self) -> None:
        """Do nothing, as `launch`."""

    @property
    def total(self) -> Tensor:
        """The buffer that holds the sum."""
        return self.rows[0]

    def finish(self, step: StepTransaction) -> Tensor:
        """Return the sum."""
        return self.total
