"""Devices as users name them, and whether they are there; and the device of a module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from unisono.text import a_type

__all__ = ["as_device", "choose_device", "device_of"]


def as_device(given: Any) -> torch.device:
    """Return the device that a user means, with its number unless it is the CPU or "meta".

    Args:
        given: The number of a GPU, a name, or a torch.device.

    Raises:
        TypeError: It is none of these.
        ValueError: torch does not know it, or this process does not have it.

    >>> as_device("cpu"), as_device(torch.device("cpu", 1)), as_device("meta")
    (device(type='cpu'), device(type='cpu'), device(type='meta'))
    """
    if isinstance(given, bool) or not isinstance(given, int | str | torch.device):
        raise TypeError(f"{given!r} is {a_type(given)}: give a device as a name such as 'cuda:0', or a GPU's number")
    try:
        device = torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
    except RuntimeError:
        raise ValueError(f"{given!r} is no device that torch knows: give 'cpu', 'cuda:0' or the like") from None
    if device.type in ("cpu", "meta"):
        return torch.device(device.type)
    try:
        module = torch.get_device_module(device)
    except RuntimeError:
        raise ValueError(f"{device} is not there: this torch has no support for {device.type}") from None
    there = module.device_count()
    index: int | None = device.index
    if (index or 0) >= there:
        raise ValueError(f"{device} is not there: this process has {there} devices of type {device.type}")
    return device if index is not None else torch.device(device.type, module.current_device())


def device_of(module: nn.Module) -> torch.device | None:
    """Return the device of a module; None if it has no tensors, or some on several devices."""
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    return devices.pop() if len(devices) == 1 else None


def choose_device(device: str | torch.device, modules: Iterable[nn.Module], *, local_rank: int) -> torch.device:
    """Choose the device of this rank, and make its GPU the current one.

    Args:
        device: What the user has given; "auto" is a GPU if torch sees one, otherwise where the models are.
        modules: The models.
        local_rank: Rank among the processes of this host, which chooses among its GPUs.

    Raises:
        TypeError: device is neither a text nor a torch.device.
        ValueError: torch does not know it, does not see it, or it is "meta".
    """
    if device == "auto":
        if torch.cuda.is_available():
            device = torch.device("cuda", local_rank % torch.cuda.device_count())
        else:
            tensors = (t for module in modules for t in module.parameters())
            device = next(tensors, torch.empty(0)).device
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f'device={device!r} is {a_type(device)}; give "auto", "cpu" or "cuda"')
    try:
        device = torch.device(device)
    except RuntimeError:
        raise ValueError(f'device={device!r} is no device that torch knows; give "auto", "cpu" or "cuda"') from None
    if device.type == "meta":
        raise ValueError('device="meta" computes nothing: give "auto", "cpu" or "cuda"')
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        return as_device(device)
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index: int | None = device.index
    if (index or 0) >= there:
        raise ValueError(
            f"device={str(device)!r}, but torch sees {there} GPUs here: see that the driver and a build of "
            'torch for CUDA are installed, or give device="auto" or "cpu"'
        )
    if index is None:
        device = torch.device("cuda", local_rank % there)
    torch.cuda.set_device(device)
    # Algorithms that are chosen by timing or add in any order would have different bits each time.
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    return device
