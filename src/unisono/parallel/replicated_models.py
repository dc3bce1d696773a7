"""The models that `replicate` is given: their names, the parameters that may get a gradient, and all their tensors.

Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from unisono.parallel.gradient_bucket import Parameter
from unisono.parallel.placed.forward import placed_devices
from unisono.parallel.wrappers import is_distributed, wrapper_of
from unisono.text import a_type

__all__ = ["Models", "named_models", "parameters_of", "tensors_of_model"]

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]


def named_models(models: Models) -> dict[str, nn.Module]:
    """Return the models by name, from the argument `models`.

    Raises:
        TypeError: It is not a module or a list or dict of modules, or a module is wrapped by another library.
        ValueError: It has no module, or one whose layers are on several devices.
    """
    if isinstance(models, nn.Module):
        found: dict[str, Any] = {"model": models}
    elif isinstance(models, Mapping):
        found = dict(models)
    elif isinstance(models, list | tuple):
        found = {f"model {i}": model for i, model in enumerate(models)}
    else:
        raise TypeError(f"models is {_what(models)}: give a module, or a list or dict of modules")
    for name, model in found.items():
        if not isinstance(name, str):
            raise TypeError(f"models has the key {name!r}; models are given by names, which are strings")
        if not isinstance(model, nn.Module):
            raise TypeError(f"{name} is {_what(model)}, and must be a torch.nn.Module")
        for path, module in model.named_modules(prefix=name):
            wrapper = wrapper_of(module, path)
            if wrapper is not None:
                raise TypeError(
                    f"{path} is wrapped in {wrapper[0]}, which looks after gradients or parameters too: give replicate "
                    f"{wrapper[1]}"
                )
        divided = next((path for path, p in model.named_parameters(prefix=name) if is_distributed(p)), None)
        if divided is not None:
            raise TypeError(
                f"{divided} is a DTensor, of which each rank has a part, and replicate averages gradients of equal "
                "models: average them over the ranks that have the same parts, as examples/tensor_parallel.py does, or "
                "give replicate the model as it was before it was divided"
            )
        placed = placed_devices(model)
        if placed is not None and len(placed) > 1:
            raise ValueError(
                f"{name} has been placed on {', '.join(map(str, placed))}, and replicate() sums the gradients of one "
                "device of each rank: leave out one of the two"
            )
    if not found:
        raise ValueError("no model was given")
    return found


def _what(given: object) -> str:
    return f"the class {given.__name__}, not called" if isinstance(given, type) else a_type(given)


def parameters_of(model: nn.Module, model_name: str) -> list[Parameter]:
    """Return the parameters that can get a gradient, each once.

    Raises:
        ValueError: A parameter is lazy or on the meta device.
    """
    sparse = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    found = []
    for name, tensor in model.named_parameters():
        if nn.parameter.is_lazy(tensor):
            raise ValueError(
                f"parameter {name!r} of {model_name} has no shape yet: run a forward pass before replicate()"
            )
        if tensor.is_meta:
            raise ValueError(
                f"parameter {name!r} of {model_name} is on the meta device: give it values before replicate()"
            )
        if tensor.is_floating_point() or tensor.is_complex():
            found.append(Parameter(name, tensor, id(tensor) in sparse))
    return found


def tensors_of_model(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, each once."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    found.update(model.named_buffers())
    return found
