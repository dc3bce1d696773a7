"""One rank's gradients of one model: moves them from p.grad into buckets, and sums over ranks back to p.grad.

This module decides which gradients count: a rank without a batch has none, and an earlier sum that p.grad still holds
counts on the first rank alone. `parallel.reducer` decides when buckets travel.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.engine.gradient_hooks import is_accumulated
from unisono.errors import UnisonoError
from unisono.parallel.batch_weights import BatchWeights
from unisono.parallel.gradient_bucket import Bucket, Parameter

__all__ = ["LARGE", "GradientState"]

LARGE = 64 * 1024
"""The number of elements from which a gradient is written into its bucket immediately, in a separate pass. Smaller ones
are written together when the bucket is full, which costs fewer calls."""


class GradientState:
    """The gradients that this rank has of some parameters, which are identified by their indices.

    Args:
        parameters: The parameters.
        scale: The factor by which each gradient is multiplied when it is written into a bucket.
        average: True if results are means. Sums are remembered, to recognise those that are still in p.grad later.
        is_first: True if this is the first rank.
        weights: Further factors for gradients, by the share of the batch that this rank has; None for no such factors.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        *,
        scale: float,
        average: bool,
        is_first: bool,
        weights: BatchWeights | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.scale, self.weights = scale, weights
        self.used = [False] * len(self.parameters)
        """For each parameter, True if it got a gradient since the last round."""
        self.shadow = False
        """True if this rank has no batch in this round."""
        # A tensor, since torch makes one of every number; in float64, which is exact for all types.
        self._factor = torch.tensor(scale, dtype=torch.float64)
        self._average, self._is_first = average, is_first
        self._given: list[weakref.ref[Tensor] | None] = [None] * len(self.parameters)
        self._written: list[bool] = []
        self._stash: dict[int, Tensor] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a round: nothing has been written into buckets."""
        self._written = [False] * len(self.parameters)
        self._stash = {}

    def end(self) -> None:
        """End a round: no parameter has got a gradient since."""
        self.used = [False] * len(self.parameters)

    def drop_cleared(self) -> None:
        """Forget gradients that were kept on this rank and have been set to None since, as by `zero_grad`."""
        for i, p in enumerate(self.parameters):
            if self.used[i] and p.tensor.grad is None:
                self.used[i] = False

    def use_all(self) -> None:
        """Mark every gradient that p.grad holds now as new, except sums of earlier rounds."""
        for i, p in enumerate(self.parameters):
            if p.tensor.grad is not None and not self._is_given(i):
                self.used[i] = True

    def drop_counted(self, i: int) -> None:
        """Drop an earlier sum from p.grad before a gradient is added to it: the sum counts on the first rank alone."""
        if not self._is_first and self._is_given(i) and is_accumulated(self.parameters[i].tensor):
            self.parameters[i].tensor.grad = None

    def scale_of(self, i: int) -> float:
        """Return the factor for what is in p.grad."""
        return self.scale if self.weights is None else self.scale * self.weights.of(i)

    def own(self, i: int) -> Tensor | None:
        """Return p.grad if it counts on this rank, otherwise None."""
        gradient = self.parameters[i].tensor.grad
        if gradient is None or self.shadow or (not self._is_first and self._is_given(i)):
            return None
        if self.weights is not None and self.weights.of(i) == 0.0:
            return None  # 0 times a gradient that is not finite would count
        return gradient

    def fill(self, bucket: Bucket) -> None:
        """Write those gradients of a bucket that it does not contain yet."""
        bucket.open()
        if self.shadow:
            bucket.gradients.zero_()
            return
        small: list[int] = []
        for slot, i in enumerate(bucket.members):
            if self.own(i) is None:
                if not self._written[i]:
                    bucket.views[slot].zero_()
            elif self._written[i] or bucket.tensors[slot].numel() >= LARGE:
                self.write(bucket, slot)
            else:
                small.append(slot)
        if not small:
            return
        views = [bucket.views[slot] for slot in small]
        scales = [self.scale] if self.weights is None else [self.scale_of(bucket.members[slot]) for slot in small]
        torch._foreach_copy_(views, [self.take(bucket.members[slot], bucket.dtype) for slot in small])
        if len(set(scales)) > 1:
            torch._foreach_mul_(views, scales)
        elif scales[0] != 1.0:
            if len(small) == len(bucket.members):
                bucket.gradients.mul_(scales[0])
            else:
                torch._foreach_mul_(views, scales[0])

    def write(self, bucket: Bucket, slot: int) -> None:
        """Write one gradient into an open bucket, or add it to the values written there before."""
        i, view = bucket.members[slot], bucket.views[slot]
        scale = self.scale_of(i)
        gradient = self.take(i, bucket.dtype)
        if scale == 0.0:
            if not self._written[i]:
                view.zero_()
        elif self._written[i]:
            view.add_(gradient, alpha=scale)
        elif scale == 1.0:
            view.copy_(gradient)
        else:
            torch.mul(gradient, self._factor if scale == self.scale else scale, out=view)
        self._written[i] = True

    def take(self, i: int, dtype: torch.dtype) -> Tensor:
        """Remove a parameter's gradient and return it, dense and without a graph. p.grad is None afterwards.

        Raises:
            UnisonoError: The gradient is not of the dtype.
        """
        parameter = self.parameters[i]
        gradient = parameter.tensor.grad
        assert gradient is not None
        if not self.used[i]:
            self._stash[i] = gradient
        parameter.tensor.grad = None
        if gradient.requires_grad:
            _warn_of_graph(parameter.name)
            gradient = gradient.detach()
        if gradient.layout != torch.strided:
            _warn_of_sparse(parameter.name)
            gradient = gradient.to_dense()
        if gradient.dtype != dtype:
            raise UnisonoError(
                f"parameter {parameter.name!r} has a gradient of {gradient.dtype}, and was of {dtype} when "
                "replicate() saw it: call replicas.update() on every rank after changing the types of a model"
            )
        return gradient

    def give(self, i: int, reduced: Tensor) -> None:
        """Set p.grad to the reduced gradient, unless this rank has no batch."""
        if self.shadow:
            return
        self.parameters[i].tensor.grad = reduced
        if self.weights is not None:
            self.weights.reduced(i, reduced)
        if not self._average:
            self._given[i] = weakref.ref(reduced)

    def give_back(self, i: int) -> None:
        """Put back a gradient that `take` removed although it was not new. For parameters that got none on any rank."""
        if i in self._stash:
            self.parameters[i].tensor.grad = self._stash[i]

    def _is_given(self, i: int) -> bool:
        """Return True if p.grad is an earlier sum, or one with gradients added in place. Always False for means."""
        reference = self._given[i]
        return reference is not None and reference() is self.parameters[i].tensor.grad


def _warn_of_graph(name: str) -> None:
    warnings.warn(
        f"the gradient of {name!r} has a graph of its own (create_graph=True), which is not reduced: p.grad is the "
        "mean over ranks, without a graph. For a penalty on gradients use torch.autograd.grad inside the loss",
        stacklevel=2,
    )


def _warn_of_sparse(name: str) -> None:
    warnings.warn(
        f"the gradient of {name!r} is sparse, but no module with sparse=True holds the parameter, so it is reduced as "
        "a dense one",
        stacklevel=2,
    )
