"""The gradients of one model over ranks: from hooks on its parameters to p.grad at the end of backward.

One backward is one round. As gradients come, they go into buckets, and full buckets travel, in one order on all ranks.
The last bucket leaves at the end of the backward. At its end stands what each rank saw (`parallel.tail`), so all ranks
know which parameters got a gradient anywhere. Buckets of parameters that lately had none do not travel; if one of these
gets a gradient, or a parameter gets one after its bucket has left, all learn it there, and those travel once more.
The idea of buckets on hooks is that of DDP (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2), and as there the
order of the first backward is the order of buckets afterwards.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unisono.errors import RankMismatchError, UnisonoError
from unisono.parallel.backward_end import BackwardEnd
from unisono.parallel.buckets import Bucket, Parameter
from unisono.parallel.buffers import BufferMode, Buffers
from unisono.parallel.comm_hooks import CommHook, GradBucket, begin, hook_and_state, result_of
from unisono.parallel.lane import Lane
from unisono.parallel.packing import Packing
from unisono.parallel.sparse import sum_sparse
from unisono.parallel.tail import Told

__all__ = ["Reducer", "Settings"]

_LARGE = 64 * 1024
"""Elements from which a gradient is written into its bucket at once, by one pass of its own. Smaller ones are written
together when the bucket is full, which costs fewer calls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How gradients travel."""

    bucket_nbytes: int
    first_nbytes: int
    average: bool
    overlap: bool
    static_graph: bool
    comm_hook: CommHook | tuple[Any, CommHook] | None
    buffers: BufferMode | None


class Reducer:
    """Watches one model's parameters and reduces what backward passes give them.

    Args: alone is whether a backward reaches no other model, so that this one may be awaited before others are sent.
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[Parameter], lane: Lane, settings: Settings, *, alone: bool
    ) -> None:
        self.model, self.lane, self.settings = model, lane, settings
        self.parameters = list(parameters)
        self._alone = alone
        self.paused = False
        """Whether gradients stay on this rank for now."""
        self.joining = False
        """Whether some ranks may have no batch."""
        n = len(self.parameters)
        self._scale = 1.0 / lane.size if settings.average and settings.comm_hook is None else 1.0
        # A tensor, since torch makes one of every number; of float64, which is exact for all types.
        self._factor = torch.tensor(self._scale, dtype=torch.float64)
        self._wire = self.parameters[0].tensor.device if n else torch.device("cpu")
        # Reading a number from a device waits for it. There, all buckets travel always, and it is done only if needed.
        self._quiet = any(p.tensor.device.type != "cpu" for p in self.parameters)
        self._hook = None if settings.comm_hook is None else hook_and_state(settings.comm_hook, lane.group)
        self.buffers = Buffers(model, settings.buffers)
        if self._quiet:
            self.buffers.add_often(range(len(self.buffers)))
        self._sparse = [i for i, p in enumerate(self.parameters) if p.sparse]
        self._packing = Packing(
            self.parameters,
            self.buffers,
            limit_nbytes=settings.bucket_nbytes,
            first_nbytes=settings.first_nbytes,
            ranks=lane.size,
            every=self._quiet or self._hook is not None,
            static=settings.static_graph,
            tail_rides=self._hook is None,
        )
        self._fires_usual = [1] * n
        self._used = [False] * n
        self._given: list[weakref.ref[Tensor] | None] = [None] * n
        self.rounds = 0
        """Backward passes that have been reduced."""
        self._serial = 0
        self._broken: str | None = None
        self._active = self._shadow = False
        self._reset()
        self._hooks = self._watch()

    def close(self) -> None:
        """Leave the parameters alone, and end the group. Every rank must call it."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.lane.close()

    def reduce_now(self) -> None:
        """Reduce the gradients as they are in p.grad, outside a backward."""
        for i, p in enumerate(self.parameters):
            if p.tensor.grad is not None and not self._is_given(i):
                self._used[i] = True
        self._begin(None)
        self._launch_rest()
        self._finish()

    def shadow(self) -> tuple[int, ...]:
        """Take part in a round of others without a gradient. Returns: the ranks of the group that had one."""
        self._shadow = True
        try:
            self._begin(None)
            self._launch_rest()
            return self._finish()
        finally:
            self._shadow = False

    # What hooks call.

    def _on_gradient(self, i: int, _: Tensor) -> None:
        """Be told that p.grad of a parameter has got its gradient."""
        self._used[i] = True
        if self.paused:
            return
        if not self._active:
            self._begin(self._at_end)
        self._fires[i] += 1
        bucket = self._packing.home[i]
        if bucket is None:  # sparse
            return
        if bucket.sent:
            self._late.add(i)
            return
        if self._fires[i] != self._fires_usual[i] or not self._packing.expected[i]:
            return
        if self.rounds == 0:
            self._order.append(i)
        bucket.waiting -= 1
        if not self.settings.overlap:
            return
        tensor = bucket.tensors[self._packing.slot[i]]
        if tensor.numel() >= _LARGE:
            bucket.open()
            self._write(bucket, self._packing.slot[i], i)
        if not bucket.waiting:
            self._launch_full()

    def _before_gradient(self, i: int, _: Tensor) -> None:
        """Be told that p.grad is about to get a gradient: with sums, what is summed already must count once."""
        if self.lane.rank and self._is_given(i):
            self.parameters[i].tensor.grad = None

    def _at_end(self) -> None:
        try:
            self._launch_rest()
        except BaseException:
            self._abandoned()
            raise
        # After the same call of other models that this backward reached: all are on their way before one is awaited.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish_backward)

    def _finish_backward(self) -> None:
        self._finish()

    def _abandoned(self) -> None:
        """Be told that a backward failed."""
        if self._launched:
            self._broken = (
                f"an earlier backward pass failed on this rank after {self._launched} of "
                f"{len(self._packing.travelling)} buckets of its gradients had been sent, so ranks no longer agree on "
                "what comes next"
            )
        for bucket in self._packing.buckets:
            bucket.close()
        self._active = False

    # One round.

    def _reset(self) -> None:
        n = len(self.parameters)
        self._fires = [0] * n
        self._written = [False] * n
        self._late: set[int] = set()
        self._stash: dict[int, Tensor] = {}
        self._order: list[int] = []
        self._launched = 0
        self._tail_memory = torch.empty(0)
        self._works: list[tuple[Any, str]] = []

    def _begin(self, at_end: Callable[[], None] | None) -> None:
        if self._broken is not None:
            raise UnisonoError(f"{self._broken}. End the job and start it again from a checkpoint")
        self._reset()
        self._serial += 1
        for bucket in self._packing.travelling:
            bucket.waiting = bucket.usual
        self._active = True
        if at_end is not None:
            BackwardEnd(at_end, self._abandoned)

    def _launch_full(self) -> None:
        """Send full buckets, in their order; the last one waits for the end."""
        while (
            self._launched < len(self._packing.travelling) - 1 and not self._packing.travelling[self._launched].waiting
        ):
            self._launch(self._packing.travelling[self._launched])

    def _launch_rest(self) -> None:
        while self._launched < len(self._packing.travelling):
            self._launch(self._packing.travelling[self._launched])
        if self._packing.tail_home is None:
            self._tail_memory = torch.empty(self._packing.tail.numel, device=self._wire)
            self._write_tail(self._tail_memory)
            what = "what ranks tell each other after a backward"
            self._works.append((self.lane.sum(self._tail_memory, what, stays=self._alone), what))

    def _launch(self, bucket: Bucket) -> None:
        self._fill(bucket)
        assert bucket.memory is not None
        self._launched += 1
        is_last = self._launched == len(self._packing.travelling)
        if bucket is self._packing.tail_home:
            self._write_tail(bucket.memory[bucket.numel :])
        what = (
            f"bucket {self._launched} of {len(self._packing.travelling)} with the gradients of {self._describe(bucket)}"
        )
        if self._hook is not None:
            hook, state = self._hook
            work = begin(hook, state, GradBucket(bucket, index=self._launched - 1, is_last=is_last))
        else:
            work = self.lane.sum(bucket.memory, what, stays=is_last and self._alone)
        bucket.sent = True
        self._works.append((work, what))

    def _fill(self, bucket: Bucket) -> None:
        """Write what is not yet there of this rank's gradients into a bucket."""
        bucket.open()
        if self._shadow:
            bucket.gradients.zero_()
            return
        small: list[int] = []
        for slot, i in enumerate(bucket.members):
            if bucket.tensors[slot].grad is None or self._counts_elsewhere(i):
                if not self._written[i]:
                    bucket.views[slot].zero_()
            elif self._written[i] or bucket.tensors[slot].numel() >= _LARGE:
                self._write(bucket, slot, i)
            else:
                small.append(slot)
        if not small:
            return
        views = [bucket.views[slot] for slot in small]
        torch._foreach_copy_(views, [self._take(bucket.tensors[slot], bucket.members[slot]) for slot in small])
        if self._scale != 1.0:
            if len(small) == len(bucket.members):
                bucket.gradients.mul_(self._scale)
            else:
                torch._foreach_mul_(views, self._scale)

    def _write(self, bucket: Bucket, slot: int, i: int) -> None:
        gradient, view = self._take(bucket.tensors[slot], i), bucket.views[slot]
        if self._written[i]:
            view.add_(gradient, alpha=self._scale)
        elif self._scale == 1.0:
            view.copy_(gradient)
        else:
            torch.mul(gradient, self._factor, out=view)
        self._written[i] = True

    def _take(self, tensor: Tensor, i: int) -> Tensor:
        """Take a gradient off its parameter; what autograd adds afterwards is then by itself."""
        gradient = tensor.grad
        assert gradient is not None
        if not self._used[i]:
            self._stash[i] = gradient
        tensor.grad = None
        if gradient.requires_grad:
            _warn_of_graph(self.parameters[i].name)
            gradient = gradient.detach()
        if gradient.layout != torch.strided:
            _warn_of_sparse(self.parameters[i].name)
            gradient = gradient.to_dense()
        bucket = self._packing.home[i]
        if bucket is not None and gradient.dtype != bucket.dtype:
            raise UnisonoError(
                f"parameter {self.parameters[i].name!r} has a gradient of {gradient.dtype}, and was of {bucket.dtype} "
                "when replicate() saw it: call replicas.update() on every rank after changing the types of a model"
            )
        return gradient

    def _write_tail(self, memory: Tensor) -> None:
        active = not self._shadow
        values = self._packing.tail.write(
            memory,
            rank=self.lane.rank,
            serial=self._serial if active else -self._serial,
            used=self._used if active else [False] * len(self._used),
            late=self._late,
            changed=self.buffers.changed() if active else [False] * len(self.buffers),
        )
        if values.numel():
            scale = 1.0 / self.lane.size if active else 0.0
            self.buffers.write(values, is_source=active and self.lane.rank == 0, scale=scale)

    def _finish(self) -> tuple[int, ...]:
        """Wait for the sums and show them as p.grad."""
        try:
            return self._finish_round()
        except BaseException as error:
            self._broken = f"an earlier backward pass failed on this rank: {error}"
            raise
        finally:
            for bucket in self._packing.buckets:
                bucket.close()
            self._active = False
            self._used = [False] * len(self.parameters)

    def _finish_round(self) -> tuple[int, ...]:
        for work, what in self._works:
            self.lane.wait(work, what)
        told = self._listen()
        factor = self.lane.size / len(told.active) if self.settings.average and told.active else 1.0
        self._read_buckets(factor)
        if told is not self._packing.settled:
            again = [i for i in sorted(told.used | told.late) if self._goes_again(i, told)]
            if again:
                self._reduce_again(again, factor)
        used = told.used
        for bucket in self._packing.travelling:
            for i, tensor, view in zip(bucket.members, bucket.tensors, bucket.views, strict=True):
                if i in used:
                    self._give(i, tensor, view)
                elif i in self._stash:
                    tensor.grad = self._stash[i]
        for i in sorted(used.intersection(self._sparse)):
            self._reduce_sparse(i, factor)
        self._share_buffers(told)
        if self._fires != self._fires_usual:
            self._fires_usual = [now or before for now, before in zip(self._fires, self._fires_usual, strict=True)]
        self.rounds += 1
        if told.active:
            self._packing.learn(told, first=self.rounds == 1, order=self._order_of_first)
        if self.rounds.bit_count() == 1 or self.rounds % 64 == 0:
            self._look_for_others()
        return told.active

    def _read_buckets(self, factor: float) -> None:
        """Take what hooks gave in place of what was sent, and multiply all by a factor."""
        for bucket, (work, _) in zip(self._packing.travelling, self._works, strict=False):
            if self._hook is not None:
                bucket.views = bucket.views_of(result_of(work, bucket))
            if factor != 1.0:
                torch._foreach_mul_(list(bucket.views), factor)

    def _listen(self) -> Told:
        """Learn what all ranks saw."""
        n = len(self.parameters)
        if self._quiet and not self.joining and not self._shadow:
            if self._late:
                raise UnisonoError(
                    f"{self._names(self._late)} got a gradient twice in one backward, the second time after the first "
                    "had been sent. Re-entrant activation checkpointing does that: call checkpoint with "
                    "use_reentrant=False, or give replicate() overlap=False"
                )
            if all(self._used) or (self.settings.static_graph and self.rounds):
                used = (
                    range(n) if not self.settings.static_graph else (i for i in range(n) if self._packing.expected[i])
                )
                everyone = tuple(range(self.lane.size))
                return Told(everyone, frozenset(used), frozenset(), (True,) * len(self.buffers))
        told = self._packing.tail.read(self._told_memory(), serial=self._serial)
        if self.settings.static_graph and self.rounds and told.active:
            surprises = {i for i in range(n) if self._packing.expected[i]} ^ told.used
            if surprises:
                raise RankMismatchError(
                    f"static_graph=True, but after {self.rounds} backward passes other parameters get gradients than "
                    f"in the first: {self._names(surprises)}. Leave static_graph out"
                )
        return told

    def _told_memory(self) -> Tensor:
        if self._packing.tail_home is None:
            return self._tail_memory
        assert self._packing.tail_home.memory is not None
        return self._packing.tail_home.memory[self._packing.tail_home.numel :]

    def _goes_again(self, i: int, told: Told) -> bool:
        if self.parameters[i].sparse:
            return False
        return i in told.late or not self._travels(i)

    def _reduce_again(self, indices: Sequence[int], factor: float) -> None:
        """Reduce the gradients of these parameters that are in no bucket, or came after it had left."""
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for i in indices:
            tensor = self.parameters[i].tensor
            kinds.setdefault((tensor.dtype, tensor.device), []).append(i)
        for members in kinds.values():
            bucket = Bucket(members, self.parameters)
            bucket.open()
            assert bucket.memory is not None
            for view, parameter, i in zip(bucket.views, bucket.tensors, members, strict=True):
                if parameter.grad is None or self._shadow or self._counts_elsewhere(i):
                    view.zero_()
                else:
                    view.copy_(self._take(parameter, i)).mul_(self._scale)
            what = f"late gradients of {self._describe(bucket)}"
            self.lane.wait(self.lane.sum(bucket.memory, what), what)
            scale = factor if self._hook is None or not self.settings.average else factor / self.lane.size
            for view, parameter, i in zip(bucket.views, bucket.tensors, members, strict=True):
                view.mul_(scale)
                home = self._packing.home[i]
                if home is not None and self._travels(i):
                    home.views[self._packing.slot[i]].add_(view)
                else:
                    self._give(i, parameter, view)

    def _reduce_sparse(self, i: int, factor: float) -> None:
        tensor = self.parameters[i].tensor
        gradient = None if self._shadow or self._counts_elsewhere(i) else tensor.grad
        if gradient is not None and gradient.layout == torch.strided:
            raise UnisonoError(
                f"parameter {self.parameters[i].name!r} has a dense gradient, and its module has sparse=True: use it "
                "by its module alone, or make the module with sparse=False"
            )
        scale = self._scale if self._hook is None or not self.settings.average else 1.0 / self.lane.size
        self._give(i, tensor, sum_sparse(gradient, tensor, self.lane, scale=scale * factor))

    def _give(self, i: int, tensor: Tensor, view: Tensor) -> None:
        if self._shadow:
            return
        tensor.grad = view
        if not self.settings.average:
            self._given[i] = weakref.ref(view)

    def _is_given(self, i: int) -> bool:
        """Whether p.grad is, or has grown from, what was reduced before. Known only where sums are not averaged."""
        reference = self._given[i]
        return reference is not None and reference() is self.parameters[i].tensor.grad

    def _counts_elsewhere(self, i: int) -> bool:
        """Whether p.grad is a sum that only the first rank contributes."""
        return self.lane.rank > 0 and self._is_given(i)

    def _share_buffers(self, told: Told) -> None:
        """Make the buffers that any rank changed the same everywhere."""
        if not any(told.changed) or not told.active:
            return
        source = told.active[0]
        known = {i for i in self.buffers.often if told.changed[i]}
        if source != 0:
            # The vector had nothing from the rank whose values count.
            known = {i for i in known if self.buffers.travels_as_mean(i)}
        values = self._packing.tail.values(self._told_memory())
        self.buffers.read(values, factor=self.lane.size / len(told.active), indices=known)
        rest = [i for i, changed in enumerate(told.changed) if changed and i not in known]
        for i in rest:
            self.buffers.exchange(
                i,
                broadcast=partial(self.lane.broadcast, source=source),
                total=lambda t: self.lane.wait(self.lane.sum(t, "buffers"), "buffers"),
                has_batch=not self._shadow,
                active=len(told.active),
            )
        if self.buffers.add_often(rest):
            self._packing.place_tail()

    # Which buckets there are, and which travel.

    def _watch(self) -> list[RemovableHandle]:
        hooks = []
        for i, p in enumerate(self.parameters):
            tensor, needs = p.tensor, p.tensor.requires_grad
            tensor.requires_grad_(True)  # else no hook can be set; a frozen parameter may be unfrozen later
            hooks.append(tensor.register_post_accumulate_grad_hook(partial(self._on_gradient, i)))  # type: ignore[no-untyped-call]
            if not self.settings.average:
                hooks.append(tensor.register_hook(partial(self._before_gradient, i)))  # type: ignore[no-untyped-call]
            tensor.requires_grad_(needs)
        return hooks

    def _travels(self, i: int) -> bool:
        bucket = self._packing.home[i]
        return bucket is not None and bucket.sent

    def _order_of_first(self) -> list[int]:
        """Give the order in which the first rank's gradients came. Every rank must call it."""
        order = torch.full((len(self.parameters),), -1, dtype=torch.int64)
        order[: len(self._order)] = torch.tensor(self._order, dtype=torch.int64)
        order = order.to(self._wire)
        self.lane.broadcast(order, 0)
        return [i for i in order.tolist() if i >= 0]

    def _look_for_others(self) -> None:
        """Find parameters that came into the model later, whose gradients would stay on this rank."""
        known = {id(p.tensor) for p in self.parameters}
        for name, tensor in self.model.named_parameters():
            if id(tensor) not in known and tensor.requires_grad and tensor.is_floating_point():
                raise UnisonoError(
                    f"parameter {name!r} was put into the model after replicate(), so its gradient is not reduced: "
                    "call replicas.update() on every rank after changing a model"
                )

    def _names(self, indices: Set[int]) -> str:
        names = [repr(self.parameters[i].name) for i in sorted(indices)]
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    def _describe(self, bucket: Bucket) -> str:
        first, last = (self.parameters[bucket.members[i]].name for i in (0, -1))
        return f"{first!r}" if len(bucket.members) == 1 else f"{first!r} to {last!r}"


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
