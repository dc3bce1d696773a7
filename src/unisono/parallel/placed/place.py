"""`place`: the layers of one model on several devices of one process. Start reading there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from unisono.arguments import choice, real, whole
from unisono.engine.gradient_hooks import watchers_of
from unisono.parallel.device_names import as_device
from unisono.parallel.model_handle import ModelHandle
from unisono.parallel.placed.device_map import DeviceMap, map_devices, named_tensors
from unisono.parallel.placed.forward import (
    LAYOUT,
    EnterLayer,
    LeaveLayer,
    Placed,
    PlacedForward,
    layout_of,
    placed_class,
)
from unisono.parallel.placed.layer_division import divide_layers
from unisono.parallel.placed.moving import on_device
from unisono.parallel.wrappers import wrapper_of
from unisono.text import a_type

__all__ = ["PlacedModel", "place"]

Device: TypeAlias = int | str | torch.device


def place(
    model: nn.Module,
    devices: Mapping[str, Device] | Sequence[Device],
    *,
    by: Literal["memory", "time"] | None = None,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    memory_gib: float | Sequence[float] | None = None,
    split_size: int | None = None,
    output_device: Device | None = None,
) -> PlacedModel:
    """Put the layers of a model on several devices of this process. The model is called as before.

    Hooks move the inputs of each layer to its device, and tensors that meet between layers to the device of the layer
    that was called last, so the model's code needs no `.to(...)`. Parameters remain the same objects, with the same
    names in `state_dict()`. A model that has been placed before is placed anew.

    Memory: what is moved between devices is there twice until its backward pass. On GPUs, copies and computations are
    asynchronous.

    Args:
        model: The model. It gets a subclass of its own class until `PlacedModel.remove`.
        devices: Devices by the names of submodules; those within a submodule may have other devices, and "" is for the
            rest of the model. Or a list of devices, for parts of the model that `by` decides on. A device is a name, a
            torch.device or the number of a GPU.
        by: With a list: "memory" for the division whose largest part has the least memory, or "time" for the one whose
            slowest part takes the least time. Parts are contiguous in the order of calls. Layers that share weights
            are on the device of the first of them.
        inputs: With a list: the arguments of one forward pass of the model, or a dict of its keyword arguments, of as
            many samples as one batch. The model is run four times where it is now, forward and backward. Needed for
            "time"; without it, "memory" counts weights alone, and takes the order in which layers are registered.
        memory_gib: With a list: the memory of a device, or of each of them, in GiB, for weights, gradients and two
            averages of an optimizer, and activations if there are inputs. None: 90 % of a GPU's, any of other devices.
        split_size: The number of samples of a micro-batch. A batch is divided along its first dimension into as many
            as are needed, the last of which may be smaller; they are computed one after the other, so that GPUs
            work on several of them at the same time; outputs are concatenated. None: the batch stays whole.
        output_device: Where outputs go. None: they stay where they are made.

    Returns:
        A handle.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A device is not there, a name is not that of a submodule, a parameter or buffer has no device or
            two, the model cannot be placed, or no division keeps the limits. Nothing has been moved then.
        CutError: With inputs: the order of calls cannot be found.
    """
    _check_model(model)
    if split_size is not None:
        whole("split_size", split_size, least=1)
    output = None if output_device is None else as_device(output_device)
    shares: tuple[float, ...] | None = None
    if isinstance(devices, Mapping):
        for name, value in (("by", by), ("inputs", inputs), ("memory_gib", memory_gib)):
            if value is not None:
                raise ValueError(
                    f"{name}= is for a list of devices, and devices says already which layer is where: leave one out"
                )
        found = map_devices(model, _named(devices))
    else:
        found, shares = _divided(model, devices, by, inputs, memory_gib)
    _take_off(model)
    return PlacedModel(model, _put_on(model, found, split_size, output), shares)


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {a_type(model)}: give place() a torch.nn.Module")
    for name, module in model.named_modules():
        where = f"{name!r}" if name else "the model"
        wrapper = wrapper_of(module, name or "model")
        if wrapper is not None:
            raise ValueError(f"{where} is wrapped in {wrapper[0]}: give place() {wrapper[1]}")
        if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
            raise ValueError(
                f"{where} is compiled to one program, which runs on one device: place the model that was compiled, and "
                "compile after that"
            )
        if module is not model and isinstance(module, PlacedForward):
            raise ValueError(f"{where} has been placed on its own: remove() that before the model around it is placed")
        if not isinstance(model, PlacedForward) and _hooks_of(module):
            raise ValueError("the model is a part of one that has been placed: place that one anew, with other devices")
    if "forward" in model.__dict__:
        raise ValueError(
            "the model has another forward in the object than in its class, as other libraries' hooks put it there: "
            "remove these, or define the forward pass in a class"
        )
    for name, parameter in model.named_parameters():
        if watchers_of(parameter):
            raise ValueError(
                f"a Trainer or replicate() sums the gradient of {name!r} over ranks where it is now: place the model "
                "before that"
            )


def _named(devices: Mapping[str, Device]) -> dict[str, torch.device]:
    if not devices:
        raise ValueError('devices is empty: give devices by the names of submodules, such as {"net1": "cuda:0"}')
    for name in devices:
        if not isinstance(name, str):
            raise TypeError(f"devices has the key {name!r}, {a_type(name)}, where the name of a submodule is due")
    return {name: as_device(device) for name, device in devices.items()}


def _divided(
    model: nn.Module,
    devices: Sequence[Device],
    by: Literal["memory", "time"] | None,
    inputs: Sequence[Any] | Mapping[str, Any] | None,
    memory_gib: float | Sequence[float] | None,
) -> tuple[DeviceMap, tuple[float, ...]]:
    if isinstance(devices, str | torch.device) or not isinstance(devices, Sequence):
        raise TypeError(
            f"devices={devices!r} is {a_type(devices)}: give devices by the names of submodules, such as "
            '{"net1": "cuda:0"}, or a list of devices with by='
        )
    found = [as_device(device) for device in devices]
    if not found:
        raise ValueError("devices is empty: name at least one device")
    if by is None:
        raise ValueError(
            'a list of devices needs by="memory" or by="time", which decides what each of them gets; or give devices '
            'by the names of submodules, such as {"net1": "cuda:0"}'
        )
    choice("by", by, ("memory", "time"))
    limits = _limits(found, memory_gib)
    given = None
    if inputs is not None:
        home = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
        if len(home) > 1:
            raise ValueError(
                f"inputs= are for measuring the model on one device, and it is on {len(home)}: move it to one first, "
                'such as model.to("cpu")'
            )
        args = () if isinstance(inputs, Mapping) else _sequence(inputs)
        kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
        given = on_device((args, kwargs), next(iter(home))) if home else (args, kwargs)
    elif by == "time":
        raise ValueError(
            'by="time" measures the model: give the arguments of a forward pass as inputs=(...), or take by="memory"'
        )
    with _taken_off(model):
        division = divide_layers(model, found, by, inputs=given, limits=limits)
    return map_devices(model, {"": found[0], **division.layers}, division.tensors), division.shares


def _sequence(inputs: Any) -> tuple[Any, ...]:
    if not isinstance(inputs, list | tuple):
        raise TypeError(
            f"inputs is {a_type(inputs)}: give a tuple of the arguments of a forward pass, such as inputs=(x,), or a "
            "dict of keyword arguments"
        )
    return tuple(inputs)


def _limits(devices: Sequence[torch.device], memory_gib: float | Sequence[float] | None) -> list[int | None]:
    if memory_gib is None:
        return [
            int(0.9 * torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None
            for device in devices
        ]
    each = list(memory_gib) if isinstance(memory_gib, Sequence) else [memory_gib] * len(devices)
    if len(each) != len(devices):
        raise ValueError(f"memory_gib has {len(each)} numbers for {len(devices)} devices: give one for each, or one")
    for value in each:
        if not real("memory_gib", value) > 0:
            raise ValueError(f"memory_gib={value} must be positive; None sets no limit on a CPU")
    return [int(value * 2**30) for value in each]


def _put_on(model: nn.Module, found: DeviceMap, split_size: int | None, output: torch.device | None) -> Placed:
    """Move layers and tensors to their devices, and hook the layers."""
    layers = {name: model.get_submodule(name) for name in found.layers}
    for name, device in found.layers.items():
        if any(tensor.device != device for _, tensor in named_tensors(layers[name])):
            layers[name].to(device)
    owners = dict.fromkeys(name.rpartition(".")[0] for name in found.tensors)
    for owner in owners:
        _move_own(model.get_submodule(owner), owner, found.tensors)
    hooks = {name: EnterLayer(device) for name, device in found.layers.items()}
    home = next(iter(found.devices), output or torch.device("cpu"))
    layout = Placed(hooks, home, split_size, output, dict(found.tensors))
    _hook(model, layout)
    return layout


def _move_own(module: nn.Module, path: str, devices: Mapping[str, torch.device]) -> None:
    """Move the parameters and buffers of a module itself, not those of its submodules, as `module.to` does."""
    own = [*module._parameters.items(), *module._buffers.items()]
    its = [(devices[f"{path}.{name}" if path else name], tensor) for name, tensor in own if tensor is not None]
    places = {id(tensor): device for device, tensor in its}
    # Gradients are moved by the same function.
    places |= {id(tensor.grad): device for device, tensor in its if tensor.is_leaf and tensor.grad is not None}
    if any(tensor.device != device for device, tensor in its):
        module._apply(lambda tensor: tensor.to(places[id(tensor)]), recurse=False)  # type: ignore[no-untyped-call]


def _hook(model: nn.Module, layout: Placed) -> None:
    hooked: set[int] = set()
    for name, hook in layout.layers.items():
        layer = model.get_submodule(name)
        if id(layer) not in hooked:  # a layer may have several names
            hooked.add(id(layer))
            layer.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
            layer.register_forward_hook(LeaveLayer(), always_call=True)
    model.__dict__[LAYOUT] = layout
    object.__setattr__(model, "__class__", placed_class(type(model)))  # type: ignore[arg-type]


@contextmanager
def _taken_off(model: nn.Module) -> Iterator[None]:
    """Make a placed model an ordinary one for the length of a `with` block."""
    layout = layout_of(model)
    _take_off(model)
    try:
        yield
    finally:
        if layout is not None:
            _hook(model, layout)


def _take_off(model: nn.Module) -> None:
    """Remove what `_put_on` has put there, if anything."""
    if not isinstance(model, PlacedForward):
        return
    for module in model.modules():
        for key in _hooks_of(module):
            for table in (
                module._forward_pre_hooks,
                module._forward_pre_hooks_with_kwargs,
                module._forward_hooks,
                module._forward_hooks_always_called,
            ):
                table.pop(key, None)
    bases = type(model).__mro__
    object.__setattr__(model, "__class__", bases[bases.index(PlacedForward) + 1])
    del model.__dict__[LAYOUT]


def _hooks_of(module: nn.Module) -> list[int]:
    hooks = (*module._forward_pre_hooks.items(), *module._forward_hooks.items())
    return [key for key, hook in hooks if isinstance(hook, EnterLayer | LeaveLayer)]


class PlacedModel(ModelHandle):
    """The handle of a model whose layers are on several devices. `place` makes it."""

    _made_by = "placed = place(model, ...)"

    def __init__(self, model: nn.Module, layout: Placed, shares: tuple[float, ...] | None) -> None:
        self._model, self._layout, self._shares = model, layout, shares

    @property
    def devices(self) -> list[torch.device]:
        """The devices, each once, in the order of the layers."""
        return self._layout.devices

    @property
    def layers(self) -> dict[str, torch.device]:
        """The device of each layer, by name."""
        return {name: hook.device for name, hook in self._layout.layers.items()}

    @property
    def shares(self) -> tuple[float, ...] | None:
        """The part of the time or memory of each device in the list; None if devices were given by name."""
        return self._shares

    @property
    def split_size(self) -> int | None:
        """The number of samples of a micro-batch; None: batches stay whole."""
        return self._layout.split_size

    def remove(self) -> None:
        """Make the model an ordinary one again. Its layers stay where they are: `model.to(...)` brings them together.

        Does nothing if the model has been placed anew since.
        """
        if layout_of(self._model) is self._layout:
            _take_off(self._model)

    def __repr__(self) -> str:
        layers = ", ".join(f"{name or 'all'}: {device}" for name, device in self.layers.items())
        return f"PlacedModel({layers})"
