"""The automatic division of a model's layers over devices, by memory or by time. Start reading at `divide_layers`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unisono.parallel.pipeline.balance import ModelSegment, Split, balance
from unisono.parallel.pipeline.blocks import find_blocks
from unisono.parallel.pipeline.candidates import Places, find_places, layer_names
from unisono.parallel.pipeline.measuring import STATE_COPIES, measure_segments
from unisono.parallel.placed.device_map import named_tensors

__all__ = ["LayerDivision", "divide_layers"]

_PARTS = "devices"


@dataclass(frozen=True, slots=True)
class LayerDivision:
    """Where layers are to be placed, and the share of each device."""

    layers: dict[str, torch.device]
    tensors: dict[str, torch.device]
    """The parameters and buffers outside of these layers."""
    shares: tuple[float, ...]
    """The part of the time, or of the memory, of each device."""


def divide_layers(
    model: nn.Module,
    devices: Sequence[torch.device],
    by: Literal["memory", "time"],
    *,
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]] | None,
    limits: Sequence[int | None],
) -> LayerDivision:
    """Return the division into one contiguous part for each device whose largest part is smallest.

    Args:
        model: The model, on one device.
        devices: The devices, in the order of the parts.
        by: What is divided.
        inputs: Positional and keyword arguments of a forward pass, on the model's device: it runs four times, backward
            as well, and parts follow the order of calls. None: parts follow the order in which layers are registered,
            and have the memory of their weights.
        limits: The memory of each device, in bytes; None: any.

    Raises:
        CutError: The order of calls cannot be found.
        ValueError: There are fewer layers than devices, or no division keeps the limits.
    """
    if inputs is None:
        layers, tensors, split = _by_weights(model, devices, limits)
    else:
        layers, tensors, split = _by_calls(model, devices, by, inputs, limits)
    _keep_together(model, layers, tensors)
    total = sum(split.seconds) or 1.0
    return LayerDivision(layers, tensors, tuple(each / total for each in split.seconds))


def _by_weights(
    model: nn.Module, devices: Sequence[torch.device], limits: Sequence[int | None]
) -> tuple[dict[str, torch.device], dict[str, torch.device], Split]:
    names = layer_names(model, stages=len(devices))
    seen: set[int] = set()
    segments = []
    for name in names:
        nbytes = 0
        layer = model.get_submodule(name)
        for tensor in (*layer.parameters(), *layer.buffers()):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                nbytes += (STATE_COPIES if tensor.requires_grad else 1) * tensor.nbytes
        segments.append(_memory(ModelSegment(name, 0.0, 0.0, nbytes, 0, 0)))
    split = balance(segments, len(devices), under_way=[1] * len(devices), limit_nbytes=limits, parts=_PARTS)
    layers = {name: devices[bisect_right(split.begins, i) - 1] for i, name in enumerate(names)}
    return layers, {}, split


def _by_calls(
    model: nn.Module,
    devices: Sequence[torch.device],
    by: Literal["memory", "time"],
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
    limits: Sequence[int | None],
) -> tuple[dict[str, torch.device], dict[str, torch.device], Split]:
    places = find_places(model, _forward, inputs, stages=len(devices))
    trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in model.parameters())
    segments = measure_segments(model, _forward, inputs, places, loss_of=_sum if trains else None)
    if by == "memory":
        segments = [_memory(each) for each in segments]
    segments = _with_shared(model, segments, places)
    split = balance(segments, len(devices), under_way=[1] * len(devices), limit_nbytes=limits, parts=_PARTS)
    begins = [places.calls[begin - 1] for begin in split.begins[1:]]
    layers: dict[str, torch.device] = {}
    tensors: dict[str, torch.device] = {}
    for call in places.program.calls:
        device = devices[bisect_right(begins, call.number)]
        if call.block is not None:
            layers.setdefault(call.block, device)
        else:
            tensors.update({name: device for name in call.parameters if name not in tensors})
    for name in find_blocks(model, places.names):  # those that are never called
        layers.setdefault(name, devices[0])
    return layers, tensors, split


def _with_shared(model: nn.Module, segments: Sequence[ModelSegment], places: Places) -> list[ModelSegment]:
    """Return segments of which those that share weights with an earlier one count there, where they will be placed."""
    owners: dict[int, int] = {}
    found = list(segments)
    for call in places.program.calls:
        if call.block is None:
            continue
        number = bisect_right(places.calls, call.number)
        its = [id(tensor) for _, tensor in named_tensors(model.get_submodule(call.block))]
        first = min((owners[each] for each in its if each in owners), default=number)
        if first < number:
            moved, home = found[number], found[first]
            found[first] = home._replace(
                forward_s=home.forward_s + moved.forward_s,
                backward_s=home.backward_s + moved.backward_s,
                activation_nbytes=home.activation_nbytes + moved.activation_nbytes,
            )
            found[number] = moved._replace(forward_s=0.0, backward_s=0.0, activation_nbytes=0)
        for each in its:
            owners.setdefault(each, first)
    return found


def _memory(segment: ModelSegment) -> ModelSegment:
    """Return a segment whose time is its memory, so that this is what is balanced."""
    return segment._replace(forward_s=float(segment.state_nbytes + segment.activation_nbytes), backward_s=0.0)


def _forward(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return model(*args, **kwargs)


def _sum(result: Any) -> Tensor:
    """Return a scalar from which backward reaches everything that has made the outputs."""
    found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not found:
        raise ValueError(
            "the model returned no tensor that requires a gradient, so its backward pass cannot be measured: call "
            "place() under torch.no_grad() to measure forward passes alone"
        )
    return torch.stack([leaf.float().sum() for leaf in found]).sum()


def _keep_together(model: nn.Module, layers: dict[str, torch.device], tensors: Mapping[str, torch.device]) -> None:
    """Move layers that share weights with an earlier one to its device."""
    places: dict[int, torch.device] = {}
    for name, device in tensors.items():
        owner, _, last = name.rpartition(".")
        places[id(getattr(model.get_submodule(owner), last))] = device
    for name, own in list(layers.items()):
        its = [id(tensor) for _, tensor in named_tensors(model.get_submodule(name))]
        layers[name] = device = next((places[each] for each in its if each in places), own)
        places.update(dict.fromkeys(its, device))
