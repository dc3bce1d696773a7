"""One buffer during a step: its value before the step, whether it has changed, and its value in a virtual rank."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from unisono.engine.foreach_copies import foreach_copy
from unisono.errors import LossError

__all__ = ["BufferKind", "TrackedBuffer", "commit"]

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes, _memcmp.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_int


class BufferKind(NamedTuple):
    """The shape and dtype of a buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class TrackedBuffer:
    """One buffer, the module that holds it, and its value before the step."""

    def __init__(self, path: str, module: nn.Module, name: str) -> None:
        self.path, self.module, self.name = path, module, name
        self.tensor: Tensor | None = None
        self.before: Tensor | None = None
        self.version = 0
        self._stand_in: Tensor | None = None
        self._previous: Tensor | None = None
        self.written = False
        """True if it has been written to since the run began."""
        self._take()

    @property
    def current(self) -> Tensor | None:
        """The value that the module has now."""
        buffers = self.module._buffers
        return buffers[self.name] if self.name in buffers else None  # noqa: SIM401  a scripted module has no dict

    @property
    def is_persistent(self) -> bool:
        """True if it is part of the model's state_dict."""
        return self.name not in getattr(self.module, "_non_persistent_buffers_set", ())

    def changed(self) -> bool:
        """Return True if it was written to or replaced since `before` was recorded; in training norm layers, always."""
        current = self.current
        if current is not self.tensor and not self.has_stand_in:
            return True
        if current is None or self.before is None:
            return False
        if current is self.tensor and _version(current) != self.version:
            return True
        if isinstance(self.module, _NormBase):
            return self.module.training
        return not _is_same(current, self.before)

    def was_written(self) -> bool:
        """Return True if its value is not the one that the last step left; as `changed`, but for norm layers, too."""
        current, before = self.current, self.before
        if current is None or before is None:
            return current is not before
        if isinstance(self.module, _NormBase) and current is self.tensor and _version(current) == self.version:
            return False
        return not _is_same(current, before)

    def keep(self) -> bool:
        """Record the present value as the one before the step. Return True if its shape or dtype has changed."""
        kind, self.written = self._kind(), True
        if self.current is not self.tensor or self.tensor is None or self.before is None:
            self._take()
        else:
            self.before.copy_(self.tensor.detach())
            self.version = _version(self.tensor)
        return self._kind() != kind

    def turn(self) -> Tensor:
        """Keep `before` as the value from before the last commit, and return memory that takes its place."""
        before, spare = self.before, self._previous
        assert before is not None
        if spare is None or spare.shape != before.shape or spare.dtype != before.dtype:
            spare = torch.empty_like(before)
        self._previous, self.before = before, spare
        return spare

    def note_written(self) -> None:
        """Note that the value that the tensor has now was written on purpose."""
        assert self.tensor is not None
        self.version, self.written = _version(self.tensor), True

    def undo(self) -> None:
        """Restore the value from before the last `commit`, if nothing has been written since."""
        assert self._previous is not None
        self.put(self._previous)
        self.keep()

    def put_back(self) -> None:
        """Restore the value from before the step."""
        if self.tensor is None or self.before is None:
            self.module._buffers[self.name] = None
        elif self.has_stand_in:
            self.module._buffers[self.name] = self.tensor  # which nobody has written to
        else:
            self.put(self.before)
        self._stand_in = None

    @property
    def has_stand_in(self) -> bool:
        """True if the module holds the copy that `stand_in` put there."""
        return self._stand_in is not None and self.current is self._stand_in

    def stand_in(self) -> None:
        """Make the next forward pass write to a copy, and keep the tensor that graphs of earlier passes have read.

        torch's norm layers write running statistics without raising the tensor's version, and those of a single sample
        read them in backward.
        """
        if self.current is not None:
            self._stand_in = self.module._buffers[self.name] = self.current.detach().clone()

    def put(self, value: Tensor) -> None:
        """Write a value into the tensor that the module had before the step, and put that tensor back in its place."""
        assert self.tensor is not None
        with torch.no_grad():
            self.tensor.copy_(value)
        self.module._buffers[self.name] = self.tensor
        self.version = _version(self.tensor)

    def make(self, kind: BufferKind, device: torch.device) -> None:
        """Make a tensor of zeros for a buffer that was None."""
        self.tensor = torch.zeros(kind.shape, dtype=kind.dtype, device=device)
        self.before, self.version = self.tensor.clone(), _version(self.tensor)

    def check(self) -> None:
        """Raise LossError if a leaf gave the buffer a value that virtual ranks could not agree on."""
        value = self.current
        where = f"buffer {self.path!r} of {type(self.module).__name__}"
        if value is None:
            raise LossError(
                f"{where} was set to None in the forward pass: virtual ranks could not agree on its value. Leave the "
                "tensor in its place, or keep what is no state of the model in an attribute that is no buffer."
            )
        if value.is_complex():
            raise LossError(
                f"{where} is complex and changes in the forward pass; its mean over virtual ranks is not defined here. "
                "Keep its parts as real buffers."
            )
        if self.before is not None and value.shape != self.before.shape and self.is_persistent:
            raise LossError(
                f"{where} had shape {list(self.before.shape)} before the forward pass and has {list(value.shape)} "
                "after it, of which virtual ranks can have no mean. Give it its final shape from the beginning; or, if "
                "it is only a cache, register it with persistent=False."
            )

    def taken(self) -> Tensor | None:
        """Return a leaf's value of the buffer, or None if it is not kept, and restore the value before the step."""
        self.check()
        value, before = self.current, self.before
        assert value is not None
        if value is self.tensor:
            value = value.detach().clone()  # before the next line writes there
        self.put_back()
        if before is not None and value.shape != before.shape:
            return None  # a cache, which each virtual rank makes anew
        return value.detach().to(value.dtype if before is None else before.dtype)

    def _kind(self) -> BufferKind | None:
        return None if self.before is None else BufferKind(tuple(self.before.shape), self.before.dtype)

    def _take(self) -> None:
        self.tensor = self.current
        if self.tensor is None:
            self.before, self.version = None, 0
        else:
            self.before, self.version = self.tensor.detach().clone(), _version(self.tensor)


def commit(buffers: Sequence[TrackedBuffer], values: list[Tensor]) -> None:
    """Write the values after a step, and keep those from before it for `undo`."""
    if not buffers:
        return
    tensors = [tensor for buffer in buffers if (tensor := buffer.tensor) is not None]
    with torch.no_grad():
        foreach_copy(tensors, values)
        foreach_copy([buffer.turn() for buffer in buffers], tensors)
    for buffer, tensor in zip(buffers, tensors, strict=True):
        buffer.module._buffers[buffer.name] = tensor
        buffer.note_written()


def _is_same(left: Tensor, right: Tensor) -> bool:
    """Return True if two tensors have the same values; on the CPU, if they have the same bits."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if type(left) is type(right) is Tensor and all(map(_is_plain, (left, right))):
        # torch compares element by element, which takes 5 to 100 times as long.
        return not _memcmp(left.data_ptr(), right.data_ptr(), left.nbytes)
    return torch.equal(left, right)


def _is_plain(tensor: Tensor) -> bool:
    is_stored = tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.is_contiguous()
    return is_stored and not tensor.is_conj() and not tensor.is_neg()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
