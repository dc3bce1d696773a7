"""A second message at the end of a backward, for gradients that missed the first ones.

They came after their bucket was sent, or belong to parameters whose bucket was not sent, because recently these got no
gradients. Ranks have exchanged their indices (`parallel.trailer`), so all send the same. Sparse gradients are handled
in `parallel.sparse_all_reduce`.
"""

from __future__ import annotations

import torch

from unisono.parallel.bucket_plan import BucketPlan
from unisono.parallel.gradient_bucket import Bucket
from unisono.parallel.gradient_state import GradientState
from unisono.parallel.gradient_transport import GradientTransport
from unisono.parallel.trailer import RoundSummary

__all__ = ["reduce_late"]


def reduce_late(
    summary: RoundSummary,
    gradients: GradientState,
    plan: BucketPlan,
    gradient_transport: GradientTransport,
    *,
    factor: float,
) -> None:
    """Reduce the gradients that no sent bucket contained. Every rank must call it.

    A gradient whose bucket was sent is added to the bucket's sum; the others become p.grad.

    Args:
        summary: The combined flags of all ranks.
        gradients: This rank's gradients.
        plan: The buckets.
        gradient_transport: The ranks.
        factor: The factor for sums over ranks.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i in sorted(summary.used | summary.late):
        parameter = gradients.parameters[i]
        if not parameter.sparse and (i in summary.late or not plan.travels(i)):
            kinds.setdefault((parameter.tensor.dtype, parameter.tensor.device), []).append(i)
    for members in kinds.values():
        bucket = Bucket(members, gradients.parameters)
        bucket.open()
        assert bucket.memory is not None
        for i, view in zip(bucket.members, bucket.views, strict=True):
            target = plan.bucket_of[i]
            assert target is not None
            if gradients.own(i) is None:
                view.zero_()
            else:
                scale = gradients.scale_of(i)
                view.copy_(gradients.take(i, target.dtype)).mul_(scale)
        what = f"late gradients of {bucket.describe()}"
        gradient_transport.wait(gradient_transport.all_reduce(bucket.memory, what), what)
        for i, view in zip(bucket.members, bucket.views, strict=True):
            target = plan.bucket_of[i]
            view.mul_(factor)
            if target is not None and plan.travels(i):
                target.views[plan.slot[i]].add_(view)
            else:
                gradients.give(i, view)
