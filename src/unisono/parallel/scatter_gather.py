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

__all__ = ["DividedInput", "Whole", "divide", "join", "moved", "split"]


@dataclass(frozen=True, slots=True)
class Whole:
    """Marks an input of `DataParallel`, or of a placed model, that every part gets undivided, such as a mask.

    In an output of the module it marks what is not joined: the result has that of the first part.
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


def split(value: Any, size: int, *, place: str) -> DividedInput:
    """Divide the tensors of an input along their first dimension, into parts of one size; the last may be smaller.

    Tensors without dimensions are not divided. Tensors stay on their devices.

    Args:
        value: The input.
        size: The number of samples of each part.
        place: The name of the input, for messages.

    Raises:
        ValueError: Two tensors differ in their number of samples.
    """
    samples = _samples(value, 0, place) or 0
    if samples <= size:
        return DividedInput([_mapped(value, lambda tensor: tensor, None)], [samples])
    sizes = [min(size, samples - start) for start in range(0, samples, size)]

    def part(number: int) -> Any:
        return _mapped(value, lambda t: t.narrow(0, number * size, sizes[number]) if t.dim() else t, None)

    return DividedInput([part(number) for number in range(len(sizes))], sizes)


def join(
    outputs: Sequence[Any],
    device: torch.device | None,
    *,
    dim: int,
    place: str = "output",
    samples: Sequence[int] | None = None,
) -> Any:
    """Join the outputs of several devices, or of several micro-batches, on one device.

    Tensors are concatenated; those without dimensions become a vector with one element per device, and are refused of
    micro-batches. Other values must be equal in all outputs.

    Args:
        outputs: The outputs, one per device or micro-batch.
        device: The device of the result. None: tensors stay where they are.
        dim: The dimension along which tensors are concatenated.
        place: The name of the outputs, for messages.
        samples: The number of samples of each micro-batch. None: outputs are those of devices.

    Raises:
        ValueError: The outputs have different structures, shapes or values; the message has the place.
    """
    first = outputs[0]
    if all(isinstance(output, Whole) for output in outputs):
        return _mapped(first.value, lambda tensor: tensor, device)
    if isinstance(first, Tensor) and all(isinstance(output, Tensor) for output in outputs):
        return _concatenated(outputs, device, dim, place, samples)
    words = _Words.of(samples)
    held = [children(output) for output in outputs]
    if held[0] is None:
        if any(other is not first and (type(other) is not type(first) or other != first) for other in outputs[1:]):
            raise ValueError(
                f"{place} differs {words.between}: {words.listed(outputs)}. Return tensors, or Whole(...) to "
                "get that of the first."
            )
        return first
    keys = [None if pairs is None else [key for key, _ in pairs] for pairs in held]
    if any(type(output) is not type(first) for output in outputs) or any(key != keys[0] for key in keys):
        raise ValueError(f"{place} has another structure {words.some}: {words.listed(keys)}. Return the same in all.")
    joined = [
        join(
            [pairs[i][1] for pairs in held if pairs is not None],
            device,
            dim=dim,
            place=step_into(place, key),
            samples=samples,
        )
        for i, (key, _) in enumerate(held[0])
    ]
    return rebuild(first, [key for key, _ in held[0]], joined)


def _concatenated(
    outputs: Sequence[Tensor], device: torch.device | None, dim: int, place: str, samples: Sequence[int] | None
) -> Tensor:
    moved = [carry(output, device or outputs[0].device) for output in outputs]
    if all(not output.dim() for output in moved):
        if samples is not None:
            raise ValueError(
                f"{place} has no dimensions, in each of {len(moved)} micro-batches of {', '.join(map(str, samples))} "
                "samples: return a value for each sample, compute a loss outside of the model, or leave out split_size"
            )
        return torch.stack(moved)
    shapes = [list(output.shape) for output in moved]
    rest = [shape[:dim] + shape[dim:][1:] for shape in shapes]
    if any(len(shape) <= dim for shape in shapes) or any(other != rest[0] for other in rest):
        raise ValueError(
            f"{place} cannot be concatenated along dimension {dim}: its shapes are {_Words.of(samples).listed(shapes)}"
        )
    if samples is not None:
        rows = {divmod(shape[0], count) for shape, count in zip(shapes, samples, strict=True)}
        if len(rows) > 1 or any(rest for _, rest in rows):
            raise ValueError(
                f"{place} has {', '.join(str(shape[0]) for shape in shapes)} rows in micro-batches of "
                f"{', '.join(map(str, samples))} samples, so its first dimension is not that of samples: return such "
                "outputs as Whole(...) to get that of the first micro-batch, or leave out split_size"
            )
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
                "the same way. Give an input that every part needs whole as unisono.parallel.Whole(...)."
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


def _mapped(value: Any, take: Callable[[Tensor], Tensor], device: torch.device | None) -> Any:
    if isinstance(value, Whole):
        return _mapped(value.value, lambda tensor: tensor, device)
    if isinstance(value, Tensor):
        return take(value) if device is None else carry(take(value), device)
    held = children(value)
    if not held:
        return value
    mapped = [_mapped(child, take, device) for _, child in held]
    if device is None and all(new is old for new, (_, old) in zip(mapped, held, strict=True)):
        return value
    return rebuild(value, [key for key, _ in held], mapped)


def moved(value: Any, device: torch.device) -> Any:
    """Return a value with all its tensors on a device."""
    return _mapped(value, lambda tensor: tensor, device)


class _Words(NamedTuple):
    """How messages speak of outputs."""

    between: str
    some: str
    each: str

    @staticmethod
    def of(samples: Sequence[int] | None) -> _Words:
        if samples is None:
            return _Words("between devices", "on some devices", "on replica")
        return _Words("between micro-batches", "in some micro-batches", "in micro-batch")

    def listed(self, values: Sequence[Any]) -> str:
        return ", ".join(f"{value!r} {self.each} {i}" for i, value in enumerate(values))
