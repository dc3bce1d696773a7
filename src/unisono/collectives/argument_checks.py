"""Checks of the arguments of collectives, with their errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.collectives.call_description import describe
from unisono.collectives.group import Group
from unisono.text import a_type

__all__ = ["GroupArgument", "check_one_for_each", "check_parts", "follows", "only_tensor"]

GroupArgument = dist.ProcessGroup | int | None
"""A group of `unisono.subgroup`, `unisono.split` or torch; None is the whole job. An int marks a rank outside."""


def follows(tensor: Tensor) -> bool:
    """Return True if autograd records operations on a tensor now."""
    return tensor.requires_grad and torch.is_grad_enabled()


def only_tensor(value: Any, call: str) -> Tensor:
    """Return a value that is a tensor.

    Raises:
        TypeError: The value is not a tensor.
    """
    if isinstance(value, Tensor):
        return value
    raise TypeError(
        f"{call} with uniform=True needs a tensor on every rank, of one shape and type, and this is "
        f"{a_type(value)}: give one, or leave uniform out"
    )


def check_one_for_each(group: Group, values: Any, name: str) -> Sequence[Any]:
    """Return a list that has a value for each rank.

    Raises:
        TypeError: The argument is not a list.
        ValueError: The list has another length.
    """
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise TypeError(
            f"{name} is {describe(values)}: give a list with a value for each of {group.size} ranks, or a tensor"
        )
    if len(values) != group.size:
        raise ValueError(
            f"{name} has {len(values)} entries for {group.size} ranks: give one for each rank of the group"
        )
    return values


def check_parts(tensor: Tensor, size: int) -> None:
    """Check that a tensor can be cut into equal parts along its first dimension.

    Raises:
        ValueError: It cannot.
    """
    if tensor.dim() == 0 or tensor.shape[0] % size:
        raise ValueError(
            f"a tensor of shape {list(tensor.shape)} cannot be cut into {size} equal parts along its first dimension: "
            f"make that a multiple of {size}, or give a list with a part for each rank"
        )
