"""A device "sim" that computes on the CPU: an operator with tensors both there and on the CPU fails, as with a GPU.

For tests of what is meant for GPUs, with values and gradients, on machines that have none. Changes the process.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICES = 1


class _Module(backend_registration._DummyBackendModule):
    def device_count(self) -> int:
        return DEVICES

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


class SimulatedTensor(Tensor):
    """A tensor on one of the devices, whose values are in a tensor on the CPU."""

    @staticmethod
    def __new__(cls, values: Tensor, device: torch.device) -> SimulatedTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=device, requires_grad=False
        )
        made.values_on_cpu = values.detach()
        return made

    def __init__(self, values: Tensor, device: torch.device) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.name()
        if name == "aten::copy_":
            on_cpu(args[0]).copy_(on_cpu(args[1]))
            return args[0]
        found = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        places = {leaf.device for leaf in found if leaf.dim() or leaf.device.type != "cpu"}
        device = kwargs.get("device")
        if name == "aten::_to_copy" and device is not None:
            kwargs.pop("non_blocking", None)
        elif len(places) > 1:
            raise RuntimeError(f"{name} got tensors on different devices: {sorted(map(str, places))}")
        target = torch.device(device) if device is not None else next(iter(places))
        if device is not None:
            kwargs["device"] = "cpu"
        theirs = {id(on_cpu(leaf)): leaf for leaf in found if isinstance(leaf, SimulatedTensor)}
        inner = tree_map_only(SimulatedTensor, on_cpu, (args, kwargs))
        result = func(*inner[0], **inner[1])

        def outer(tensor: Tensor) -> Tensor:
            return theirs.get(id(tensor)) if id(tensor) in theirs else at(tensor, target)

        return tree_map_only(Tensor, outer, result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"SimulatedTensor({self.device}, {self.values_on_cpu})"


def on_cpu(tensor: Tensor) -> Tensor:
    return tensor.values_on_cpu if isinstance(tensor, SimulatedTensor) else tensor


def at(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "sim":
        return tensor
    return SimulatedTensor(tensor, torch.device("sim", device.index or 0))


@functools.cache
def register() -> torch.library.Library:
    """Make torch know the devices."""
    backend_registration._setup_privateuseone_for_python_backend("sim", backend_module=_Module())
    # A parameter that has been moved is another object here, as its type is another one.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    library = torch.library.Library("aten", "IMPL")

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return at(torch.empty_strided(size, stride, dtype=dtype), torch.device(device))

    def empty(size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return at(torch.empty(size, dtype=dtype), torch.device(device))

    def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
        on_cpu(target).copy_(on_cpu(source))
        return target

    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    return library
