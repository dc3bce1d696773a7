"""The base of all metrics: counts and sums that each rank keeps locally, combined over ranks in one all-reduce.

The counts of a rank travel as 64-bit integers ("words"). Some are added over ranks. The others stay apart: each rank
fills its own row of a table and leaves the other rows zero, so the sum over ranks is the whole table. Floating-point
numbers, minima and maxima therefore travel in the same all-reduce as counts, bit for bit, on every backend. Before the
all-reduce, an all-gather compares which metrics the ranks compute.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.collectives import object_transport, tensor_collectives
from unisono.collectives.group import Group, group_of
from unisono.collectives.object_transport import FailedSend, Outgoing
from unisono.collectives.serialization import serialize
from unisono.errors import RankMismatchError
from unisono.mismatch import by_value

__all__ = ["Metric", "describe_type", "total_over_ranks"]

T = TypeVar("T")


class Metric(ABC, Generic[T]):
    """Base class of metrics, which count something over the samples of all ranks.

    `update` is local and cheap: it waits for no other rank, and on a GPU not for the device. `compute` returns the
    value over all ranks. Every rank of the group must call it, even a rank that has seen no sample. It changes nothing,
    so you can continue to count. `local` returns the value over this rank's samples.

    To write your own metric, keep sums in attributes that are replaced and never written in place, and define `update`,
    `reset`, `local`, `pack` and `unpack`: `compute` packs the counts of each rank and unpacks those of all into a copy,
    whose `local` is the value over all ranks. Its `repr` must name all settings.
    """

    def compute(self, group: dist.ProcessGroup | None = None) -> T:
        """Return the value over the samples of all ranks, on every rank.

        Every rank of the group must call it. It costs an all-gather that compares the metrics, and one all-reduce.

        Args:
            group: The ranks whose samples count; None means all ranks of the job.

        Raises:
            GroupError: The process group does not exist yet or has ended, or this rank is not in it.
            RankMismatchError: The ranks compute different metrics. Raised on all ranks.
            PeerError: Another rank cannot express what it has counted in words; that rank raises its own error.
        """
        total: Metric[T] = total_over_ranks([self], group_of(group))[0]
        return total.local()

    @abstractmethod
    def local(self) -> T:
        """Return the value over the samples of this rank alone, without communication."""

    def collect(self, group: dist.ProcessGroup | None = None) -> None:
        """Move the counts of all ranks to the first rank of the group, and reset the others. Every rank must call it.

        The value over all ranks does not change. The state of the first rank then covers all ranks. You can save it and
        load it into a job of any size: see `state_dict`. Arguments, cost and errors are those of `compute`.
        """
        members = group_of(group)
        (total,) = total_over_ranks([self], members)
        self._take(total, members)

    @abstractmethod
    def reset(self) -> None:
        """Discard everything counted so far on this rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank has counted, as tensors and text, without communication.

        To save the state of all ranks in one file, call `collect` on all of them first, then save the state of rank 0,
        and load it on rank 0 alone.
        """
        added, apart = self.pack()
        return {"metric": repr(self), "added": added.cpu().clone(), "apart": apart.cpu().clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace what this rank has counted by a state that `state_dict` returned.

        Raises:
            ValueError: The state belongs to another metric.
        """
        self._check_state(state)
        self.unpack(state["added"].clone(), state["apart"].clone().unsqueeze(0))

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if a state belongs to another metric."""
        if state.get("metric") != repr(self):
            raise ValueError(
                f"this is the state of {state.get('metric')}, and the metric is {self!r}: make an equal one"
            )

    @abstractmethod
    def pack(self) -> tuple[Tensor, Tensor]:
        """Return what this rank has counted.

        Returns:
            added: Words that are added over ranks. int64, shape [n], n the same on all ranks.
            apart: Words that are kept for each rank. int64, shape [m], m the same on all ranks.
        """

    @abstractmethod
    def unpack(self, added: Tensor, apart: Tensor) -> None:
        """Set the counts to those of all ranks.

        Args:
            added: The sums over ranks of the words to add, shape [n].
            apart: The words to keep of each rank, shape [ranks, m].
        """

    def _merge(self, group: Group) -> None:
        """Combine over ranks what does not fit words. Called on the total, on all ranks, after `unpack`."""

    def _take(self, total: Metric[T], group: Group) -> None:
        if group.rank == 0:
            self.__dict__.update(total.__dict__)
        else:
            self.reset()


def total_over_ranks(metrics: Sequence[Metric[Any]], group: Group, names: Sequence[str] = ("",)) -> list[Metric[Any]]:
    """Return, for each metric, a copy with the counts of all ranks. Every rank must call it.

    It costs one all-gather that compares the metrics, and one all-reduce for all of them together.

    Raises:
        RankMismatchError: The ranks compute different metrics. Raised on all ranks.
        PeerError: Another rank could not make the words of its metrics.
    """
    described = [f"{name} {metric!r}".strip() for name, metric in zip(names, metrics, strict=True)]
    if group.check is not None:
        group.check.compare(f"computing of the metrics {', '.join(described)}")
    words = _agree(metrics, described, group)
    added, apart = zip(*words, strict=True) if words else ((), ())
    device = group.bytes_device(accelerated=any(word.device.type != "cpu" for word in (*added, *apart)))
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    first = torch.cat([nothing, *(word.to(device, non_blocking=True) for word in added)])
    row = torch.cat([nothing, *(word.to(device, non_blocking=True) for word in apart)])
    rows = row.new_zeros(group.size, len(row))
    rows[group.rank] = row
    message = torch.cat([first, rows.flatten()])
    if len(message):  # empty with metrics of torchmetrics alone, which exchange their states in _merge
        message = tensor_collectives.all_reduce(group, message, "sum").cpu()
    summed, table = message[: len(first)], message[len(first) :].view(group.size, len(row))
    totals = []
    pairs = zip(
        metrics,
        torch.split(summed, [len(words) for words in added]),
        torch.split(table, [len(words) for words in apart], dim=1),
        strict=True,
    )
    for metric, sums, parts in pairs:
        total = copy.copy(metric)
        total.unpack(sums, parts)
        total._merge(group)
        totals.append(total)
    return totals


def _agree(metrics: Sequence[Metric[Any]], described: list[str], group: Group) -> list[tuple[Tensor, Tensor]]:
    """Return the words of all metrics, after checking that all ranks have words of the same metrics.

    Otherwise the lengths in the all-reduce could differ, and gloo ends the process then.
    """
    words: list[tuple[Tensor, Tensor]] = []
    try:
        words = [_packed(metric) for metric in metrics]
        lengths = [(len(added), len(apart)) for added, apart in words]
        sent: Outgoing = serialize((described, lengths))
    except Exception as error:  # users may define metrics; the error is sent to the other ranks, then raised here
        sent = FailedSend(error)
    everyone = [arrived.open() for arrived in object_transport.all_gather(group, "compute of metrics", sent)]
    if any(theirs != described for theirs, _ in everyone):
        found = {rank: ", ".join(theirs) or "none" for rank, (theirs, _) in zip(group.ranks, everyone, strict=True)}
        raise RankMismatchError(
            f"ranks bring different metrics: {by_value(found, separator='; ')}. Compute the same metrics, in the "
            "same order, on all ranks."
        )
    for number, described_alike in enumerate(described):
        counts = {rank: theirs[number] for rank, (_, theirs) in zip(group.ranks, everyone, strict=True)}
        if len(set(counts.values())) > 1:
            found = {rank: f"{added} to add and {apart} apart" for rank, (added, apart) in counts.items()}
            raise RankMismatchError(
                f"pack() of {described_alike} returned different numbers of words: {by_value(found, separator='; ')}. "
                "Return as many on every rank, also where nothing has been counted."
            )
    return words


def _packed(metric: Metric[Any]) -> tuple[Tensor, Tensor]:
    """Return the words of a metric.

    Raises:
        TypeError: They are no pair of int64 tensors of one dimension.
    """
    packed = metric.pack()
    if not (
        isinstance(packed, tuple)
        and len(packed) == 2
        and all(isinstance(words, Tensor) and words.dtype == torch.int64 and words.dim() == 1 for words in packed)
    ):
        raise TypeError(
            f"pack() of {metric!r} returned {_describe_packed(packed)}: return two int64 tensors of one dimension, "
            "the words to add over ranks and those to keep apart"
        )
    return packed


def _describe_packed(packed: object) -> str:
    if isinstance(packed, Tensor):
        return f"one tensor, {packed.dtype} of shape {list(packed.shape)}"
    if isinstance(packed, tuple):
        return "(" + ", ".join(_describe_packed(part).removeprefix("one tensor, ") for part in packed) + ")"
    return describe_type(packed)


def describe_type(value: object) -> str:
    """Return a description of an object that is no metric, for messages.

    >>> describe_type(3), describe_type(int)
    ('int', 'the class int')
    """
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
