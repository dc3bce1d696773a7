"""A second message at the end of a backward, for gradients that the first ones could not carry.

They came after their bucket had left, or belong to parameters whose bucket did not travel, because lately these got
none. Ranks have exchanged which they are (`parallel.trailer`), so all send the same. Sparse gradients are not
here.
"""

from __future__ import annotations

import torch

from unisono.parallel.bucket_plan import BucketPlan
from unisono.parallel.buckets import Bucket
from unisono.parallel.gradient_group import GradientGroup
from unisono.parallel.gradient_state import GradientState
from unisono.parallel.trailer import RoundSummary

__all__ = ["reduce_late"]


def reduce_late(
    summary: RoundSummary, gradients: GradientState, plan: BucketPlan, gradient_group: GradientGroup, *, factor: float
) -> None:
    """Reduce the gradients that are in no bucket that travelled. Every rank must call it.

    What belongs to a bucket that did travel is added to what came by it; the rest becomes p.grad.
    Args: factor is what to multiply sums over ranks by.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i in sorted(summary.used | summary.late):
        parameter = gradients.parameters[i]
        if not parameter.sparse and (i in summary.late or not plan.travels(i)):
            kinds.setdefault((parameter.tensor.dtype, parameter.tensor.device), []).append(i)
    for members in kinds.values():
        _reduce(Bucket(members, gradients.parameters), gradients, plan, gradient_group, factor=factor)


def _reduce(
    bucket: Bucket, gradients: GradientState, plan: BucketPlan, gradient_group: GradientGroup, *, factor: float
) -> None:
    bucket.open()
    assert bucket.memory is not None
    for i, view in zip(bucket.members, bucket.views, strict=True):
        target = plan.bucket_of[i]
        assert target is not None
        if gradients.own(i) is None:
            view.zero_()
        else:
            view.copy_(gradients.take(i, target.dtype)).mul_(gradients.scale)
    what = f"late gradients of {bucket.describe()}"
    gradient_group.wait(gradient_group.sum(bucket.memory, what), what)
    for i, view in zip(bucket.members, bucket.views, strict=True):
        target = plan.bucket_of[i]
        view.mul_(factor)
        if target is not None and plan.travels(i):
            target.views[plan.slot[i]].add_(view)
        else:
            gradients.give(i, view)
