"""`TorchMetric`: a metric of the package torchmetrics, computed over ranks with uneven shares, also ranks with none.

torchmetrics gathers each state separately, and states that are lists only if every rank has seen samples. Here one
exchange gathers the states of all ranks, and torchmetrics computes from them as in one process. This module does not
import the package: a caller that has one of its metrics has already imported it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unisono.collectives.group import Group
from unisono.collectives.object_collectives import all_gather
from unisono.metrics.metric import Metric, describe_type

__all__ = ["TorchMetric"]


class TorchMetric(Metric[Any]):
    """Wraps a metric of torchmetrics, alone or among `Metrics`: `TorchMetric(torchmetrics.AUROC(task="binary"))`.

    `compute` costs one exchange of the metric's states, besides the all-reduce of other metrics.

    Args:
        metric: The metric of torchmetrics.

    Raises:
        TypeError: The argument is not a single metric: a collection, wrapper or sum of metrics, whose parts must be
            wrapped one by one, or another object.
    """

    def __init__(self, metric: Any) -> None:
        modules: Any = [] if isinstance(metric, type) else getattr(metric, "modules", list)()
        parts = [part for part in modules if hasattr(part, "_reductions")]
        if len(parts) != 1 or parts[0] is not metric or not metric._defaults:
            raise TypeError(
                f"{describe_type(metric)} is no single metric with states of its own: give metrics of torchmetrics one "
                "by one, together in unisono.metrics.Metrics(...)"
            )
        self.metric = metric
        """The wrapped metric, with this rank's samples."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Call the metric's `update` with these arguments, without communication."""
        self.metric.update(*args, **kwargs)

    def reset(self) -> None:
        """Discard everything counted so far on this rank."""
        self.metric.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank has counted, with the states that torchmetrics omits, without communication."""
        return {"metric": repr(self), **self._states()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace what this rank has counted by a state that `state_dict` returned.

        Raises:
            ValueError: The state belongs to another metric.
        """
        self._check_state(state)
        self._set_states(self.metric, state["updates"], state["states"])

    def pack(self) -> tuple[Tensor, Tensor]:
        """Return what this rank has counted, as words."""
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)

    def unpack(self, added: Tensor, apart: Tensor) -> None:
        """Do nothing: no state travels as words."""

    def _merge(self, group: Group) -> None:
        found = [each for each in all_gather(self._states(), group=group.process_group) if each["updates"]]
        merged = self.metric.clone()
        merged.reset()
        if found:
            updates = [each["updates"] for each in found]
            states = {
                name: _merged([each["states"][name] for each in found], reduction, updates)
                for name, reduction in self.metric._reductions.items()
            }
            self._set_states(merged, sum(updates), states)
        self.metric = merged

    def _take(self, total: Metric[Any], group: Group) -> None:
        merged: Any = total
        if group.rank == 0:
            states = merged._states()
            self._set_states(self.metric, states["updates"], states["states"])
        else:
            self.reset()

    def _states(self) -> dict[str, Any]:
        states = {name: _on_cpu(getattr(self.metric, name)) for name in self.metric._reductions}
        return {"updates": self.metric._update_count, "states": states}

    @staticmethod
    def _set_states(metric: Any, updates: int, states: Mapping[str, Any]) -> None:
        metric.reset()
        for name, value in states.items():
            there = [each.to(metric.device) for each in value] if isinstance(value, list) else value.to(metric.device)
            setattr(metric, name, there)
        metric._update_count = updates

    def local(self) -> Any:
        """Return the metric's value, without torchmetrics' own synchronisation and without a result in its cache."""
        before = self.metric._to_sync, self.metric._computed
        self.metric._to_sync, self.metric._computed = False, None
        try:
            return self.metric.compute()
        finally:
            self.metric._to_sync, self.metric._computed = before

    def __repr__(self) -> str:
        return f"TorchMetric({self.metric!r})"


def _on_cpu(state: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    if isinstance(state, list):
        return [each.detach().cpu() for each in state]
    return state.detach().cpu().clone()


def _merged(states: list[Any], reduction: Any, updates: list[int]) -> Any:
    """Return one state made of those of several ranks, as torchmetrics does; but weight means by the ranks' updates."""
    name = getattr(reduction, "__name__", "")
    if isinstance(states[0], list):
        together = [each for state in states for each in state]
        return together if reduction is None or name == "dim_zero_cat" else reduction(together)
    if name == "dim_zero_cat":
        return torch.cat([state.reshape(-1) if not state.dim() else state for state in states])
    stacked = torch.stack(states)
    if name == "dim_zero_mean":
        weights = torch.tensor(updates, dtype=torch.float64).view(-1, *[1] * (stacked.dim() - 1))
        return ((stacked * weights).sum(0) / weights.sum()).to(stacked.dtype if stacked.is_floating_point() else None)
    return stacked if reduction is None else reduction(stacked)
