"""Finds models that another library has wrapped or sharded, by their class names, so that no library is imported."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["is_distributed", "wrapper_of"]

_WRAPPERS = {
    ("torch", "DistributedDataParallel"): "the module in it, {name}.module",
    ("torch", "DDP"): "the model as it was before replicate",  # torch.distributed._composable.replicate
    ("torch", "DataParallel"): "the module in it, {name}.module, and start a rank for each device",
    ("torch", "FullyShardedDataParallel"): "the model as it was before it was sharded",
    ("torch", "FSDPModule"): "the model as it was before fully_shard",
    ("lightning_fabric", "_FabricModule"): "the module in it, {name}.module",
    ("lightning", "_FabricModule"): "the module in it, {name}.module",
}


def is_distributed(parameter: Tensor) -> bool:
    """Return True for a DTensor, of which each rank has a part, as `parallelize_module` and `fully_shard` make them."""
    return any(base.__name__ == "DTensor" for base in type(parameter).__mro__)


def wrapper_of(module: nn.Module, name: str) -> tuple[str, str] | None:
    """Return the wrapper of a module whose gradients or parameters another library manages.

    Args:
        module: The module. Its submodules are not examined.
        name: The user's name for it, for the remedy.

    Returns:
        The wrapper's name, and what to pass in place of the module; None if the module is not wrapped.
    """
    for base in type(module).__mro__:
        remedy = _WRAPPERS.get((base.__module__.partition(".")[0], base.__name__))
        if remedy is not None:
            return base.__name__, remedy.format(name=name)
    return None
