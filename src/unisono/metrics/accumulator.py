"""What all metrics are: counts and sums that each rank keeps for itself, and that meet in one all-reduce.

What a rank has counted travels as whole numbers of 64 bits ("words"). Some are added over ranks. The others stay apart:
each rank writes them into a row of its own, and the sum of all those rows, zero elsewhere, is a table of them. So
floating-point numbers, minima and maxima travel in the same all-reduce as counts, bit for bit, on every backend. Before
it, ranks tell each other what they bring.
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

__all__ = ["Accumulator", "describe_type", "exchange"]

T = TypeVar("T")


class Accumulator(ABC, Generic[T]):
    """Something that is counted over the samples of all ranks.

    `update` is local and cheap: it waits for no other rank, and on a GPU not for the device. `compute` gives the value
    over all ranks; every rank of the group must call it, also one that has seen no sample. It changes nothing, so you
    can go on counting. `local` gives the value over this rank's samples.

    For one of your own: keep sums in attributes that are replaced and never written in place, and define `update`,
    `reset`, `_words`, `_set_words` and `_value`; `repr` must name all settings.
    """

    def compute(self, group: dist.ProcessGroup | None = None) -> T:
        """Give the value over the samples of all ranks, on every rank. Every rank must call it: one all-reduce.

        Raises: GroupError if the ranks have not met; RankMismatchError if they count different things; PeerError if
            another rank cannot tell what it has counted.
        """
        total: Accumulator[T] = exchange([self], group_of(group))[0]
        return total._value()

    def local(self) -> T:
        """Give the value over the samples of this rank alone. Nothing travels."""
        return self._value()

    def collect(self, group: dist.ProcessGroup | None = None) -> None:
        """Move what all ranks have counted to the first rank of the group; every rank must call it.

        The value over all ranks stays what it is. The state of the first rank is then that of all, and can be saved
        and loaded into a job of any size: see `state_dict`.
        """
        members = group_of(group)
        (total,) = exchange([self], members)
        self._take(total, members)

    @abstractmethod
    def reset(self) -> None:
        """Forget everything."""

    def state_dict(self) -> dict[str, Any]:
        """Give what this rank has counted, in tensors and text. Local.

        To save the state of all ranks in one file, call `collect` on all of them first, then save that of rank 0, and
        load it on rank 0 alone.
        """
        added, apart = self._words()
        return {"metric": repr(self), "added": added.cpu().clone(), "apart": apart.cpu().clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises: ValueError if it is of another metric."""
        if state.get("metric") != repr(self):
            raise ValueError(
                f"this is the state of {state.get('metric')}, and the metric is {self!r}: make an equal one"
            )
        self._set_words(state["added"].clone(), state["apart"].clone().unsqueeze(0))

    @abstractmethod
    def _words(self) -> tuple[Tensor, Tensor]:
        """Give the words to be added over ranks, and those that stay apart: int64, one dimension, fixed lengths."""

    @abstractmethod
    def _set_words(self, added: Tensor, apart: Tensor) -> None:
        """Become what all ranks have counted, from the sums of added words and the others, one row per rank."""

    @abstractmethod
    def _value(self) -> T:
        """Give the value over what this object has counted."""

    def _merge(self, group: Group) -> None:
        """Do what words cannot: called on the total, on all ranks, after them."""

    def _take(self, total: Accumulator[T], group: Group) -> None:
        if group.rank == 0:
            self.__dict__.update(total.__dict__)
        else:
            self.reset()


def exchange(metrics: Sequence[Accumulator[Any]], group: Group, names: Sequence[str] = ("",)) -> list[Accumulator[Any]]:
    """Give for each metric one that has counted what all ranks have. Every rank must call it: one all-reduce for all.

    Raises: RankMismatchError on all ranks if they bring different metrics; PeerError if another could not come.
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
    if len(message):  # metrics of torchmetrics have an exchange of their own
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
        total._set_words(sums, parts)
        total._merge(group)
        totals.append(total)
    return totals


def _agree(metrics: Sequence[Accumulator[Any]], described: list[str], group: Group) -> list[tuple[Tensor, Tensor]]:
    """Give the words of all metrics, once all ranks have theirs, of the same metrics.

    Sums of unequal lengths would otherwise meet, and gloo ends the process then.
    """
    words: list[tuple[Tensor, Tensor]] = []
    try:
        words = [metric._words() for metric in metrics]
        sent: Outgoing = serialize(described)
    except Exception as error:  # metrics may be the user's; the other ranks are told, then it is raised here
        sent = FailedSend(error)
    everyone = [arrived.open() for arrived in object_transport.all_gather(group, "compute of metrics", sent)]
    if any(theirs != described for theirs in everyone):
        found = {rank: ", ".join(theirs) or "none" for rank, theirs in zip(group.ranks, everyone, strict=True)}
        raise RankMismatchError(
            f"ranks bring different metrics: {by_value(found, separator='; ')}. Compute the same metrics, in the "
            "same order, on all ranks."
        )
    return words


def describe_type(value: object) -> str:
    """Say what something is that is no metric.

    >>> describe_type(3), describe_type(int)
    ('int', 'the class int')
    """
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
