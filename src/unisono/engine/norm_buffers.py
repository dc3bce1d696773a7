"""The buffers of norm layers in training, which every forward pass changes: kept and restored by few calls of torch.

A call for each buffer takes several times as long: a ResNet-50 has 159 of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from unisono.engine.foreach_copies import foreach_copy
from unisono.engine.tracked_buffer import TrackedBuffer

__all__ = ["NormBuffers"]


class NormBuffers:
    """Those of some tracked buffers that belong to norm layers in training, and lie in their places.

    Args:
        tracked: The buffers, of which those that this class handles are chosen.
    """

    def __init__(self, tracked: Sequence[TrackedBuffer]) -> None:
        chosen = {i: each for i, each in enumerate(tracked) if _is_usual(each)}
        self._numbers = [*chosen]
        self.rest = [(i, each) for i, each in enumerate(tracked) if i not in chosen]
        """All others, with their numbers."""
        self._chosen = [*chosen.values()]
        self._tensors = [tensor for each in self._chosen if (tensor := each.tensor) is not None]
        self._places = [(each.module._buffers, each.name) for each in self._chosen]
        norms = {id(each.module): each.module for each in tracked if isinstance(each.module, _NormBase)}
        self._norms = [*norms.values()]
        self._modes = [norm.training for norm in self._norms]
        self._values: dict[int, list[Tensor]] = {}
        """Memory for the values of each leaf."""

    def are_in_place(self) -> bool:
        """Return True if all are those that were chosen, and would be chosen again."""
        present = [buffers.get(name) for buffers, name in self._places]
        return [norm.training for norm in self._norms] == self._modes and all(map(is_, present, self._tensors))

    def keep(self) -> None:
        """Record the present values as those before the step."""
        if not self._chosen:
            return
        foreach_copy(self._before(), self._tensors)
        self._note_written()

    def take(self, leaf: int) -> dict[int, Tensor]:
        """Return a leaf's values by the numbers of the buffers, valid until the next step, and restore all buffers."""
        if not self._chosen:
            return {}
        values = self._values.get(leaf)
        if values is None:
            values = self._values[leaf] = [*map(torch.empty_like, self._before())]
        foreach_copy(values, self._tensors)
        foreach_copy(self._tensors, self._before())
        self._note_written()
        return dict(zip(self._numbers, values, strict=True))

    def _before(self) -> list[Tensor]:
        return [before for each in self._chosen if (before := each.before) is not None]

    def _note_written(self) -> None:
        for each, tensor in zip(self._chosen, self._tensors, strict=True):
            each.version, each.written = tensor._version, True


def _is_usual(tracked: TrackedBuffer) -> bool:
    module, tensor = tracked.module, tracked.tensor
    return (
        isinstance(module, _NormBase)
        and module.training
        and tensor is not None
        and tensor is tracked.current
        and tracked.before is not None
        and not tensor.is_complex()
        and not tensor.is_inference()
        and not tensor.requires_grad
    )
