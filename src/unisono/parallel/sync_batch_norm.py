"""`SyncBatchNorm`: torch's layer, on the CPU too, and the conversion of models to it and back.

The arithmetic over ranks is `parallel.normalize`'s.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from unisono.collectives.group import group_of
from unisono.parallel.normalize import normalize_over_ranks

__all__ = ["BatchNormNd", "SyncBatchNorm", "convert_sync_batchnorm", "revert_sync_batchnorm"]


class BatchNormNd(_BatchNorm):
    """torch's BatchNorm for any number of dimensions: a `SyncBatchNorm` that never was another layer reverts to it."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise ValueError(f"expected [N, C] or more dimensions, got shape {list(input.shape)}")


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation by the statistics of all ranks' batches, as if one process had the whole batch.

    Input [N, C] or [N, C, ...], on any device; N may differ between ranks and may be 0. Arguments, parameters, buffers
    and state dict are those of `torch.nn.SyncBatchNorm`. In training every rank of the group must call it, and every
    rank must call backward if any does; all ranks keep the same running statistics. In evaluation, with one rank, or
    without a group it is torch's BatchNorm, and nothing travels. It is not a subclass of torch's layer, which
    DistributedDataParallel refuses on the CPU.

    Traffic per call: an all-gather of 2C + 2 float64 numbers in forward, an all-reduce of 2C in backward.
    Under torch.compile training breaks the graph here; evaluation is compiled.
    Args: process_group defaults to all ranks of the job.
    Raises: GroupError if ranks have not met, or this rank is not in the group; ValueError and RankMismatchError:
        see `normalize_over_ranks`.
    """

    process_group: dist.ProcessGroup | None
    _was: type[_BatchNorm]

    def __init__(  # noqa: PLR0917  torch's order
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        if not bias:
            self.register_parameter("bias", None)
        self.process_group = process_group
        self._was = BatchNormNd

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        self._was._check_input_dim(self, input)  # type: ignore[no-untyped-call]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """Normalise; in training also move the running statistics."""
        if not self.training:
            return super().forward(input)
        # The compiler takes longer to import than torch itself, so it is asked only where it is at work already.
        return _train_outside_graphs(self, input) if torch.compiler.is_compiling() else self._train(input)

    def _train(self, values: Tensor) -> Tensor:
        link = group_of(self.process_group)
        self._check_input_dim(values)
        if values.shape[1] != self.num_features:
            raise ValueError(f"expected {self.num_features} channels in dimension 1, got shape {list(values.shape)}")
        if not values.is_floating_point():
            raise TypeError(f"SyncBatchNorm takes floating-point numbers, and got {values.dtype}: use values.float()")
        if link.process_group is None or link.size == 1:
            return super().forward(values)
        running, momentum = None, 0.0
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            running, momentum = (self.running_mean, self.running_var), self._next_momentum()
        return normalize_over_ranks(
            values, self.weight, self.bias, running=running, momentum=momentum, eps=self.eps, link=link
        )

    def _next_momentum(self) -> float:
        if self.num_batches_tracked is None:
            return self.momentum or 0.0
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """Copy all but the group, which cannot be copied and is the same for a copy, such as averaged weights."""
        memo[id(self.process_group)] = self.process_group
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return other


@_disable_dynamo
def _train_outside_graphs(layer: SyncBatchNorm, values: Tensor) -> Tensor:
    return layer._train(values)


def convert_sync_batchnorm(
    module: nn.Module, process_group: dist.ProcessGroup | None = None, *, skip: Collection[str] = ()
) -> nn.Module:
    """Make every BatchNorm in a model a `SyncBatchNorm`, also torch's own SyncBatchNorm; return the same model.

    Layers stay the objects that they are, with their parameters, buffers, hooks and mode; only their class changes. So
    an optimizer that has the parameters keeps them, and a layer that is used in two places stays one layer. Local: no
    rank talks to others.
    Args: process_group: over which ranks, default all; skip: names of layers to leave alone, as in `named_modules`.
    Raises: TypeError for a subclass of torch's layers with a forward of its own, which would be lost, and for a lazy
        layer whose sizes are not known yet; ValueError for a name in skip that is no layer. Nothing is changed then.
    """
    _check_module(module)
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}
    if unknown := set(skip) - layers.keys():
        raise ValueError(
            f"skip names {sorted(unknown)}; the BatchNorm layers are {sorted(layers)}. Name some of these."
        )
    chosen = {name: layer for name, layer in layers.items() if name not in skip}
    for name, layer in chosen.items():
        _check_convertible(name, layer)
    for layer in chosen.values():
        if not isinstance(layer, SyncBatchNorm):
            was = BatchNormNd if isinstance(layer, nn.SyncBatchNorm) else type(layer)
            layer.__class__ = SyncBatchNorm
            layer.__dict__["_was"] = was
        layer.__dict__["process_group"] = process_group
    return module


def revert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Make every `SyncBatchNorm` in a model the BatchNorm that it was before, and return the same model.

    For use in one process: export, quantisation. A layer that was made as SyncBatchNorm becomes a `BatchNormNd`.
    """
    _check_module(module)
    for layer in module.modules():
        if isinstance(layer, SyncBatchNorm):
            was = layer._was
            del layer._was, layer.process_group
            layer.__class__ = was  # type: ignore[assignment]
    return module


def _check_module(module: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}: give a torch.nn.Module")


def _check_convertible(name: str, layer: nn.Module) -> None:
    where = f"layer {name!r}" if name else "the layer"
    if isinstance(layer, LazyModuleMixin):
        raise TypeError(
            f"{where} is a {type(layer).__name__} that has seen no input, so its sizes are not known. Run the model "
            "once on one batch before you convert it."
        )
    if isinstance(layer, SyncBatchNorm):
        return
    if type(layer).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        raise TypeError(
            f"{where} is a {type(layer).__name__} with a forward of its own, which SyncBatchNorm would replace. Leave "
            f"it alone with skip=[{name!r}], or write its forward around a SyncBatchNorm."
        )
