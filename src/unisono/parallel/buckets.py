"""Buckets: one piece of memory for the gradients of several parameters, which travels as one message.

A bucket's memory becomes p.grad of its parameters. It is used again in the next backward only if nobody holds any of it
any more: whoever keeps a gradient across steps, or accumulates into it, keeps its values. What bucket is sent when is
`parallel.reducer`'s affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.engine.norm import dense_strides

__all__ = ["Bucket", "Parameter", "bytes_of_mb"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a model that may get a gradient."""

    name: str
    tensor: torch.nn.Parameter
    sparse: bool
    """Whether its gradient is a sparse tensor, as that of Embedding(sparse=True)."""


class Bucket:
    """Some parameters of one dtype and device, one behind the other."""

    def __init__(self, members: Sequence[int], parameters: Sequence[Parameter]) -> None:
        self.members = list(members)
        """Indices of the parameters."""
        self._names = [parameters[i].name for i in self.members]
        self.tensors: list[Tensor] = [parameters[i].tensor for i in self.members]
        self.dtype, self.device = self.tensors[0].dtype, self.tensors[0].device
        self.numel = sum(t.numel() for t in self.tensors)
        self.trailer_numel = 0
        """Elements behind the gradients, for what ranks exchange beside them."""
        self.waiting = 0
        """Expected gradients that have not come yet in this backward."""
        self.usual = 0
        """Gradients that are expected in every backward."""
        self.sent = False
        self.memory: Tensor | None = None
        """The gradients of this backward, and the trailer; between backwards None."""
        self.views: Sequence[Tensor] = ()
        """`memory` as tensors like the parameters."""
        self._dense = all(t.is_contiguous() and t.numel() for t in self.tensors)
        self._kept: list[tuple[Tensor, torch.UntypedStorage]] = []

    @property
    def gradients(self) -> Tensor:
        """The memory without its trailer, as a vector."""
        assert self.memory is not None
        return self.memory[: self.numel] if self.trailer_numel else self.memory

    def open(self) -> None:
        """Take memory for this backward, whose content is undefined."""
        if self.memory is not None:
            return
        for memory, storage in self._kept:
            # Two owners are the tensor and the storage here; a third is somebody's gradient.
            if torch._C._storage_Use_Count(storage._cdata) == 2:
                self.memory = memory
                break
        else:
            self.memory = torch.empty(self.numel + self.trailer_numel, dtype=self.dtype, device=self.device)
            self._kept = [*self._kept[-1:], (self.memory, self.memory.untyped_storage())]
        self.views = self.views_of(self.memory)

    def close(self) -> None:
        """Give the memory to whom holds gradients in it."""
        self.memory, self.views, self.sent = None, (), False

    def resize_trailer(self, numel: int) -> None:
        """Have so many elements behind the gradients from the next backward on."""
        if numel != self.trailer_numel:
            self.trailer_numel = numel
            self._kept = []

    def describe(self) -> str:
        """Name the parameters, for messages."""
        names = self._names
        return f"{names[0]!r}" if len(names) == 1 else f"{names[0]!r} to {names[-1]!r}"

    def views_of(self, vector: Tensor) -> Sequence[Tensor]:
        """Show a vector as tensors shaped and strided like the parameters."""
        if self._dense:
            views: Sequence[Tensor] = torch._C._nn.unflatten_dense_tensors(vector, self.tensors)
            return views
        views, offset = [], vector.storage_offset()
        for tensor in self.tensors:
            views.append(vector.as_strided(tensor.shape, dense_strides(tensor), offset))
            offset += tensor.numel()
        return views


def bytes_of_mb(mb: float, name: str) -> int:
    """Convert a size in MiB to bytes. Raises: TypeError, or ValueError if it is not positive."""
    if isinstance(mb, bool) or not isinstance(mb, int | float):
        raise TypeError(f"{name}={mb!r} must be a number: it is the size of a message in MiB")
    if not mb > 0:
        raise ValueError(f"{name}={mb} must be positive; it is the size of a message in MiB")
    return max(1, int(mb * 1024 * 1024))
