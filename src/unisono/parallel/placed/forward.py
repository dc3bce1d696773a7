"""The calls that make a model run on several devices: hooks on its layers, and a forward pass in micro-batches.

The layers get hooks that move their inputs. The model itself gets another class, a subclass of its own, whose forward
pass divides the batch: a forward pass in the object would run the wrong model after `copy.copy`, could not be pickled,
and would hide the model's signature. Start reading at `PlacedForward.forward`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from torch import nn

from unisono.parallel.placed.glue import current_glue, glue
from unisono.parallel.placed.moving import on_device
from unisono.parallel.scatter_gather import join, split

__all__ = [
    "LAYOUT",
    "EnterLayer",
    "LeaveLayer",
    "Placed",
    "PlacedForward",
    "layout_of",
    "placed_class",
    "placed_devices",
    "refuse_placed",
]

LAYOUT = "_unisono_placed"


class EnterLayer:
    """A forward pre-hook: moves the inputs of a layer to its device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        """The device of the layer."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs on the device."""
        mode = current_glue()
        if mode is not None:  # None in a backward pass that calls the layer again, as activation checkpointing does
            mode.enter_layer(self.device)
        return on_device(args, self.device), on_device(kwargs, self.device)


class LeaveLayer:
    """A forward hook: ends what `EnterLayer` began. It must also be called where the layer raises."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Note that the layer has ended."""
        mode = current_glue()
        if mode is not None:
            mode.leave_layer()


@dataclass(slots=True)
class Placed:
    """The facts that a placed model keeps about itself. Copied and pickled with it."""

    layers: dict[str, EnterLayer]
    """The hook of each layer, by name."""
    home: torch.device
    """The device of the first layer."""
    split_size: int | None = None
    """The number of samples of a micro-batch."""
    output_device: torch.device | None = None
    """Where outputs go; None: they stay where they are."""
    tensors: dict[str, torch.device] = field(default_factory=dict)
    """The devices of parameters and buffers outside of layers, by name."""

    @property
    def devices(self) -> list[torch.device]:
        """The devices, each once, in the order of the layers."""
        return list(dict.fromkeys([*(hook.device for hook in self.layers.values()), *self.tensors.values()]))

    def follow(self, model: nn.Module) -> None:
        """Note where the layers are, after the model has been moved by `model.to`."""
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        everywhere = {tensor.device for tensor in named.values()}
        for name, hook in self.layers.items():
            layer = model.get_submodule(name)
            first = next(layer.parameters(), next(layer.buffers(), None))
            if first is not None:
                hook.device = first.device
            elif len(everywhere) == 1:
                (hook.device,) = everywhere
        for name in self.tensors:
            if name in named:
                self.tensors[name] = named[name].device
        if len(everywhere) == 1:
            (self.home,) = everywhere


def layout_of(module: nn.Module) -> Placed | None:
    """Return what a placed model knows about itself; None for any other module."""
    return cast("Placed | None", module.__dict__.get(LAYOUT)) if isinstance(module, PlacedForward) else None


def placed_devices(model: nn.Module) -> list[torch.device] | None:
    """Return the devices on which `place` has put the layers of a model or of its parts; None if it has not."""
    found = [layout for module in model.modules() if (layout := layout_of(module)) is not None]
    return list(dict.fromkeys(device for layout in found for device in layout.devices)) if found else None


def refuse_placed(model: nn.Module, what: str) -> None:
    """Refuse a model whose layers have been placed.

    Args:
        model: The model.
        what: What it is refused for, as the beginning of a sentence.

    Raises:
        ValueError: `place` has placed it, or a part of it.
    """
    devices = placed_devices(model)
    if devices is not None:
        raise ValueError(
            f"{what}, and place() has put layers of this one on {', '.join(map(str, devices))}: leave out one of the "
            "two, for example by remove() of the handle of place()"
        )


class PlacedForward:
    """The first base class of a placed model."""

    def __init_subclass__(cls) -> None:
        pass  # not that of the model's class, which may register its subclasses

    def _forward(self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the forward pass, in micro-batches if the batch is larger than one.

        These run one after the other. That is all that GPUs need to overlap: see docs/architecture.md.
        """
        layout: Placed = self.__dict__[LAYOUT]
        parts, samples = [(args, kwargs)], [1]
        if layout.split_size is not None:
            parts, samples = split((args, kwargs), layout.split_size, place="input")
        if len(layout.devices) > 1:
            outputs = []
            for part_args, part_kwargs in parts:
                with glue(layout.home):
                    outputs.append(forward(self, *part_args, **part_kwargs))
        else:
            outputs = [forward(self, *part_args, **part_kwargs) for part_args, part_kwargs in parts]
        joined = outputs[0] if len(outputs) == 1 else join(outputs, None, dim=0, samples=samples)
        return joined if layout.output_device is None else on_device(joined, layout.output_device)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Move or convert the model, as `model.to(...)` does: its layers stay where this puts them."""
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        self.__dict__[LAYOUT].follow(self)
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how the model is copied and pickled: by its own class, as the other one is in no module."""
        own, given, *rest = cast(tuple[Any, ...], super().__reduce_ex__(max(2, int(protocol))))
        if given != (type(self),):  # the model's class has a way of its own
            return (own, given, *rest)
        bases = type(self).__mro__
        return (_make_placed, (bases[bases.index(PlacedForward) + 1],), *rest)


def _make_placed(cls: type[nn.Module]) -> Any:
    made = placed_class(cls)  # type: ignore[arg-type]
    return made.__new__(made)


@cache
def placed_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a model of a class gets."""

    @functools.wraps(cls.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._forward(cls.forward, args, kwargs)

    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "forward": forward}
    return cast(type[nn.Module], type(cls.__name__, (PlacedForward, cls), namespace))
