"""A tensor that another stage has: it knows its shape, type, strides and device, and holds no values.

Functions that need only these, such as `torch.zeros_like`, accept it. All others fail, with the line of the model's
code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from unisono.errors import CutError
from unisono.parallel.pipeline.model_line import model_line

__all__ = ["METADATA_OPERATORS", "Placeholder", "TensorLayout"]

_aten = torch.ops.aten

METADATA_OPERATORS = frozenset(
    {
        _aten.empty_like.default,
        _aten.zeros_like.default,
        _aten.ones_like.default,
        _aten.full_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
        _aten.new_zeros.default,
        _aten.new_ones.default,
        _aten.new_full.default,
    }
)
"""Operators whose result does not depend on the values of their tensor."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The facts about a tensor of another stage that a stage needs to receive it or to replace it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> TensorLayout:
        """Return the layout of a tensor, real or fake."""
        return TensorLayout(
            tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device, bool(tensor.requires_grad)
        )

    def allocate(self) -> Tensor:
        """Return an uninitialised tensor of this layout, which requires no gradient."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


class Placeholder(Tensor):
    """A tensor without values.

    Args:
        layout: What it looks like.
        fake: Its fake tensor while a program is recorded, so that a block finds it in containers that cannot be
            looked into. None in a stage.
        where: Where the value is, for messages.
    """

    fake: Tensor | None
    origin: str

    @staticmethod
    def __new__(cls, layout: TensorLayout, fake: Tensor | None, where: str) -> Placeholder:
        """Make the tensor object, which has no storage."""
        made: Placeholder = torch.Tensor._make_wrapper_subclass(
            cls,
            layout.shape,
            strides=layout.strides,
            dtype=layout.dtype,
            device=layout.device,
            requires_grad=layout.requires_grad,
        )
        made.fake = fake
        made.origin = where
        return made

    def __init__(self, layout: TensorLayout, fake: Tensor | None, where: str) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator that needs no values; raise CutError for all others."""
        found: list[Placeholder] = []
        tree_map_only(Placeholder, found.append, (args, dict(kwargs or {})))
        if all(one.fake is not None for one in found):
            args, kwargs = tree_map_only(Placeholder, lambda one: one.fake, (args, dict(kwargs or {})))
            return func(*args, **(kwargs or {}))
        if func in METADATA_OPERATORS:
            args, kwargs = tree_map_only(
                Placeholder, lambda one: TensorLayout.of(one).allocate(), (args, dict(kwargs or {}))
            )
            return func(*args, **(kwargs or {}))
        raise CutError(
            f"{func} reads a tensor of shape {tuple(found[0].shape)}, {found[0].origin}, at {model_line()}. Code "
            "between blocks must reach tensors through torch's functions, so that they run where the values are."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder(shape={tuple(self.shape)}, dtype={self.dtype}, {self.origin})"
