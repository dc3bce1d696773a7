"""`SyncBatchNorm`: torch's layer, on the CPU too, and the conversion of models to it and back.

The arithmetic over ranks is in `parallel.normalize`.
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
from unisono.text import a_type

__all__ = ["BatchNormNd", "SyncBatchNorm", "convert_sync_batchnorm", "revert_sync_batchnorm"]


class BatchNormNd(_BatchNorm):
    """torch's BatchNorm for any number of dimensions. A `SyncBatchNorm` that never was another layer reverts to it."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise ValueError(f"expected [N, C] or more dimensions, got shape {list(input.shape)}")


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation by the statistics of all ranks' batches, as if one process had the whole batch.

    Input [N, C] or [N, C, ...], on any device; N may differ between ranks and may be 0. Arguments, parameters, buffers
    and state dict are those of `torch.nn.SyncBatchNorm`. In training every rank of the group must call it, and every
    rank must call backward if any does; all ranks keep the same running statistics. In evaluation, with one rank, or
    without a group it is torch's BatchNorm, without communication. It is not a subclass of `torch.nn.SyncBatchNorm`,
    because DistributedDataParallel refuses that layer on the CPU.

    Traffic per call: an all-gather of 2C + 2 float64 numbers in forward, an all-reduce of 2C in backward.
    Under torch.compile training breaks the graph here; evaluation is compiled.

    Args:
        num_features: The number of channels, C.
        eps: The number added to the variance for numerical stability.
        momentum: The weight of a batch in the running statistics; None takes the mean over all batches.
        affine: True for a learnable weight and bias of each channel.
        track_running_stats: True to keep running statistics for evaluation.
        process_group: The ranks whose batches are normalised together; None means all ranks of the job.
        device: The device of parameters and buffers.
        dtype: The type of parameters and buffers.
        bias: False for a weight without a bias.
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
        """Normalise the input; in training, also update the running statistics. Every rank must call it in training.

        Raises:
            GroupError: The process group does not exist yet or has ended, or this rank is not in it.
            ValueError: The input has the wrong shape, or all ranks together have only one value per channel.
            TypeError: The input is not of a floating-point type.
            RankMismatchError: Some ranks record gradients and others do not. Found on the CPU alone.
        """
        if not self.training:
            return super().forward(input)
        # The decorated function imports the compiler, which takes longer than importing torch, so it is called only
        # while the compiler is at work.
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
        result = normalize_over_ranks(
            values, self.weight, self.bias, running=running, momentum=momentum, eps=self.eps, link=link
        )
        if running is not None and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)  # a call that fails is not counted
        return result

    def _next_momentum(self) -> float:
        if self.num_batches_tracked is None:
            return self.momentum or 0.0
        return 1.0 / (float(self.num_batches_tracked) + 1.0) if self.momentum is None else self.momentum

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """Return a copy that shares the group: a group cannot be copied, and averaged weights use the same one."""
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
    """Convert every BatchNorm in a model to a `SyncBatchNorm`, also torch's SyncBatchNorm, and return the same model.

    Layers remain the same objects, with their parameters, buffers, hooks and mode; only their class changes. So an
    optimizer that has the parameters keeps them, and a layer that is used in two places remains one layer. There is no
    communication.

    Args:
        module: The model.
        process_group: The ranks whose batches are normalised together; None means all ranks of the job.
        skip: Names of layers to leave unchanged, as in `named_modules`.

    Raises:
        TypeError: module is not a module, or a layer is a subclass of torch's layers that overrides forward, which
            would be lost, or a lazy layer without sizes yet. Nothing has been changed then.
        ValueError: A name in skip is not that of a BatchNorm layer. Nothing has been changed then.
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
    """Convert every `SyncBatchNorm` in a model back to the BatchNorm that it was before, and return the same model.

    For use in one process, such as export or quantisation. A layer that was created as a SyncBatchNorm becomes a
    `BatchNormNd`. There is no communication.

    Args:
        module: The model.

    Raises:
        TypeError: module is not a module.
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
        raise TypeError(f"module is {a_type(module)}: give a torch.nn.Module")


def _check_convertible(name: str, layer: nn.Module) -> None:
    where = f"layer {name!r}" if name else "the layer"
    if isinstance(layer, LazyModuleMixin):
        raise TypeError(
            f"{where} is {a_type(layer)} that has seen no input, so its sizes are not known. Run the model "
            "once on one batch before you convert it."
        )
    if isinstance(layer, SyncBatchNorm):
        return
    if type(layer).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        raise TypeError(
            f"{where} is {a_type(layer)} with a forward of its own, which SyncBatchNorm would replace. Leave "
            f"it alone with skip=[{name!r}], or write its forward around a SyncBatchNorm."
        )
