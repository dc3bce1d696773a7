"""Code between layers on several devices: functions whose tensors are on different ones get them on one of them.

Start reading at `GlueMode.__torch_function__`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

from unisono.parallel.pipeline.functions import GETTERS
from unisono.parallel.placed.moving import on_device

__all__ = ["GlueMode", "current_glue", "glue"]

_MIXING = frozenset(
    {
        Tensor.to,
        Tensor.copy_,
        Tensor.type_as,
        getattr(Tensor.data, "__set__"),  # noqa: B009 - not in the type of a property
        getattr(Tensor.grad, "__set__"),  # noqa: B009
    }
)
"""Functions that are meant for tensors on different devices."""

_IN_PLACE = frozenset(
    f"__{name}__"
    for name in ("setitem", "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior")
)

_CURRENT: ContextVar[GlueMode | None] = ContextVar("unisono_glue", default=None)
"""That of the call of a placed model that runs in this thread."""


def current_glue() -> GlueMode | None:
    """Return the mode of the innermost placed model whose forward pass runs in this thread."""
    return _CURRENT.get()


@contextmanager
def glue(home: torch.device) -> Iterator[None]:
    """Run the forward pass of a placed model: between its layers, tensors meet on one device.

    Args:
        home: Where they meet before the first layer has been called.
    """
    mode = GlueMode(home)
    token = _CURRENT.set(mode)
    _push_mode(mode)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if not mode.is_off:  # off after an interrupt within a layer
            _pop_mode()  # type: ignore[no-untyped-call]
        _CURRENT.reset(token)


class GlueMode(TorchFunctionMode):
    """Moves the tensors of a function to the device of the layer that was called last, if they are on different ones.

    What a function changes in place stays where it is, and the others come to it. Within layers the mode is off.
    """

    def __init__(self, home: torch.device) -> None:
        super().__init__()
        self.is_off = False
        self._device = home
        self._depth = 0

    def enter_layer(self, device: torch.device) -> None:
        """Note that a layer is called, on a device."""
        self._device = device
        self._depth += 1
        # Off the stack, functions in a layer cost what they cost anywhere.
        if self._depth == 1 and _get_current_function_mode() is self:  # type: ignore[no-untyped-call]
            _pop_mode()  # type: ignore[no-untyped-call]
            self.is_off = True

    def leave_layer(self) -> None:
        """Note that a layer has ended, or failed."""
        self._depth = max(0, self._depth - 1)  # at 0 if another hook has raised before the layer was entered
        if not self._depth and self.is_off:
            _push_mode(self)  # type: ignore[no-untyped-call]
            self.is_off = False

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._depth or func in GETTERS or func in _MIXING:
            return func(*args, **kwargs)
        found = list(_tensors((*args, *kwargs.values())))
        # Every device accepts numbers that are tensors of the CPU.
        places = {each.device for each in found if each.dim() or not each.is_cpu}
        if len(places) > 1:
            name = getattr(func, "__name__", "")
            written = kwargs.get("out")
            if written is None and (name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))):
                written = args[0]
            device = written.device if isinstance(written, Tensor) else self._device
            args, kwargs = on_device((tuple(args), dict(kwargs)), device)
        return func(*args, **kwargs)


def _tensors(values: Sequence[Any], depth: int = 0) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif depth < 2 and isinstance(value, (list, tuple)):
            yield from _tensors(value, depth + 1)
