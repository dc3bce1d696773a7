"""Weights of a rank's gradients where ranks have unequal shares of the batch: the weights of `unisono.data.loader`.

p.grad is multiplied by its weight only when it is written into a bucket, where it is multiplied by 1 / ranks anyway: a
step costs what it costs without weights. That is enough unless p.grad adds up gradients of different weights, those of
several batches (`no_sync`) or of an earlier mean and a batch. Then they are multiplied before they are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from unisono.data import RankLoader
from unisono.engine.gradient_hooks import is_accumulated
from unisono.parallel.gradient_bucket import Parameter
from unisono.text import a_type

__all__ = ["BatchWeights", "check_loader"]


class BatchWeights:
    """The weights by which the gradients in p.grad are to be multiplied, one for each parameter.

    A tensor in p.grad that came from elsewhere, such as `torch.autograd.grad`, has the weight of the current batch.

    Args:
        parameters: The parameters, which are identified by their indices.
        loader: The loader, which knows the weight of the current batch.
    """

    def __init__(self, parameters: Sequence[Parameter], loader: RankLoader) -> None:
        self._tensors = [p.tensor for p in parameters]
        self._loader = loader
        self._known: list[tuple[ref[Tensor], float] | None] = [None] * len(parameters)
        self._arriving = [1.0] * len(parameters)

    def of(self, i: int) -> float:
        """Return the weight of what is in p.grad."""
        gradient, known = self._tensors[i].grad, self._known[i]
        if gradient is None or known is None or known[0]() is not gradient:
            return self._loader.weight
        return known[1]

    def before(self, i: int, gradient: Tensor) -> Tensor | None:
        """Prepare for a gradient that is about to be added to p.grad.

        Returns:
            The gradient to add in its place, if the two have different weights; otherwise None.
        """
        parameter, weight = self._tensors[i], self._loader.weight
        self._arriving[i] = weight
        earlier = parameter.grad
        if earlier is None:
            return None
        earlier_weight = self.of(i)
        if earlier_weight == weight or not is_accumulated(parameter):
            return None
        if earlier_weight == 0.0:  # it counts as nothing, even if it is not finite
            parameter.grad = None
            return None
        if earlier_weight != 1.0:
            parameter.grad = earlier * earlier_weight
        self._arriving[i] = 1.0
        if weight == 1.0:
            return None
        return gradient * weight if weight else torch.zeros_like(gradient)

    def added(self, i: int, *, kept: bool) -> None:
        """Note the weight of p.grad, to which the gradient that `before` saw has been added.

        Args:
            i: The index of the parameter.
            kept: True if p.grad is not reduced in this backward, so that the next batch may have another weight.
        """
        weight = self._arriving[i]
        if kept or weight != self._loader.weight:
            gradient = self._tensors[i].grad
            self._known[i] = None if gradient is None else (ref(gradient), weight)

    def reduced(self, i: int, mean: Tensor) -> None:
        """Note that p.grad is the mean over ranks."""
        self._known[i] = (ref(mean), 1.0)


def check_loader(loader: object, *, rank: int, ranks: int) -> None:
    """Check the argument `loader` of `replicate`.

    Args:
        loader: The argument.
        rank: The number of this rank among those that train together.
        ranks: Their number.

    Raises:
        TypeError: It is not what `unisono.data.loader` returned.
        ValueError: It reads the batches of another rank, or of another number of ranks.
    """
    if not isinstance(loader, RankLoader):
        given: Any = loader
        raise TypeError(
            f"loader is {a_type(given)}, which has no weights: give the object that unisono.data.loader(...) "
            "returned, not an iterator over it. For other data leave it out, and multiply the loss by this rank's "
            "share of the samples times the number of ranks"
        )
    if (loader.rank, loader.world_size) != (rank, ranks):
        raise ValueError(
            f"loader reads the batches of rank {loader.rank} of {loader.world_size}, and here replicate trains rank "
            f"{rank} of {ranks}, so the loader's weights do not fit: make it after unisono.init(), with the group that "
            "replicate gets, and without rank and world_size"
        )
