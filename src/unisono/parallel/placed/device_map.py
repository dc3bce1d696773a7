"""Which layer of a model is on which device, from the names that a user gives. Start reading at `map_devices`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from unisono.parallel.pipeline.blocks import is_called, nearest_name
from unisono.text import list_first

__all__ = ["DeviceMap", "map_devices", "named_tensors"]

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """The device of each layer, and of each tensor that belongs to no layer."""

    layers: dict[str, torch.device] = field(default_factory=dict)
    """The largest submodules that are called and lie on one device as a whole, by name."""
    tensors: dict[str, torch.device] = field(default_factory=dict)
    """The parameters and buffers of modules that contain layers, by name."""

    @property
    def devices(self) -> list[torch.device]:
        """The devices, each once, in the order of the layers."""
        return list(dict.fromkeys([*self.layers.values(), *self.tensors.values()]))


def map_devices(
    model: nn.Module, given: Mapping[str, torch.device], tensors: Mapping[str, torch.device] | None = None
) -> DeviceMap:
    """Return the device of every layer, parameter and buffer of a model.

    A submodule has the device of the nearest module around it that is named; the name "" stands for the model.

    Args:
        model: The model.
        given: Devices by the names of submodules.
        tensors: Devices of parameters and buffers of modules that contain named ones, by name; those that are absent
            have the device of their module.

    Raises:
        ValueError: A name is not that of a submodule, a tensor has no device or two, or it has no values to be moved.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    >>> cpu, meta = torch.device("cpu"), torch.device("meta")
    >>> {name: str(device) for name, device in map_devices(model, {"": cpu, "2.1": meta}).layers.items()}
    {'0': 'cpu', '2.0': 'cpu', '2.1': 'meta'}
    """
    known = dict(model.named_modules(remove_duplicate=False))
    for name in given:
        if name not in known:
            raise ValueError(
                f"{name!r} is to be placed, which is not a submodule of the model{nearest_name(name, known)}"
            )
    containers: set[str] = set()
    for name in given:
        parts = name.split(".") if name else []
        containers.update(".".join(parts[:depth]) for depth in range(len(parts)))
    walk = _Assignment(given, tensors or {}, containers)
    walk.into(model, "", None)
    if walk.missing:
        first, one = str(next(iter(given.values()))), len(walk.missing) == 1
        raise ValueError(
            f"{list_first([repr(name) for name in walk.missing], _SHOWN)}: no device is given for "
            f"{'it' if one else 'them'}. Name the {'module that contains it' if one else 'modules that contain them'}, "
            f'too, or give a device for all the rest as "", such as {{"": {first!r}}}'
        )
    _check_shared(model, known, walk.found)
    return walk.found


class _Assignment:
    """Goes through a model, and finds the device of each layer."""

    def __init__(
        self, given: Mapping[str, torch.device], tensors: Mapping[str, torch.device], containers: set[str]
    ) -> None:
        self.found = DeviceMap()
        self.missing: list[str] = []
        """Tensors without a device."""
        self._given, self._tensors, self._containers = given, tensors, containers

    def into(self, module: nn.Module, path: str, around: torch.device | None) -> None:
        """Find the devices of a module and of what is in it.

        Args:
            module: The module.
            path: Its name.
            around: The device of the module around it, if that has one.
        """
        device = self._given.get(path, around)
        if path in self._containers or not is_called(module):
            for name, _ in _own_tensors(module, path):
                its = self._tensors.get(name, device)
                if its is None:
                    self.missing.append(name)
                else:
                    self.found.tensors[name] = its
            for name, child in module._modules.items():
                if child is not None:
                    self.into(child, f"{path}.{name}" if path else name, device)
            return
        first = next(named_tensors(module, path), None)
        if device is not None and (first or path in self._given):
            self.found.layers[path] = device
        elif first:
            self.missing.append(first[0])


def _own_tensors(module: nn.Module, path: str) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield (f"{path}.{name}" if path else name), tensor


def named_tensors(module: nn.Module, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers of a module with all their names."""
    yield from module.named_parameters(path, remove_duplicate=False)
    yield from module.named_buffers(path, remove_duplicate=False)


def _check_shared(model: nn.Module, known: Mapping[str, nn.Module], found: DeviceMap) -> None:
    """Check that nothing is on two devices, and that all tensors can be moved."""
    places: dict[int, tuple[str, torch.device]] = {}

    def check(name: str, each: nn.Module | Tensor, device: torch.device, what: str) -> None:
        other, its = places.setdefault(id(each), (name, device))
        if its != device:
            raise ValueError(
                f"{other!r} and {name!r} are one {what}, and are to be placed on {its} and {device}: place both on the "
                "same device"
            )

    for name, device in found.layers.items():
        check(name, known[name], device, "module")
        for tensor_name, tensor in named_tensors(known[name], name):
            check(tensor_name, tensor, device, "tensor")
            _check_movable(tensor_name, tensor, device)
    owned = dict(named_tensors(model))
    for name, device in found.tensors.items():
        check(name, owned[name], device, "tensor")
        _check_movable(name, owned[name], device)


def _check_movable(name: str, tensor: Tensor, device: torch.device) -> None:
    if is_lazy(tensor):
        raise ValueError(f"{name!r} has no size yet: run the model once on one batch before place()")
    if tensor.is_meta and device.type != "meta":
        raise ValueError(f"{name!r} is on the meta device and has no values to be placed on {device}: load them before")
