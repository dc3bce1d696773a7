"""Assigns a model's parameters to buckets, and chooses the buckets that travel in every backward.

All decisions depend only on data that is the same on all ranks, so all ranks decide the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unisono.parallel.buffer_sync import Buffers
from unisono.parallel.gradient_bucket import Bucket, Parameter
from unisono.parallel.trailer import RoundSummary, Trailer
from unisono.plan.bucketing import Item, group_by_size

__all__ = ["BucketPlan"]

_PATIENCE = 8
"""The number of consecutive rounds without a gradient after which a parameter is no longer waited for."""


class BucketPlan:
    """The buckets of one model.

    Args:
        parameters: The model's parameters.
        buffers: The model's buffers that are kept equal.
        limit_nbytes: The size of a bucket.
        first_nbytes: The size of the first bucket.
        ranks: The number of ranks.
        every: True if all buckets travel in every backward.
        static: True if every backward uses the parameters that the first one used.
        trailer_rides: True if the trailer may lie behind gradients.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        buffers: Buffers,
        *,
        limit_nbytes: int,
        first_nbytes: int,
        ranks: int,
        every: bool,
        static: bool,
        trailer_rides: bool,
    ) -> None:
        self._parameters, self._buffers = parameters, buffers
        self._limit_nbytes, self._first_nbytes, self._ranks = limit_nbytes, first_nbytes, ranks
        self._every, self._static, self._trailer_rides = every, static, trailer_rides
        n = len(parameters)
        self.buckets: list[Bucket] = []
        """All buckets, in the order in which gradients come."""
        self.travelling: list[Bucket] = []
        """The buckets that every backward sends, in this order."""
        self.bucket_of: list[Bucket | None] = []
        """For each parameter, its bucket; None if its gradient is sparse."""
        self.slot: list[int] = []
        """For each parameter, its position in the bucket."""
        self.expected = [True] * n
        """For each parameter, True if it is waited for: it recently got gradients on some rank."""
        self.trailer: Trailer
        self.trailer_bucket: Bucket | None = None
        """The bucket behind whose gradients the trailer lies; None if it travels as a separate message."""
        self._idle = [0] * n
        self.settled: RoundSummary | None = None
        """The latest summary if it matches `expected` exactly: then nothing travels again or is to be learned."""
        self._arrange([i for i in reversed(range(n)) if not parameters[i].sparse], [])

    def travels(self, i: int) -> bool:
        """Return True if the bucket of a parameter has been sent in this round."""
        bucket = self.bucket_of[i]
        return bucket is not None and bucket.sent

    def place_trailer(self) -> None:
        """Choose the bucket of the trailer, and reserve its elements: its length depends on the buffers that travel."""
        self.trailer = Trailer(
            ranks=self._ranks,
            parameters=len(self._parameters),
            buffers=len(self._buffers),
            values=self._buffers.numel,
        )
        last = self.travelling[-1] if self.travelling else None
        self.trailer_bucket = last if last is not None and last.dtype == torch.float32 and self._trailer_rides else None
        for bucket in self.buckets:
            bucket.resize_trailer(self.trailer.numel if bucket is self.trailer_bucket else 0)

    def learn(self, summary: RoundSummary, *, first: bool, order: Callable[[], Sequence[int]]) -> None:
        """Learn from a round which parameters to wait for in the next ones, and from the first one their order.

        Args:
            summary: The combined flags of all ranks.
            first: True if it was the first round.
            order: Returns the order of gradients on the first rank, for the parameters of which it is known. It is
                called at most once, and on all ranks or on none.
        """
        if summary is self.settled:
            return
        before, used = list(self.expected), summary.used
        for i in range(len(self._parameters)):
            at_once = (first and not self._every) or self._static
            self._idle[i] = 0 if i in used else _PATIENCE if at_once else self._idle[i] + 1
            self.expected[i] = self._idle[i] < _PATIENCE
        if first and len(self.buckets) > 1:
            seen = dict.fromkeys(i for i in order() if not self._parameters[i].sparse)
            rest = [
                i for i in reversed(range(len(self._parameters))) if self.bucket_of[i] is not None and i not in seen
            ]
            self._arrange([*seen, *(i for i in rest if self.expected[i])], [i for i in rest if not self.expected[i]])
        elif before != self.expected:
            self._choose()
        elif not summary.late and all(self.expected[i] == (i in used) for i in range(len(self._parameters))):
            self.settled = summary  # the same again would change nothing

    def _arrange(self, first: Sequence[int], others: Sequence[int]) -> None:
        """Make the buckets, first of the parameters in the order of their gradients, then of those that get none."""
        self.buckets = []
        for some in (first, others):
            tensors = [self._parameters[i].tensor for i in some]
            groups = group_by_size(
                [Item(tensor.nbytes, tensor.device, tensor.dtype) for tensor in tensors],
                limit_nbytes=self._limit_nbytes,
                first_nbytes=self._first_nbytes,
                exceed=True,
            )
            self.buckets += [Bucket([some[i] for i in group], self._parameters) for group in groups]
        self.bucket_of, self.slot = [None] * len(self._parameters), [0] * len(self._parameters)
        for bucket in self.buckets:
            for slot, i in enumerate(bucket.members):
                self.bucket_of[i], self.slot[i] = bucket, slot
        self._choose()

    def _choose(self) -> None:
        """Choose the buckets that travel in every round: those of parameters that recently got gradients."""
        for bucket in self.buckets:
            bucket.usual = sum(self.expected[i] for i in bucket.members)
        self.travelling = [bucket for bucket in self.buckets if bucket.usual or self._every]
        self.place_trailer()
