"""Facts about a process group that its collectives need: the members, and the devices whose tensors its backend moves.

`group_of` turns the argument `group` of a collective into a `Group`. It runs at each call, so it remembers the facts of
each group. `job.current` decides whether there is a group to use at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.activity import TimedWait, waited
from unisono.collectives.call_description import ComparisonPlace
from unisono.collectives.check_mode import CallChecker, wanted
from unisono.collectives.late_call_check import CallTemplate, LateCallChecker
from unisono.errors import GroupError
from unisono.job.current import require_group
from unisono.text import a_type, name_ranks

__all__ = ["SINGLE_PROCESS", "Group", "group_of", "known_group"]

_CPU = torch.device("cpu")
_CPU_BACKENDS = {"gloo", "shm", "mpi", "ucc"}
"""Backends whose tensors on accelerators travel by way of the CPU here: they do this themselves, or not at all."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Group:
    """A process group as its collectives see it."""

    reference: ref[dist.ProcessGroup] | None = None
    """To the process group, which keeps its `Group` and not the reverse. None: this process alone, without a group."""
    rank: int = 0
    """Number of this rank within the group."""
    ranks: tuple[int, ...] = (0,)
    """Global ranks of the members, in the order of the group."""
    backends: dict[str, str] = field(default_factory=lambda: {"cpu": "gloo"})
    """Types of devices whose tensors travel as they are, with the backend that moves them."""
    check: CallChecker | None = None
    """Compares calls between ranks; None outside check mode."""
    late_check: LateCallChecker | None = None
    """Compares calls that do not end, over gloo: it does not detect them, and can be waited for in slices."""

    def run(
        self, call: CallTemplate, value: Tensor | str, operation: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        """Run an operation of torch.distributed on this group to its end.

        Args:
            call: The name of the call, for errors; see `collectives.late_call_check`.
            value: A tensor, whose type and size must be equal on all ranks, or a description of the value.
            operation: A function of torch.distributed.
            args: Its arguments.
            kwargs: Its keyword arguments, without the group.
        """
        if waited.is_on:
            with TimedWait(waited):
                self._run(call, value, operation, args, kwargs)
        else:  # without a context manager that does nothing, which costs a microsecond
            self._run(call, value, operation, args, kwargs)

    def _run(
        self,
        call: CallTemplate,
        value: Tensor | str,
        operation: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        late_check = self.late_check
        kwargs["group"] = self.process_group
        if late_check is None or not (isinstance(value, str) or value.is_cpu or value.device.type not in self.backends):
            operation(*args, **kwargs)
        else:
            late_check.run(call, value, operation, args, kwargs)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The process group; None for this process alone."""
        return None if self.reference is None else self.reference()

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    @property
    def own(self) -> int:
        """Global rank of this process."""
        return self.ranks[self.rank]

    @property
    def accelerator(self) -> str | None:
        """The type of device other than the CPU whose tensors travel as they are; None if there is none."""
        return next((name for name in self.backends if name != "cpu"), None)

    def bytes_device(self, *, accelerated: bool = False) -> torch.device:
        """Return the device on which bytes travel: with `accelerated`, the accelerator if there is one."""
        other = self.accelerator
        if other is None or ("cpu" in self.backends and not accelerated):
            return _CPU
        return own_device(other)

    def device_for(self, tensor: Tensor) -> torch.device:
        """Return the device on which a tensor travels: its own if the backend takes that.

        Raises:
            TypeError: The tensor is on the meta device.
        """
        if tensor.is_cpu and "cpu" in self.backends:
            return _CPU
        if tensor.is_meta:
            raise TypeError("a tensor on the meta device has a shape and no numbers to send: make it on a real device")
        return tensor.device if tensor.device.type in self.backends else self.bytes_device()

    def index_of(self, rank: int, argument: str) -> int:
        """Return the number within the group of a global rank.

        Args:
            rank: The global rank.
            argument: The name of the argument, for messages.

        Raises:
            TypeError: The rank is not an int.
            ValueError: The rank is not in the group.
        """
        if type(rank) is not int:
            raise TypeError(f"{argument}={rank!r} must be the number of a rank, not {a_type(rank)}")
        if 0 <= rank < self.size and self.ranks[rank] == rank:
            return rank
        if rank in self.ranks:
            return self.ranks.index(rank)
        raise ValueError(f"{argument}={rank} is not in the group: it has {self.described}. Ranks are those of the job")

    @property
    def described(self) -> str:
        """The members, for messages."""
        return name_ranks(self.ranks)


SINGLE_PROCESS = Group()
"""A process without a group."""

_groups: WeakKeyDictionary[dist.ProcessGroup, Group] = WeakKeyDictionary()
_of_parent: WeakKeyDictionary[dist.ProcessGroup, Group] = WeakKeyDictionary()
"""The groups of the process from which this one was forked. This process is no member of them."""
_watching_forks = False


def group_of(group: dist.ProcessGroup | int | None) -> Group:
    """Return the facts about the argument `group` of a collective; None is the whole job.

    Raises:
        GroupError: This process cannot use the group; see `job.current.require_group`.
        TypeError: The argument is no group.
    """
    found = require_group(group)
    if found is None:
        return SINGLE_PROCESS
    return _groups.get(found) or known_group(found)


def known_group(group: dist.ProcessGroup) -> Group:
    """Return the facts about an existing group. For unisono's internal collectives, also inside a loss function."""
    known = _groups.get(group)
    if known is None:
        known = _groups[group] = _describe(group)
    return known


def own_device(kind: str) -> torch.device:
    """Return the current device of a type in this process."""
    if kind == "cpu":
        return _CPU
    module = torch.get_device_module(kind)
    return torch.device(kind, module.current_device())


def _describe(group: dist.ProcessGroup) -> Group:
    global _watching_forks  # noqa: PLW0603  the system never forgets a registration
    if group in _of_parent:
        raise GroupError(
            f"this process was forked from rank {_of_parent[group].own} and is no rank itself: call collectives in the "
            "rank alone, not in workers of a DataLoader"
        )
    if not _watching_forks:
        _watching_forks = True
        os.register_at_fork(after_in_child=_forget)
    # "cpu:gloo,cuda:nccl"
    pairs = [pair.split(":") for pair in str(dist.get_backend_config(group)).split(",")]
    backends = {device: name for device, name in pairs if device == "cpu" or name not in _CPU_BACKENDS}
    ranks = tuple(dist.get_process_group_ranks(group))
    own, check, late_check = group.rank(), None, None
    where = "" if group is dist.group.WORLD else f" in the group of {name_ranks(ranks)}"
    name = group.group_name
    if wanted() and len(ranks) > 1:
        check = CallChecker(ComparisonPlace(_store("unisono_check"), name, ranks[own], ranks, where))
    if backends.get("cpu") == "gloo":
        late_check = LateCallChecker(ComparisonPlace(_store("unisono_late"), name, ranks[own], ranks, where))
    return Group(reference=ref(group), rank=own, ranks=ranks, backends=backends, check=check, late_check=late_check)


def _store(name: str) -> dist.Store:  # type: ignore[name-defined]
    return dist.PrefixStore(name, dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]


def _forget() -> None:
    """Move the parent's groups to `_of_parent`, in a forked process."""
    _of_parent.update(_groups)
    _groups.clear()
