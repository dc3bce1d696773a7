"""Communication hooks written for torch's DistributedDataParallel, such as fp16_compress_hook and powerSGD_hook.

A hook is called as hook(state, bucket) and returns a future of the bucket's mean over ranks. torch's GradBucket cannot
be constructed from Python; the class here has the same methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unisono.parallel.gradient_bucket import Bucket
from unisono.text import a_type

__all__ = ["CommHook", "GradBucket", "begin", "hook_and_state", "result_of"]

CommHook = Callable[[Any, Any], Any]


class GradBucket:
    """A bucket as communication hooks see it: the methods of torch.distributed.GradBucket."""

    def __init__(self, bucket: Bucket, *, index: int, is_last: bool) -> None:
        self._bucket, self._index, self._is_last = bucket, index, is_last
        self._buffer = bucket.gradients

    def index(self) -> int:
        """Return the bucket's index in the order in which buckets are sent."""
        return self._index

    def buffer(self) -> Tensor:
        """Return this rank's gradients, not divided by the number of ranks, as one vector."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Return views of `buffer` in the shapes of the parameters."""
        return list(self._bucket.views_of(self._buffer))

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of `gradients`."""
        return list(self._bucket.tensors)

    def is_last(self) -> bool:
        """Return True if this is the last bucket of a backward."""
        return self._is_last

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the vector that `buffer` returns."""
        self._buffer = buffer


def hook_and_state(comm_hook: CommHook | tuple[Any, CommHook], group: Any) -> tuple[CommHook, Any]:
    """Return the hook and its state, from the argument `comm_hook`: a hook, whose state is the group, or (state, hook).

    Raises:
        TypeError: The hook is not callable.
    """
    state, hook = comm_hook if isinstance(comm_hook, tuple) and len(comm_hook) == 2 else (group, comm_hook)
    if not callable(hook):
        raise TypeError(
            f"comm_hook={comm_hook!r} must be a function hook(state, bucket), or a pair (state, hook): what DDP's "
            "register_comm_hook(state, hook) takes"
        )
    return hook, state


def begin(hook: CommHook, state: Any, bucket: GradBucket) -> Any:
    """Call a hook and return its future.

    Raises:
        TypeError: The hook did not return a future.
    """
    future = hook(state, bucket)
    if not isinstance(future, torch._C.Future):
        raise TypeError(f"comm_hook gave {a_type(future)}; it must give a torch.futures.Future of a tensor")
    return future


def result_of(future: Any, bucket: Bucket) -> Tensor:
    """Return the result of a finished hook, as a vector of the bucket's type.

    Raises:
        TypeError: The result is not a tensor.
        ValueError: Its number of elements is not the bucket's.
    """
    value = future.value()
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if not isinstance(value, Tensor):
        raise TypeError(f"comm_hook gave a future of {type(value).__name__}; it must be one of a tensor")
    if value.numel() != bucket.numel:
        raise ValueError(
            f"comm_hook gave {value.numel()} elements for a bucket of {bucket.numel}: it must give all of them"
        )
    return value.view(-1) if value.dtype == bucket.dtype else value.view(-1).to(bucket.dtype)
