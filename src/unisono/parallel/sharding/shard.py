"""The public settings of a model that is divided over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from unisono.arguments import choice, flag, whole
from unisono.text import a_type

__all__ = ["Shard"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Divides a model over ranks, for `Trainer(parallel=...)`, with the bits of one process.

    Each rank keeps a part of all parameters, and of the optimizer's state, and gets the sum of the gradients for that
    part alone. The parameters of a block come together while it computes. With one rank, the model stays whole, unless
    `offload` keeps it in memory of the CPU.

    >>> Shard(by=["layers.0", "layers.1"]).by
    ('layers.0', 'layers.1')

    Args:
        by: Which parameters come together when. "block": those of a block while it is called; blocks are the items of
            the model's lists of layers (`ModuleList`, `ModuleDict` and `Sequential`, the outermost ones) and the
            modules beside those lists, except embeddings, since models use these elsewhere, too, and blocks of less
            than 1 % of the parameters. Names of submodules, such as [f"layers.{i}" for i in range(12)], are these
            blocks and no others. What belongs to no block, or to several, is together during the whole step. "size":
            parameters that follow each other, in units of about equal bytes, while operations of torch read one of
            them, whatever the modules are.
        unit_bytes: The size of a unit, in bytes. With by="block", blocks that follow each other come together at once
            while they have no more than that; None: 1 MiB. With by="size", a larger parameter is a unit of its own;
            None: a sixteenth of the model, but at least 1 MiB.
        zero: 3 divides weights, gradients and the optimizer's state. 1 divides the optimizer's state alone: weights
            are whole on each rank at any time, and gradients until they are summed. (The numbers are those of
            Rajbhandari et al., "ZeRO", 2020.)
        replicas: How many times the weights are there: ranks = replicas x the ranks that each replica is divided over,
            which follow each other. The optimizer's state is there once in any case.
        offload: Keep each rank's parts in memory of the CPU, and update them there, where models compute on GPUs: a GPU
            has the parameters and gradients of the blocks that compute, and activations. With zero=1 a GPU has all
            weights, and the CPU the summed gradients and the optimizer's state. It also works with one rank. Bits are
            those of one rank with offload. On the CPU it changes nothing.
        sums: Where the gradients of a rank's earlier virtual ranks are kept, if it has several. "whole": on the rank
            until its last one, up to 1 + log2(virtual ranks of a rank) times the size of the model. "divided": in parts
            on all ranks; then they are sent after each virtual rank, v is computed by rank v mod W of W ranks, and a
            rank keeps at most 1 + log2(virtual ranks) times a W-th of the model. Changes no bit.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: There is no name, or one comes twice; a number is out of range; or arguments exclude each other.
    """

    by: Literal["block", "size"] | Sequence[str] = "block"
    unit_bytes: int | None = None
    zero: Literal[1, 3] = 3
    replicas: int = 1
    offload: bool = False
    sums: Literal["whole", "divided"] = "whole"

    def __post_init__(self) -> None:
        """Check the arguments."""
        self._check_by()
        if self.unit_bytes is not None:
            whole("unit_bytes", self.unit_bytes, least=1, meant="a number of bytes, such as 64 * 2**20")
            if not isinstance(self.by, str):
                raise ValueError(
                    f'unit_bytes={self.unit_bytes} is the size of units that by="block" or "size" finds, and these are '
                    "named: leave it out"
                )
        whole("replicas", self.replicas, least=1, meant="a whole number, such as 2")
        flag("offload", self.offload)
        choice("sums", self.sums, ("whole", "divided"))
        if whole("zero", self.zero) not in (1, 3):
            raise ValueError(
                f"zero={self.zero} must be 3, which divides weights, gradients and the optimizer's state, or 1, which "
                "divides the optimizer's state alone"
            )
        if self.zero == 1 and self.by != "block":
            raise ValueError(f"zero=1 keeps all weights on each rank, so by={self.by!r} has no meaning: leave it out")
        if self.zero == 1 and self.unit_bytes is not None:
            raise ValueError(
                f"zero=1 keeps all weights on each rank, so unit_bytes={self.unit_bytes} has no meaning: leave it out"
            )
        if self.zero == 1 and self.replicas > 1:
            raise ValueError(
                f"zero=1 keeps all weights on each rank already, so there are as many replicas as ranks: leave out "
                f"replicas={self.replicas}, or zero=1"
            )

    def _check_by(self) -> None:
        by: Any = self.by
        if isinstance(by, str) and by in ("block", "size"):
            return
        if isinstance(by, str) or not isinstance(by, Sequence):
            raise TypeError(
                f'by={by!r} is {a_type(by)}: give "block", "size", or the names of the submodules that come together '
                'when they are called, as in by=["layers.0", "layers.1"]'
            )
        for name in by:
            if not isinstance(name, str):
                raise TypeError(f"by={by!r} has {name!r}, {a_type(name)}, where the name of a submodule is due")
            if by.count(name) > 1:
                raise ValueError(f"by={by!r} has {name!r} {by.count(name)} times: name each submodule once")
        if not by:
            raise ValueError(
                'by=[] names no block, so that the whole model would be together in each step: give "block", or names'
            )
        object.__setattr__(self, "by", tuple(by))

    def offloads(self, device: torch.device) -> bool:
        """Return True if the parts of a model that computes on a device are kept in memory of the CPU."""
        return self.offload and device.type != "cpu"

    @property
    def names(self) -> tuple[str, ...] | None:
        """The blocks; None for "block" and "size"."""
        return None if isinstance(self.by, str) else tuple(self.by)
