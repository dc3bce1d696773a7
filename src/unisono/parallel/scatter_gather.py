"""Divides nested inputs among devices along the batch dimension, and joins the outputs of the devices.

Tensors may be in dicts, lists, tuples, named tuples and dataclasses; all other values go to each device unchanged. Pure
except for the copies between devices, which autograd records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.collectives.structure import children, rebuild, step_into
from unisono.parallel.device_copies import carry

__all__ = ["DividedInput", "Whole", "divide", "join", "moved"]


@dataclass(frozen=True, slots=True)
class Whole:
    """Marks an input of `DataParallel` that every device gets undivided, such as a mask over positions.

    In an output of the module it marks what is not joined: the result has that of the first device.
    """

    value: Any
    """A tensor, or a structure that contains tensors."""


class DividedInput(NamedTuple):
    """The parts of a divided input."""

    values: list[Any]
    """The parts, one per device in use."""
    sizes: list[int]
    """The number of samples in each part; [1] if the input contains no tensor to divide."""


def divide(value: Any, devices: Sequence[torch.device], *, dim: int, place: str) -> DividedInput:
    """Divide the tensors of an input as evenly as possible; the first chunks are the longer ones.

    With fewer samples than devices, the last devices get none and are not used. Tensors without dimensions are not
    divided.

    Args:
        value: The input.
        devices: The devices, in the order of the chunks.
        dim: The dimension of samples.
        place: The name of the input, for messages.

    Raises:
        ValueError: Two tensors differ in their number of samples, or a tensor has no dimension `dim`.
    """
    samples = _samples(value, dim, place)
    if samples is None:
        return DividedInput([moved(value, devices[0])], [1])
    used = max(min(samples, len(devices)), 1)
    sizes = [samples // used + (i < samples % used) for i in range(used)]
    starts = [sum(sizes[:i]) for i in range(used)]

    def chunk(i: int) -> Any:
        return _mapped(value, lambda t: t.narrow(dim, starts[i], sizes[i]) if t.dim() else t, devices[i])

    return DividedInput([chunk(i) for i in range(used)], sizes)


def join(outputs: Sequence[Any], device: torch.device, *, dim: int, place: str = "output") -> Any:
    """Join the outputs of several devices on one.

    Tensors are concatenated; those without dimensions become a vector with one element per device. Other values must
    be equal on all devices.

    Args:
        outputs: The outputs, one per device.
        device: The device of the result.
        dim: The dimension along which tensors are concatenated.
        place: The name of the outputs, for messages.

    Raises:
        ValueError: The outputs have different structures, shapes or values; the message has the place.
    """
    first = outputs[0]
    if all(isinstance(output, Whole) for output in outputs):
        return moved(first.value, device)
    if isinstance(first, Tensor) and all(isinstance(output, Tensor) for output in outputs):
        return _concatenated(outputs, device, dim, place)
    held = [children(output) for output in outputs]
    if held[0] is None:
        if any(other is not first and (type(other) is not type(first) or other != first) for other in outputs[1:]):
            raise ValueError(
                f"{place} differs between devices: {_listed(outputs)}. Return tensors, or Whole(...) to "
                "get that of the first."
            )
        return first
    keys = [None if pairs is None else [key for key, _ in pairs] for pairs in held]
    if any(type(output) is not type(first) for output in outputs) or any(key != keys[0] for key in keys):
        raise ValueError(f"{place} has another structure on some devices: {_listed(keys)}. Return the same on all.")
    joined = [
        join([pairs[i][1] for pairs in held if pairs is not None], device, dim=dim, place=step_into(place, key))
        for i, (key, _) in enumerate(held[0])
    ]
    return rebuild(first, [key for key, _ in held[0]], joined)


def _concatenated(outputs: Sequence[Tensor], device: torch.device, dim: int, place: str) -> Tensor:
    moved = [carry(output, device) for output in outputs]
    if all(not output.dim() for output in moved):
        return torch.stack(moved)
    shapes = [list(output.shape) for output in moved]
    rest = [shape[:dim] + shape[dim:][1:] for shape in shapes]
    if any(len(shape) <= dim for shape in shapes) or any(other != rest[0] for other in rest):
        raise ValueError(f"{place} cannot be concatenated along dimension {dim}: its shapes are {_listed(shapes)}")
    return torch.cat(moved, dim)


def _samples(value: Any, dim: int, place: str) -> int | None:
    """Return the number of samples of an input; None if it contains no tensor to divide."""
    found: list[tuple[str, Tensor]] = []
    _collect(value, place, found)
    if not found:
        return None
    short = [f"{where} of shape {list(tensor.shape)}" for where, tensor in found if tensor.dim() <= dim]
    if short:
        raise ValueError(f"{short[0]} has no dimension {dim} to divide along: choose dim, or give it as Whole(...)")
    sizes = {where: tensor.shape[dim] for where, tensor in found}
    (first, count), *_ = sizes.items()
    for where, other in sizes.items():
        if other != count:
            raise ValueError(
                f"{first} has {count} samples (dimension {dim}) and {where} has {other}, so they cannot be divided in "
                "the same way. Give an input that every device needs whole as unisono.parallel.Whole(...)."
            )
    return count


def _collect(value: Any, place: str, found: list[tuple[str, Tensor]]) -> None:
    if isinstance(value, Whole):
        return
    if isinstance(value, Tensor):
        if value.dim():
            found.append((place, value))
        return
    for key, child in children(value) or ():
        _collect(child, step_into(place, key), found)


def _mapped(value: Any, take: Callable[[Tensor], Tensor], device: torch.device) -> Any:
    if isinstance(value, Whole):
        return moved(value.value, device)
    if isinstance(value, Tensor):
        return carry(take(value), device)
    held = children(value)
    if not held:
        return value
    return rebuild(value, [key for key, _ in held], [_mapped(child, take, device) for _, child in held])


def moved(value: Any, device: torch.device) -> Any:
    """Return a value with all its tensors on a device."""
    return _mapped(value, lambda tensor: tensor, device)


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(f"{value!r} on replica {i}" for i, value in enumerate(values))
