"""What `shard` is given: checks of it, its comparison over ranks, and equal values on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.collectives.world import World
from unisono.engine.description import describe_models, describe_optimizers, plain
from unisono.engine.gradient_hooks import watchers_of
from unisono.engine.model_contents import parameter_names
from unisono.engine.norm import dense_strides, in_memory_order
from unisono.errors import RankMismatchError
from unisono.mismatch import Document
from unisono.parallel.remote_module import refuse_remote
from unisono.parallel.sharding.built_parts import built_parts
from unisono.parallel.sharding.division_checks import check_divisible, refuse_compiled
from unisono.parallel.sharding.shard import Shard
from unisono.parallel.wrappers import wrapper_of
from unisono.state.digest import digest
from unisono.text import a_type

__all__ = ["check_loop", "describe_loop", "equalize"]

_CALLER = "unisono.parallel.shard"


def _settings(model: Any, parallel: Any) -> Shard:
    """Return how to divide a model: as it is given, or as it was built."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {a_type(model)}: {_CALLER} takes one torch.nn.Module, then its optimizer")
    if parallel is not None and not isinstance(parallel, Shard):
        raise TypeError(f"parallel is {a_type(parallel)}; expected unisono.parallel.Shard(...)")
    built = built_parts(model)
    if built is None:
        return parallel or Shard()
    if parallel is not None and parallel != built.shard:
        raise ValueError(
            f"the model was built by unisono.parallel.build(..., parallel={built.shard}), so each rank has the part of "
            f"it that this needs, and {_CALLER} was given parallel={parallel}: leave it out"
        )
    return built.shard


def check_loop(model: Any, optimizer: Any, parallel: Any, *, ranks: int) -> Shard:
    """Check what a rank has given to `shard`, and return how to divide the model. Local.

    Raises:
        TypeError: An argument has the wrong type, or another library has wrapped the model.
        ValueError: The model or the optimizer cannot be divided, or the model was built with other settings.
    """
    settings = _settings(model, parallel)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer is {a_type(optimizer)}: {_CALLER} takes one torch.optim.Optimizer; give parameters that need "
            "other settings a parameter group of their own"
        )
    refuse_remote(model, _CALLER, "divide the whole model, or replicate() the rest of it")
    for path, module in model.named_modules(prefix="model"):
        wrapper = wrapper_of(module, path)
        if wrapper is not None:
            raise TypeError(f"{path} is wrapped in {wrapper[0]}, which looks after parameters too: give {wrapper[1]}")
    if hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:
        raise refuse_compiled(_CALLER)
    for name, p in model.named_parameters():
        if nn.parameter.is_lazy(p):
            raise ValueError(f"parameter {name!r} has no shape yet: run a forward pass before {_CALLER}")
        if p.is_meta:
            raise ValueError(
                f"parameter {name!r} is on the meta device: give it values before {_CALLER}, or make the model by "
                "unisono.parallel.build, which keeps this rank's part of them"
            )
        if watchers_of(p):
            raise ValueError(
                f"parameter {name!r} has a gradient hook of replicate(), a Trainer or another {_CALLER}, which sums "
                "its gradients already: use one of them for a model"
            )
    check_divisible(settings, model, [optimizer], ranks, caller=_CALLER, argument=_CALLER)
    built = built_parts(model)
    if built is not None:
        built.check_unchanged(model)
    return settings


def describe_loop(settings: Shard, model: nn.Module, optimizer: Optimizer) -> Document:
    """Describe what must be equal on all ranks, but for the values of tensors."""
    modules = {"": model}
    return {
        "parallel": repr(settings),
        **describe_models(modules),
        **describe_optimizers({"": optimizer}, parameter_names(modules)),
    }


def equalize(world: World, model: nn.Module, optimizer: Optimizer) -> None:
    """Set weights and buffers to those of rank 0, and compare the optimizer's state. Every rank must call it.

    Traffic: a broadcast of each tensor.

    Raises:
        RankMismatchError: On all ranks, if the optimizer's state differs.
    """
    if world.group is None:
        return
    names = parameter_names({"": model})
    own = {
        names.get(id(p), "a parameter of no model"): digest({"": repr(plain(state))})
        for p, state in optimizer.state.items()
    }
    everyone = world.gather(own, f"{_CALLER} comparing optimizers")
    for rank, theirs in enumerate(everyone):
        differing = [name for name in {**everyone[0], **theirs} if everyone[0].get(name) != theirs.get(name)]
        if differing:
            raise RankMismatchError(
                f"the optimizer's state differs between ranks: that of {differing[0]!r} on rank {rank} is not that of "
                f"rank 0 ({len(differing)} of {len({**everyone[0], **theirs})} parameters). Load the same checkpoint "
                f"into the optimizer on every rank before {_CALLER}, or none."
            )
    tensors: list[Tensor] = [*model.buffers()]
    if built_parts(model) is None:
        tensors += model.parameters()
    with torch.no_grad():
        for tensor in tensors:
            _take_from_first(world, tensor.detach())


def _take_from_first(world: World, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or not tensor.numel():
        return
    sent = in_memory_order(tensor, dense_strides(tensor))
    is_view = sent.data_ptr() == tensor.data_ptr()
    world.broadcast_tensor(sent)
    if not is_view:
        tensor.copy_(sent.as_strided(tensor.shape, dense_strides(tensor)))
