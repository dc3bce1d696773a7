"""Finds what a function writes to the persistent buffers of models outside of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from unisono.engine.model_contents import member_name, plain_name
from unisono.errors import LossError

__all__ = ["BufferWrites"]


class BufferWrites:
    """The persistent buffers of models as they are when this is made.

    Others may be caches, of which each rank has its own. torch's norm layers write nothing in evaluation mode.

    Args:
        models: A model, or several by name.
    """

    def __init__(self, models: Any) -> None:
        named = models if isinstance(models, Mapping) else {"": models}
        self._places = [
            (member_name(plain_name(path), name), module, name)
            for prefix, model in named.items()
            if isinstance(model, nn.Module)
            for path, module in model.named_modules(prefix=prefix)
            for name in module._buffers.keys()  # noqa: SIM118  a scripted module's are no dict
            if name not in getattr(module, "_non_persistent_buffers_set", ())
        ]
        self._before = self._present()

    def refuse(self, what: str) -> None:
        """Raise LossError if a buffer has been written or replaced since; `what` names the function that was called."""
        now = self._present()
        if now == self._before:
            return
        path = next(path for (path, *_), a, b in zip(self._places, now, self._before, strict=True) if a != b)
        raise LossError(
            f"{what} wrote to buffer {path!r}: ranks call it for different samples, and would go on with different "
            "values. Write to the buffer only where self.training is true; or, if it is a cache, register it with "
            "persistent=False."
        )

    def _present(self) -> list[tuple[int, int]]:
        places = [(module._buffers, name) for _, module, name in self._places]
        return [_identity(buffers[name] if name in buffers else None) for buffers, name in places]  # noqa: SIM401


def _identity(tensor: Tensor | None) -> tuple[int, int]:
    """Return what differs once a tensor has been written, replaced or deleted."""
    return (0, 0) if tensor is None else (id(tensor), 0 if tensor.is_inference() else tensor._version)
