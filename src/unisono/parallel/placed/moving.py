"""Moves nested values, such as the inputs and outputs of layers, to a device. Start reading at `on_device`."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from unisono.parallel.device_copies import carry
from unisono.parallel.pipeline.leaves import children_of, rebuilt

__all__ = ["on_device"]

_PLAIN = (type(None), bool, int, float, str)


def on_device(value: Any, device: torch.device) -> Any:
    """Return a value with all its tensors on a device; the value itself, and not a copy, if they are there.

    Tensors may be in dicts, lists, tuples, named tuples and dataclasses. Autograd records the copies.

    Raises:
        ValueError: A tensor is on the "meta" device, and the other device is a real one.

    >>> value = {"a": [torch.ones(2)], "b": 3}
    >>> on_device(value, torch.device("cpu")) is value, on_device(value, torch.device("meta"))["a"][0].device
    (True, device(type='meta'))
    """
    if isinstance(value, Tensor):
        if value.is_meta and device.type != "meta":
            raise ValueError(
                f"a layer on {device} gets a tensor of shape {list(value.shape)} from the meta device, which has no "
                "values: place the layers that make it on a real device"
            )
        return value if value.device == device else carry(value, device)
    if isinstance(value, PackedSequence):  # one of its tensors belongs on the CPU
        return value if value.data.device == device else cast(Any, value).to(device)
    found = None if isinstance(value, _PLAIN) else children_of(value)
    if not found:
        return value
    moved = [on_device(child, device) for _, child in found]
    # The same list where nothing moves, so that a layer may append to it.
    unmoved = all(new is old for new, (_, old) in zip(moved, found, strict=True))
    return value if unmoved else rebuilt(value, [key for key, _ in found], moved)
