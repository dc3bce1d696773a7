"""Reduces the gradients of one model over ranks during backward: from hooks on its parameters to p.grad at the end.

One backward is one round. As gradients come, they are written into buckets, and full buckets are sent, in the same
order on all ranks. The last bucket is sent at the end of the backward. Behind its gradients lies the trailer
(`parallel.trailer`), which tells all ranks which parameters got a gradient on any rank. Buckets of parameters that got
none recently do not travel. If one of these gets a gradient, or a parameter gets one after its bucket was sent, all
ranks learn it from the trailer, and these gradients travel in a second message (`parallel.late_gradients`).
`parallel.gradient_state` decides which gradients of a rank count, and writes them into buckets. Buckets filled by hooks
are DDP's idea (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2), and as there, the order of gradients in the
first backward determines the order of buckets afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unisono.data import RankLoader
from unisono.engine.gradient_hooks import keep_alive, on_gradient, release
from unisono.errors import RankMismatchError, UnisonoError
from unisono.parallel.backward_callback import BackwardEnd
from unisono.parallel.batch_weights import BatchWeights
from unisono.parallel.bucket_plan import BucketPlan
from unisono.parallel.buffer_sync import BufferMode, Buffers
from unisono.parallel.comm_hooks import CommHook, GradBucket, begin, hook_and_state, result_of
from unisono.parallel.gradient_bucket import Bucket, Parameter
from unisono.parallel.gradient_state import LARGE, GradientState
from unisono.parallel.gradient_transport import GradientTransport
from unisono.parallel.late_gradients import reduce_late
from unisono.parallel.parameter_checks import name_parameters, refuse_added, refuse_frozen
from unisono.parallel.sparse_all_reduce import reduce_sparse
from unisono.parallel.trailer import RoundSummary

__all__ = ["Reducer", "ReducerSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducerSettings:
    """The arguments of `replicate` that determine how gradients travel; sizes are in bytes."""

    bucket_nbytes: int
    first_nbytes: int
    average: bool
    overlap: bool
    static_graph: bool
    comm_hook: CommHook | tuple[Any, CommHook] | None
    buffers: BufferMode | None
    loader: RankLoader | None


class Reducer:
    """Watches one model's parameters and reduces the gradients of its backward passes.

    Args:
        model: The model.
        parameters: Its parameters that can get a gradient.
        gradient_transport: The ranks.
        settings: The arguments of `replicate`.
        alone: True if `replicate` got no other model, so that this one may be awaited before others are sent.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[Parameter],
        gradient_transport: GradientTransport,
        settings: ReducerSettings,
        *,
        alone: bool,
    ) -> None:
        self.model, self.gradient_transport, self.settings = model, gradient_transport, settings
        self.parameters = list(parameters)
        self._tensors = [p.tensor for p in self.parameters]
        self._alone = alone
        self.paused = False
        """True while gradients remain on this rank (`no_sync`)."""
        self._kept = False
        """True if a gradient has remained on this rank since the last round."""
        self.joining = False
        """True while some ranks may have no batch (`join`)."""
        n = len(self.parameters)
        self._weights = None if settings.loader is None else BatchWeights(parameters, settings.loader)
        self._gradients = GradientState(
            parameters,
            scale=1.0 / gradient_transport.size if settings.average and settings.comm_hook is None else 1.0,
            average=settings.average,
            is_first=gradient_transport.rank == 0,
            weights=self._weights,
        )
        self._wire = self.parameters[0].tensor.device if n else torch.device("cpu")
        # Reading a number from an accelerator waits for it. There, all buckets travel in every backward, and the
        # trailer is read only if needed.
        self._quiet = any(p.tensor.device.type != "cpu" for p in self.parameters)
        self._hook = (
            None if settings.comm_hook is None else hook_and_state(settings.comm_hook, gradient_transport.group)
        )
        self.buffers = Buffers(model, settings.buffers)
        if self._quiet:
            self.buffers.add_often(range(len(self.buffers)))
        self._sparse = [i for i, p in enumerate(self.parameters) if p.sparse]
        self._plan = BucketPlan(
            self.parameters,
            self.buffers,
            limit_nbytes=settings.bucket_nbytes,
            first_nbytes=settings.first_nbytes,
            ranks=gradient_transport.size,
            every=self._quiet or self._hook is not None,
            static=settings.static_graph,
            trailer_rides=self._hook is None,
        )
        self._fires_usual = [1] * n
        self.rounds = 0
        """The number of backward passes that have been reduced."""
        self._serial = 0
        self._broken: str | None = None
        self._active = False
        self._reset()
        self._hooks = self._watch()

    def close(self) -> None:
        """Remove the hooks from the parameters, and close the transport. Every rank must call it."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for p in self.parameters:
            release(p.tensor)
        self.gradient_transport.close()

    def reduce_now(self) -> None:
        """Reduce the gradients as they are in p.grad, outside a backward. Every rank must call it."""
        self._gradients.use_all()
        self._begin(None)
        self._launch_rest()
        self._finish()

    def shadow(self) -> tuple[int, ...]:
        """Participate in a round of other ranks without a batch; return the ranks of the group that had one."""
        self._gradients.shadow = True
        try:
            self._begin(None)
            self._launch_rest()
            return self._finish()
        finally:
            self._gradients.shadow = False

    # Called by hooks.

    def _on_gradient(self, i: int, _: Tensor) -> None:
        """Handle a new gradient in p.grad of a parameter."""
        self._gradients.used[i] = True
        if self._weights is not None:
            self._weights.added(i, kept=self.paused)
        if self.paused:
            self._kept = True
            return
        if not self._active:
            self._begin(self._at_end)
        self._fires[i] += 1
        bucket = self._plan.bucket_of[i]
        if bucket is None:  # sparse
            return
        if bucket.sent:
            self._late.add(i)
            return
        if self._fires[i] != self._fires_usual[i] or not self._plan.expected[i]:
            return
        if self.rounds == 0:
            self._order.append(i)
        bucket.waiting -= 1
        if not self.settings.overlap:
            return
        slot = self._plan.slot[i]
        if bucket.tensors[slot].numel() >= LARGE:
            bucket.open()
            self._gradients.write(bucket, slot)
        if not bucket.waiting:
            self._launch_full()

    def _before_gradient(self, i: int, _: Tensor) -> None:
        """Handle a gradient that is about to be added to p.grad: with sums, an earlier sum there must count once."""
        self._gradients.drop_counted(i)

    def _at_end(self) -> None:
        try:
            self._launch_rest()
        except BaseException:
            self._abandoned()
            raise
        # This runs after `_at_end` of the other models that this backward reached: all are sent before one is awaited.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _finish_backward(self) -> None:
        self._finish()

    def _abandoned(self) -> None:
        """Handle a backward that failed."""
        if self._launched:
            self._broken = (
                f"an earlier backward pass failed on this rank after {self._launched} of "
                f"{len(self._plan.travelling)} buckets of its gradients had been sent, so ranks no longer agree on "
                "what comes next"
            )
        for bucket in self._plan.buckets:
            bucket.close()
        self._active = False

    # One round.

    def _reset(self) -> None:
        self._gradients.begin()
        self._fires = [0] * len(self.parameters)
        self._late: set[int] = set()
        self._order: list[int] = []
        self._launched = 0
        self._own_trailer = torch.empty(0)
        self._works: list[tuple[Any, str]] = []

    def _begin(self, at_end: Callable[[], None] | None) -> None:
        if self._broken is not None:
            raise UnisonoError(f"{self._broken}. End the job and start it again from a checkpoint")
        self._reset()
        if self._kept:
            self._gradients.drop_cleared()
            self._kept = False
        self._serial += 1
        for bucket in self._plan.travelling:
            bucket.waiting = bucket.usual
        self._active = True
        if at_end is not None:
            BackwardEnd(at_end, self._abandoned)

    def _launch_full(self) -> None:
        """Send full buckets, in their order; the last one is sent at the end of the backward."""
        while self._launched < len(self._plan.travelling) - 1 and not self._plan.travelling[self._launched].waiting:
            self._launch(self._plan.travelling[self._launched])

    def _launch_rest(self) -> None:
        while self._launched < len(self._plan.travelling):
            self._launch(self._plan.travelling[self._launched])
        if self._plan.trailer_bucket is None:
            self._own_trailer = torch.empty(self._plan.trailer.numel, dtype=torch.float32, device=self._wire)
            self._write_trailer(self._own_trailer)
            what = "the summary that ranks exchange after a backward"
            self._works.append((self.gradient_transport.all_reduce(self._own_trailer, what, stays=self._alone), what))

    def _launch(self, bucket: Bucket) -> None:
        self._gradients.fill(bucket)
        assert bucket.memory is not None
        self._launched += 1
        is_last = self._launched == len(self._plan.travelling)
        if bucket is self._plan.trailer_bucket:
            self._write_trailer(bucket.memory[bucket.numel :])
        what = f"bucket {self._launched} of {len(self._plan.travelling)} with the gradients of {bucket.describe()}"
        if self._hook is not None:
            hook, state = self._hook
            work = begin(hook, state, GradBucket(bucket, index=self._launched - 1, is_last=is_last))
        else:
            work = self.gradient_transport.all_reduce(bucket.memory, what, stays=is_last and self._alone)
        bucket.sent = True
        self._works.append((work, what))

    def _write_trailer(self, memory: Tensor) -> None:
        active, used = not self._gradients.shadow, self._gradients.used
        values = self._plan.trailer.write(
            memory,
            rank=self.gradient_transport.rank,
            serial=self._serial if active else -self._serial,
            used=used if active else [False] * len(used),
            late=self._late,
            changed=self.buffers.changed() if active else [False] * len(self.buffers),
            frozen=bytes([not tensor.requires_grad for tensor in self._tensors]),
        )
        if values.numel():
            scale = 1.0 / self.gradient_transport.size if active else 0.0
            self.buffers.write(values, is_source=active and self.gradient_transport.rank == 0, scale=scale)

    def _finish(self) -> tuple[int, ...]:
        """Wait for the sums, set p.grad to them, and return the ranks of the group that had a batch."""
        try:
            return self._finish_round()
        except BaseException as error:
            self._broken = f"an earlier backward pass failed on this rank: {error}"
            raise
        finally:
            for bucket in self._plan.buckets:
                bucket.close()
            self._active = False
            self._gradients.end()

    def _finish_round(self) -> tuple[int, ...]:
        for work, what in self._works:
            self.gradient_transport.wait(work, what)
        summary = self._read_trailer()
        factor = self.gradient_transport.size / len(summary.active) if self.settings.average and summary.active else 1.0
        self._read_buckets(factor)
        if summary is not self._plan.settled:
            after = factor if self._hook is None or not self.settings.average else factor / self.gradient_transport.size
            reduce_late(summary, self._gradients, self._plan, self.gradient_transport, factor=after)
        used, gradients = summary.used, self._gradients
        for bucket in self._plan.travelling:
            for i, view in zip(bucket.members, bucket.views, strict=True):
                if i in used:
                    gradients.give(i, view)
                else:
                    gradients.give_back(i)
        for i in sorted(used.intersection(self._sparse)):
            scale = 1.0 / self.gradient_transport.size if self.settings.average else 1.0
            scale *= 1.0 if self._weights is None else self._weights.of(i)
            reduce_sparse(i, gradients, self.gradient_transport, scale=scale * factor)
        if summary.active and any(summary.changed):
            total, has_batch = self._plan.trailer.values(self._trailer_vector()), not gradients.shadow
            if self.buffers.share(summary, total, self.gradient_transport, has_batch=has_batch):
                self._plan.place_trailer()
        if self._fires != self._fires_usual:
            self._fires_usual = [now or before for now, before in zip(self._fires, self._fires_usual, strict=True)]
        self.rounds += 1
        if summary.active:
            self._plan.learn(summary, first=self.rounds == 1, order=self._order_of_first)
        if self.rounds.bit_count() == 1 or self.rounds % 64 == 0:
            refuse_added(self.model, self.parameters)
        return summary.active

    def _read_buckets(self, factor: float) -> None:
        """Replace the buckets' contents by the results of communication hooks, if any, and multiply by a factor."""
        for bucket, (work, _) in zip(self._plan.travelling, self._works, strict=False):
            if self._hook is not None:
                bucket.views = bucket.views_of(result_of(work, bucket))
            if factor != 1.0:
                torch._foreach_mul_(list(bucket.views), factor)

    def _read_trailer(self) -> RoundSummary:
        """Return the combined flags of all ranks. On accelerators, the trailer is read only if needed.

        Raises:
            UnisonoError: On an accelerator, a parameter got a second gradient after the first was sent.
            RankMismatchError: Ranks are in different passes, froze different parameters, or broke static_graph.
        """
        n = len(self.parameters)
        if self._quiet and not self.joining and not self._gradients.shadow:
            if self._late:
                raise UnisonoError(
                    f"{name_parameters(self.parameters, self._late)} got a gradient twice in one backward, the second "
                    "time after the first had been sent. Re-entrant activation checkpointing does that: call "
                    "checkpoint with use_reentrant=False, or give replicate() overlap=False"
                )
            if all(self._gradients.used) or (self.settings.static_graph and self.rounds):
                used = range(n) if not self.settings.static_graph else (i for i in range(n) if self._plan.expected[i])
                everyone = tuple(range(self.gradient_transport.size))
                return RoundSummary(everyone, frozenset(used), frozenset(), (True,) * len(self.buffers))
        summary = self._plan.trailer.read(self._trailer_vector(), serial=self._serial)
        if not summary.alike:
            refuse_frozen(self.parameters, self.gradient_transport, summary.active)
        if self.settings.static_graph and self.rounds and summary.active:
            surprises = {i for i in range(n) if self._plan.expected[i]} ^ summary.used
            if surprises:
                raise RankMismatchError(
                    f"static_graph=True, but after {self.rounds} backward passes the parameters that get gradients "
                    f"differ from those in the first: {name_parameters(self.parameters, surprises)}. Leave "
                    "static_graph out"
                )
        return summary

    def _trailer_vector(self) -> Tensor:
        if self._plan.trailer_bucket is None:
            return self._own_trailer
        assert self._plan.trailer_bucket.memory is not None
        return self._plan.trailer_bucket.memory[self._plan.trailer_bucket.numel :]

    # Which buckets there are, and which travel.

    def _watch(self) -> list[RemovableHandle]:
        hooks = []
        for i, p in enumerate(self.parameters):
            tensor, needs = p.tensor, p.tensor.requires_grad
            tensor.requires_grad_(True)  # required to set a hook; a frozen parameter may be unfrozen later
            hooks.append(on_gradient(tensor, self._on_gradient, i))
            keep_alive(tensor, self)
            if not self.settings.average:
                hooks.append(tensor.register_hook(partial(self._before_gradient, i)))  # type: ignore[no-untyped-call]
            if self._weights is not None:
                hooks.append(tensor.register_hook(partial(self._weights.before, i)))  # type: ignore[no-untyped-call]
            tensor.requires_grad_(needs)
        return hooks

    def _order_of_first(self) -> list[int]:
        """Return the order in which the first rank's gradients came. Every rank must call it."""
        order = torch.full((len(self.parameters),), -1, dtype=torch.int64)
        order[: len(self._order)] = torch.tensor(self._order, dtype=torch.int64)
        order = order.to(self._wire)
        self.gradient_transport.broadcast(order, 0)
        return [i for i in order.tolist() if i >= 0]
