"""One buffer during a step: its value before the step, whether it has changed, and its value in a virtual rank."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from unisono.errors import LossError

__all__ = ["BufferKind", "TrackedBuffer"]


class BufferKind(NamedTuple):
    """The shape and dtype that one virtual rank gave a buffer that was None before the step."""

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

    @property
    def numel(self) -> int:
        """The number of its elements; 0 if it is None."""
        return 0 if self.tensor is None else self.tensor.numel()

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
        return not torch.equal(current, self.before)

    def keep(self) -> bool:
        """Record the present value as the one before the step. Return True if its number of elements has changed."""
        numel, self.written = self.numel, True
        if self.current is not self.tensor or self.tensor is None or self.before is None:
            self._take()
        else:
            self.before.copy_(self.tensor.detach())
            self.version = _version(self.tensor)
        return self.numel != numel

    def commit(self, value: Tensor) -> None:
        """Write the value after a step, and keep the one from before it for `undo`."""
        assert self.before is not None
        self.put(value)
        before = self._previous
        if before is None or before.shape != self.before.shape or before.dtype != self.before.dtype:
            before = torch.empty_like(self.before)
        self._previous, self.before = self.before, before
        self.keep()

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

    def _take(self) -> None:
        self.tensor = self.current
        if self.tensor is None:
            self.before, self.version = None, 0
        else:
            self.before, self.version = self.tensor.detach().clone(), _version(self.tensor)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
