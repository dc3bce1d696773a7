"""Buckets: one piece of memory for the gradients of several parameters, which travels as one message.

A bucket's memory becomes p.grad of its parameters. A later backward reuses it only if nothing refers to any part of it
any more: a gradient that the program keeps across steps, or accumulates into, keeps its values. `parallel.reducer`
decides which bucket is sent when.
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
    """True if its gradient is a sparse tensor, as that of Embedding(sparse=True)."""


class Bucket:
    """Contiguous memory for the gradients of some parameters of one dtype and device.

    Args:
        members: The indices of the parameters that belong to the bucket.
        parameters: All parameters of the model.
    """

    def __init__(self, members: Sequence[int], parameters: Sequence[Parameter]) -> None:
        self.members = list(members)
        """Indices of the parameters."""
        self._names = [parameters[i].name for i in self.members]
        self.tensors: list[Tensor] = [parameters[i].tensor for i in self.members]
        self.dtype, self.device = self.tensors[0].dtype, self.tensors[0].device
        self.numel = sum(t.numel() for t in self.tensors)
        self.trailer_numel = 0
        """The number of elements behind the gradients, for the trailer (`parallel.trailer`)."""
        self.waiting = 0
        """The number of expected gradients that have not come yet in this backward."""
        self.usual = 0
        """The number of gradients that are expected in every backward."""
        self.sent = False
        self.memory: Tensor | None = None
        """The gradients of this backward, and the trailer; None between backwards."""
        self.views: Sequence[Tensor] = ()
        """Views of `memory` in the shapes of the parameters."""
        self._dense = all(t.is_contiguous() and t.numel() for t in self.tensors)
        self._kept: list[tuple[Tensor, torch.UntypedStorage]] = []

    @property
    def gradients(self) -> Tensor:
        """The memory without the trailer, as a vector."""
        assert self.memory is not None
        return self.memory[: self.numel] if self.trailer_numel else self.memory

    def open(self) -> None:
        """Allocate memory for this backward, or reuse memory that nothing else refers to. Its content is undefined."""
        if self.memory is not None:
            return
        for memory, storage in self._kept:
            # The tensor and the storage here are two owners; a third is a gradient that is still in use.
            if torch._C._storage_Use_Count(storage._cdata) == 2:
                self.memory = memory
                break
        else:
            self.memory = torch.empty(self.numel + self.trailer_numel, dtype=self.dtype, device=self.device)
            self._kept = [*self._kept[-1:], (self.memory, self.memory.untyped_storage())]
        self.views = self.views_of(self.memory)

    def close(self) -> None:
        """Drop the memory, which lives on in the gradients that refer to it."""
        self.memory, self.views, self.sent = None, (), False

    def resize_trailer(self, numel: int) -> None:
        """Reserve this number of elements behind the gradients from the next backward on."""
        if numel != self.trailer_numel:
            self.trailer_numel = numel
            self._kept = []

    def describe(self) -> str:
        """Return the names of the first and last parameter, for messages."""
        names = self._names
        return f"{names[0]!r}" if len(names) == 1 else f"{names[0]!r} to {names[-1]!r}"

    def views_of(self, vector: Tensor) -> Sequence[Tensor]:
        """Return views of a vector in the shapes and strides of the parameters."""
        if self._dense:
            views: Sequence[Tensor] = torch._C._nn.unflatten_dense_tensors(vector, self.tensors)
            return views
        views, offset = [], vector.storage_offset()
        for tensor in self.tensors:
            views.append(vector.as_strided(tensor.shape, dense_strides(tensor), offset))
            offset += tensor.numel()
        return views


def bytes_of_mb(mb: float, name: str) -> int:
    """Convert a size in MiB to bytes.

    Args:
        mb: The size.
        name: The name of the argument, for messages.

    Raises:
        TypeError: The size is not a number.
        ValueError: The size is not positive.
    """
    if isinstance(mb, bool) or not isinstance(mb, int | float):
        raise TypeError(f"{name}={mb!r} must be a number: it is the size of a message in MiB")
    if not mb > 0:
        raise ValueError(f"{name}={mb} must be positive; it is the size of a message in MiB")
    return max(1, int(mb * 1024 * 1024))
