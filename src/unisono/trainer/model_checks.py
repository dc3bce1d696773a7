"""Models and optimizers that another library has wrapped, sharded or hooked, so that it would sum gradients as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from unisono.engine.gradient_hooks import watchers_of
from unisono.parallel import Replicas
from unisono.parallel.placed.forward import placed_devices
from unisono.parallel.reducer import Reducer
from unisono.parallel.remote_module import refuse_remote
from unisono.parallel.wrappers import is_distributed, wrapper_of
from unisono.text import a_type

__all__ = ["check_models", "check_placed", "unwrapped_optimizer"]


def check_models(model: Any) -> None:
    """Check that models are modules, and that no other library handles their gradients or parameters.

    Raises:
        TypeError: A model is not a module, or a key of the dict is not a name.
        ValueError: The dict is empty, a module is wrapped or sharded, its layers are on several devices, or its
            parameters have no values yet.
    """
    models = model if isinstance(model, Mapping) else {"model": model}
    if not models:
        raise ValueError("model is an empty dict: give Trainer at least one module")
    for key, root in models.items():
        if isinstance(root, Replicas):
            raise TypeError(
                "model is the handle that unisono.parallel.replicate returned: give Trainer the model itself, without "
                "replicate, since the Trainer sums gradients over ranks, too."
            )
        if not isinstance(root, nn.Module):
            found = f"the class {root.__name__}, not called" if isinstance(root, type) else a_type(root)
            where = "model" if root is model else f"model[{key!r}]"
            raise TypeError(f"{where} is {found}; expected a torch.nn.Module, or a dict of them by name")
        if not isinstance(key, str):
            raise TypeError(f"model has the key {key!r}; models are given by names, which are strings")
        for name, module in root.named_modules(prefix=key):
            _check_module(module, name)
        refuse_remote(
            root,
            "a Trainer",
            "give it the whole model and parallel=unisono.parallel.Pipeline(...), whose stages are each on one rank, "
            "or train in a loop of your own (docs/remote.md)",
        )
        placed = placed_devices(root)
        if placed is not None and len(placed) > 1:
            raise ValueError(
                f"{key!r} has been placed on {', '.join(map(str, placed))}, and a Trainer keeps each model on one "
                "device of each rank: train it in a loop of your own (docs/placement.md), or remove() the placement "
                "and give Trainer parallel=unisono.parallel.Pipeline(...) and a rank for each device."
            )
        for name, parameter in root.named_parameters(prefix=key):
            if nn.parameter.is_lazy(parameter):
                raise ValueError(f"parameter {name!r} has no size yet: run the model on one batch before Trainer")
            if parameter.is_meta:
                raise ValueError(
                    f"parameter {name!r} is on the meta device and has no values: load them before Trainer"
                )
            if is_distributed(parameter):
                raise ValueError(
                    f"parameter {name!r} is a DTensor, divided among ranks: give Trainer the model as it was before it "
                    "was sharded or parallelized."
                )
            if any(isinstance(watcher, Reducer) for watcher in watchers_of(parameter)):
                raise ValueError(
                    f"unisono.parallel.replicate sums the gradient of {name!r} over ranks already, as the Trainer "
                    "does: leave replicate out, or close() its handle."
                )


def _check_module(module: nn.Module, name: str) -> None:
    wrapper = wrapper_of(module, name)
    if wrapper is not None:
        raise ValueError(
            f"{name!r} is wrapped in {wrapper[0]}, which looks after gradients or parameters itself, as the Trainer "
            f"does: give Trainer {wrapper[1]}."
        )


def check_placed(modules: Mapping[str, nn.Module], device: torch.device) -> None:
    """Check that models whose layers have been placed are where the run's device is.

    Raises:
        ValueError: One is elsewhere.
    """
    for prefix, module in modules.items():
        placed = placed_devices(module)
        if placed is not None and placed != [device]:
            name = repr(prefix.removesuffix(".") or "model")
            raise ValueError(
                f"{name} has been placed on {', '.join(map(str, placed))}, and the Trainer's device is {device}: place "
                f'it there, or give Trainer device="{placed[0]}"'
            )


def unwrapped_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside one that Accelerate or Fabric has wrapped; None for any other."""
    libraries = {base.__module__.partition(".")[0] for base in type(optimizer).__mro__}
    if libraries & {"accelerate", "lightning_fabric", "lightning"}:
        return getattr(optimizer, "optimizer", None)
    return None
