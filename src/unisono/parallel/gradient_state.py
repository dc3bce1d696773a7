"""One rank's gradients of one model: how they go from p.grad into buckets, and how sums over ranks come back.

Which of them count is known here: a rank without a batch has none, and a sum that p.grad still holds from before counts
on the first rank alone. When buckets travel is `parallel.reducer`'s affair.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.errors import UnisonoError
from unisono.parallel.buckets import Bucket, Parameter

__all__ = ["LARGE", "GradientState"]

LARGE = 64 * 1024
"""Elements from which a gradient is written into its bucket at once, by one pass of its own. Smaller ones are written
together when the bucket is full, which costs fewer calls."""


class GradientState:
    """The gradients that this rank has of some parameters, which are named by their indices.

    Args: scale is what each is multiplied by on its way into a bucket. average is whether what comes back are means;
        sums are recognised when they are met again. is_first is whether this is the first rank.
    """

    def __init__(self, parameters: Sequence[Parameter], *, scale: float, average: bool, is_first: bool) -> None:
        self.parameters = list(parameters)
        self.scale = scale
        self.used = [False] * len(self.parameters)
        """By parameter, whether it got a gradient since the last round."""
        self.shadow = False
        """Whether this rank has no batch in this round."""
        # A tensor, since torch makes one of every number; of float64, which is exact for all types.
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

    def use_all(self) -> None:
        """Count as new what p.grad holds now, except sums of earlier rounds."""
        for i, p in enumerate(self.parameters):
            if p.tensor.grad is not None and not self._is_given(i):
                self.used[i] = True

    def drop_counted(self, i: int) -> None:
        """Make room for a gradient that is to be added to p.grad: a sum that is there counts on the first rank."""
        if not self._is_first and self._is_given(i):
            self.parameters[i].tensor.grad = None

    def own(self, i: int) -> Tensor | None:
        """Give what p.grad holds if it counts on this rank."""
        gradient = self.parameters[i].tensor.grad
        if gradient is None or self.shadow or (not self._is_first and self._is_given(i)):
            return None
        return gradient

    def fill(self, bucket: Bucket) -> None:
        """Write into a bucket what is not yet there of its gradients."""
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
        torch._foreach_copy_(views, [self.take(bucket.members[slot], bucket.dtype) for slot in small])
        if self.scale != 1.0:
            if len(small) == len(bucket.members):
                bucket.gradients.mul_(self.scale)
            else:
                torch._foreach_mul_(views, self.scale)

    def write(self, bucket: Bucket, slot: int) -> None:
        """Write one gradient into an open bucket, or add it to what was written there before."""
        i, view = bucket.members[slot], bucket.views[slot]
        gradient = self.take(i, bucket.dtype)
        if self._written[i]:
            view.add_(gradient, alpha=self.scale)
        elif self.scale == 1.0:
            view.copy_(gradient)
        else:
            torch.mul(gradient, self._factor, out=view)
        self._written[i] = True

    def take(self, i: int, dtype: torch.dtype) -> Tensor:
        """Take a gradient off its parameter; what autograd adds afterwards is then by itself.

        Raises: UnisonoError if it is not of the dtype.
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
        """Show what ranks reduced as p.grad."""
        if self.shadow:
            return
        self.parameters[i].tensor.grad = reduced
        if not self._average:
            self._given[i] = weakref.ref(reduced)

    def give_back(self, i: int) -> None:
        """Put a gradient back that was taken without being new, as no rank got one: then it stays as it was."""
        if i in self._stash:
            self.parameters[i].tensor.grad = self._stash[i]

    def _is_given(self, i: int) -> bool:
        """Whether p.grad is, or has grown from, what was reduced before. Known only where sums are not averaged."""
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
