"""The arguments of `shard`: checks of them, its comparison over ranks, and equal values on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
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
from unisono.parallel.wrappers import is_distributed, wrapper_of
from unisono.state.digest import digest
from unisono.text import a_type

__all__ = ["LoopArguments", "check_loop", "describe_loop", "equalize"]

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


def _named(optimizer: Any) -> dict[str, Optimizer]:
    """Return the optimizers by name, "" for a single one."""
    if isinstance(optimizer, Mapping) and not optimizer:
        raise ValueError(f"the dict of optimizers is empty: {_CALLER} takes at least one")
    optimizers: dict[str, Any] = dict(optimizer) if isinstance(optimizer, Mapping) else {"": optimizer}
    of: dict[int, str] = {}
    for name, each in optimizers.items():
        if not isinstance(name, str) or (not name and isinstance(optimizer, Mapping)):
            raise TypeError(f"an optimizer is named {name!r}: give them names, as in {{'body': ..., 'head': ...}}")
        if not isinstance(each, Optimizer):
            what = f"optimizer {name!r}" if name else "optimizer"
            raise TypeError(
                f"{what} is {a_type(each)}: {_CALLER} takes one torch.optim.Optimizer, or a dict of several by name"
            )
        for p in (p for group in each.param_groups for p in group["params"]):
            if id(p) in of:
                raise ValueError(
                    f"optimizers {of[id(p)]!r} and {name!r} have a parameter of shape {list(p.shape)} in common, and "
                    "its state can be that of one alone: give each parameter to one optimizer"
                )
        of |= {id(p): name for group in each.param_groups for p in group["params"]}
    return optimizers


def _check_scaler(scaler: Any, model: nn.Module) -> GradScaler | None:
    """Return a scaler if it is to be used."""
    if scaler is None:
        return None
    place = next((p.device.type for p in model.parameters()), "cpu")
    if not isinstance(scaler, GradScaler):
        raise TypeError(f'scaler is {a_type(scaler)}; expected torch.amp.GradScaler("{place}")')
    if not scaler.is_enabled():
        return None
    if scaler._device != place:
        where = "the CPU" if place == "cpu" else place
        raise ValueError(
            f'scaler is for {scaler._device}, and the model is on {where}: make it by torch.amp.GradScaler("{place}")'
        )
    for name, p in model.named_parameters():
        if p.dtype == torch.float16 or p.is_complex():
            raise ValueError(
                f"parameter {name!r} has dtype {str(p.dtype).removeprefix('torch.')}, whose gradient GradScaler cannot "
                "unscale: keep weights in float32, which torch.autocast casts, or leave out scaler"
            )
    return scaler


class LoopArguments(NamedTuple):
    """The arguments of `shard`, checked."""

    parallel: Shard
    """How to divide the model."""
    optimizers: Mapping[str, Optimizer]
    """The optimizers by name, "" for a single one. They have no parameter in common."""
    scaler: GradScaler | None
    """The GradScaler of the loop; None: losses are not scaled."""


def check_loop(model: Any, optimizer: Any, parallel: Any, scaler: Any, *, ranks: int) -> LoopArguments:
    """Check what a rank has given to `shard`, and return it. Local.

    Raises:
        TypeError: An argument has the wrong type, or another library has wrapped the model.
        ValueError: The model or the optimizer cannot be divided, or the model was built with other settings.
    """
    settings = _settings(model, parallel)
    optimizers = _named(optimizer)
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
        if is_distributed(p):
            raise ValueError(
                f"parameter {name!r} is a DTensor, divided among ranks already: give {_CALLER} the model as it was "
                "before it was sharded or parallelized"
            )
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
    check_divisible(settings, model, optimizers.values(), ranks, caller=_CALLER, argument=_CALLER)
    built = built_parts(model)
    if built is not None:
        built.check_unchanged(model)
    return LoopArguments(settings, optimizers, _check_scaler(scaler, model))


def describe_loop(arguments: LoopArguments, model: nn.Module) -> Document:
    """Describe what must be equal on all ranks, but for the values of tensors."""
    modules = {"": model}
    return {
        "parallel": repr(arguments.parallel),
        "the state of scaler": None if arguments.scaler is None else plain(arguments.scaler.state_dict()),
        **describe_models(modules),
        **describe_optimizers(arguments.optimizers, parameter_names(modules)),
    }


def equalize(world: World, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Set weights and buffers to those of rank 0, and compare the state of optimizers. Every rank must call it.

    Traffic: a broadcast of each tensor.

    Raises:
        RankMismatchError: On all ranks, if the optimizer's state differs.
    """
    if world.group is None:
        return
    names = parameter_names({"": model})
    own = {
        names.get(id(p), "a parameter of no model"): digest({"": repr(plain(state))})
        for optimizer in optimizers
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
