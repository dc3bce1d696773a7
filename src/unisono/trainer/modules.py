"""Small operations on modules and nested batches: checks, devices, evaluation mode, single-sample batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.parallel.sync_batch_norm import SyncBatchNorm

__all__ = [
    "check_batch_norms",
    "check_embeddings",
    "evaluating",
    "foreign_parameter",
    "lone_sample",
    "lone_samples_warning",
    "name_of_parameter",
    "plain_modules",
    "to_device",
]


def plain_modules(model: nn.Module | Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the models by the prefix that their names get: "" for a single model, "key." for several.

    A compiled model is replaced by the module in it, which holds the same parameters.
    """
    models = {f"{key}.": module for key, module in model.items()} if isinstance(model, Mapping) else {"": model}
    return {prefix: getattr(module, "_orig_mod", module) for prefix, module in models.items()}


def name_of_parameter(names: Mapping[int, str], parameter: Tensor) -> str:
    """Return the name of a parameter, given those of `parameter_names`.

    Raises:
        ValueError: The parameter belongs to no model.
    """
    name = names.get(id(parameter))
    if name is None:
        raise foreign_parameter(parameter)
    return name


def check_batch_norms(modules: Mapping[str, nn.Module]) -> None:
    """Raise ValueError for layers that normalize over ranks: the number of ranks would change the result."""
    found = [
        prefix + name for prefix, root in modules.items() for name, module in root.named_modules() if _syncs(module)
    ]
    if found:
        raise ValueError(
            f"{found[0]!r} is a SyncBatchNorm, which normalises over what all ranks happen to compute at the same "
            "time, so the result depends on their number. The Trainer has BatchNorm over each virtual rank's share: "
            "leave out the conversion, or use unisono.parallel.revert_sync_batchnorm(model)."
        )


def _syncs(module: nn.Module) -> bool:
    return isinstance(module, (SyncBatchNorm, nn.SyncBatchNorm))


def check_embeddings(modules: Mapping[str, nn.Module], *, virtual_ranks: int) -> None:
    """Raise ValueError for embeddings that write their weights in the forward pass: ranks could not agree on them."""
    found = [
        (prefix + name, module.max_norm)
        for prefix, root in modules.items()
        for name, module in root.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    ]
    if found and virtual_ranks > 1:
        name, bound = found[0]
        raise ValueError(
            f"{name!r} has max_norm={bound}, with which torch shortens the rows that a forward pass looks up, in the "
            f"weights themselves. With virtual_ranks={virtual_ranks} each share would find the weights that the ones "
            "before it on its rank have left. Leave max_norm out, or scale what the layer returns; or give "
            "virtual_ranks=1."
        )


def foreign_parameter(parameter: Tensor) -> ValueError:
    """Return the error for a parameter of an optimizer that belongs to no model."""
    return ValueError(
        f"the optimizer has a parameter of shape {list(parameter.shape)} that belongs to no model given to Trainer. "
        'Give Trainer all models, for example {"generator": g, "discriminator": d}, and build the optimizer from their '
        "parameters. If a layer was replaced, or weights were loaded with assign=True, the optimizer must have the new "
        "parameters and not the old ones: do it before you build the optimizer and the Trainer."
    )


def to_device(items: Any, device: torch.device) -> Any:
    """Copy the tensors of nested tuples, lists and dicts to a device; a no-op on the CPU."""
    if device.type == "cpu":
        return items
    if isinstance(items, Tensor) or (hasattr(items, "to") and not isinstance(items, type)):
        return items.to(device, non_blocking=True)
    if isinstance(items, Mapping):
        return type(items)({key: to_device(value, device) for key, value in items.items()})  # type: ignore[call-arg]
    if isinstance(items, tuple) and hasattr(items, "_fields"):
        return type(items)(*(to_device(value, device) for value in items))
    if isinstance(items, (list, tuple)):
        return type(items)(to_device(value, device) for value in items)
    return items


@contextmanager
def evaluating(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Disable gradients and put modules into evaluation mode; afterwards restore the mode of each submodule."""
    modes = [(m, m.training) for module in modules.values() for m in module.modules()]
    for module in modules.values():
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, training in modes:
            m.training = training


def lone_samples_warning(
    modules: Mapping[str, nn.Module], *, batch_size: int, virtual_ranks: int, micro_batch_size: int | None
) -> str | None:
    """Return a warning if BatchNorm1d would only see single samples, and so never learn its statistics."""
    largest = min(micro_batch_size or batch_size, -(-batch_size // virtual_ranks))
    norms = (m for root in modules.values() for m in root.modules() if isinstance(m, nn.BatchNorm1d))
    if largest > 1 or next(norms, None) is None:
        return None
    return (
        f"every micro-batch has one sample (batch_size={batch_size}, virtual_ranks={virtual_ranks}, "
        f"micro_batch_size={micro_batch_size}), from which BatchNorm1d learns no statistics: it uses its running ones. "
        "Raise batch_size or micro_batch_size, or give Trainer fewer virtual_ranks."
    )


@contextmanager
def lone_sample(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Make BatchNorm use its running statistics for inputs of one value per channel, which have no variance.

    torch refuses such input in training. It occurs in the last batch of an epoch, when a virtual rank has one sample;
    it does not update the running statistics.
    """

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        values = inputs[0]
        if module.training and values.numel() == values.shape[1]:
            module.training = False
            switched.append(module)

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if module in switched:
            module.training = True
            switched.remove(module)

    switched: list[nn.Module] = []
    hooks = []
    for root in modules.values():
        for module in root.modules():
            if isinstance(module, _BatchNorm) and module.track_running_stats:
                hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in switched:
            module.training = True
