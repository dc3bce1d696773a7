"""The public settings of a model that is divided over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unisono.text import a_type

__all__ = ["Shard"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Divides a model over ranks, for `Trainer(parallel=...)`, with the bits of one process.

    Each rank keeps a part of all parameters, and of the optimizer's state, and gets the sum of the gradients for that
    part alone. The parameters of a block come together while it computes. With one rank, the model stays whole.

    >>> Shard(by=["layers.0", "layers.1"])
    Shard(by=('layers.0', 'layers.1'))

    Args:
        by: The blocks: the names of submodules whose parameters come together when they are called, such as
            [f"layers.{i}" for i in range(12)]. "block" takes the items of the model's lists of layers (`ModuleList`,
            `ModuleDict` and `Sequential`, the outermost ones) and the modules beside those lists, except embeddings,
            since models use these elsewhere, too, and blocks of less than 1 % of the parameters. What belongs to no
            block, or to several, is together during the whole step.

    Raises:
        TypeError: by is neither "block" nor names.
        ValueError: There is no name, or one comes twice.
    """

    by: Literal["block"] | Sequence[str] = "block"

    def __post_init__(self) -> None:
        """Check the arguments."""
        by: Any = self.by
        if by == "block" and isinstance(by, str):
            return
        if isinstance(by, str) or not isinstance(by, Sequence):
            raise TypeError(
                f'by={by!r} is {a_type(by)}: give "block", or the names of the submodules that come together when '
                'they are called, as in by=["layers.0", "layers.1"]'
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

    @property
    def names(self) -> tuple[str, ...] | None:
        """The blocks; None for "block"."""
        return None if isinstance(self.by, str) else tuple(self.by)
