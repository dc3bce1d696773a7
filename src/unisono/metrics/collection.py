"""`Metrics`: several named metrics that are updated together, and computed together in one all-reduce."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from unisono.collectives.group import group_of
from unisono.metrics.metric import Metric, describe_type, total_over_ranks

__all__ = ["Metrics"]


class Metrics(Mapping[str, Metric[Any]]):
    """A mapping of names to metrics, whose values are computed over all ranks in one all-reduce.

    Args:
        **metrics: The metrics by name.

    Raises:
        TypeError: An argument is not a metric.

    >>> from unisono.metrics import Accuracy, Max, Mean, Metrics
    >>> meters = Metrics(loss=Mean(), longest=Max())
    >>> meters["loss"].update(0.5, weight=8)
    >>> meters.update(loss=(0.2, 4), longest=11)
    >>> values = meters.compute()
    >>> print(values["loss"], values["longest"])
    0.4000 11
    """

    def __init__(self, **metrics: Metric[Any]) -> None:
        for name, metric in metrics.items():
            if not isinstance(metric, Metric):
                raise TypeError(f"{name} is {describe_type(metric)}: give metrics, such as Mean() or TorchMetric(...)")
        self._metrics = metrics

    def __getitem__(self, name: str) -> Metric[Any]:
        return self._metrics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)

    def update(self, **values: Any) -> None:
        """Update metrics by name, without communication.

        Args:
            **values: The argument of each metric's `update`; a tuple stands for several arguments.

        Raises:
            KeyError: There is no metric of this name. Nothing has been counted then.
            TypeError, ValueError: A metric refuses its arguments. Those before it in the call have counted theirs.
        """
        for name in values:
            if name not in self._metrics:
                raise KeyError(f"{name!r} is none of the metrics {list(self._metrics)}")
        for name, value in values.items():
            metric: Any = self._metrics[name]
            metric.update(*value) if isinstance(value, tuple) else metric.update(value)

    def compute(self, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
        """Return all values over the samples of all ranks, on every rank, by name.

        Every rank of the group must call it. It costs an all-gather that compares the metrics, and one all-reduce for
        all of them together.

        Args:
            group: The ranks whose samples count; None means all ranks of the job.

        Raises:
            GroupError: The process group does not exist yet or has ended, or this rank is not in it.
            RankMismatchError: The ranks compute different metrics. Raised on all ranks.
            PeerError: Another rank cannot express what it has counted in words; that rank raises its own error.
        """
        totals = total_over_ranks([*self._metrics.values()], group_of(group), names=[*self._metrics])
        return {name: total.local() for name, total in zip(self._metrics, totals, strict=True)}

    def local(self) -> dict[str, Any]:
        """Return all values over the samples of this rank alone, by name, without communication."""
        return {name: metric.local() for name, metric in self._metrics.items()}

    def collect(self, group: dist.ProcessGroup | None = None) -> None:
        """Move the counts of all ranks to the first: see `Metric.collect`. Every rank must call it."""
        members = group_of(group)
        totals = total_over_ranks([*self._metrics.values()], members, names=[*self._metrics])
        for metric, total in zip(self._metrics.values(), totals, strict=True):
            metric._take(total, members)

    def reset(self) -> None:
        """Discard everything counted so far on this rank."""
        for metric in self._metrics.values():
            metric.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank has counted, by name: see `Metric.state_dict`."""
        return {name: metric.state_dict() for name, metric in self._metrics.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace what this rank has counted by a state that `state_dict` returned.

        Raises:
            ValueError: The state belongs to other metrics. Nothing has been changed then.
        """
        if state.keys() != self._metrics.keys():
            raise ValueError(f"this is the state of {sorted(state)}, and the metrics are {sorted(self._metrics)}")
        for name, metric in self._metrics.items():
            metric._check_state(state[name])
        for name, metric in self._metrics.items():
            metric.load_state_dict(state[name])

    def __repr__(self) -> str:
        return f"Metrics({', '.join(f'{name}={metric!r}' for name, metric in self._metrics.items())})"
