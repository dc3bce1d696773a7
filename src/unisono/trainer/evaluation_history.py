"""The results of a run's evaluations, and decisions that are functions of them: early stopping, the best checkpoint.

Every rank has the same history, since `evaluate` returns the same on all. It is part of a checkpoint, so that a resumed
run decides as one that was never stopped. Start reading at `EvaluationHistory` and `evaluations_since_improvement`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from unisono.state.codec import Json, decode, encode

__all__ = ["Evaluated", "EvaluationHistory", "best_of", "evaluations_since_improvement", "is_better"]


class Evaluated(NamedTuple):
    """One value of one evaluation."""

    evaluation: str
    """The name of the evaluation."""
    metric: str
    """The name of the value: that of the evaluation, or a key of its dict."""
    step: int
    """The number of steps done; -1 if other weights were loaded since, so that no checkpoint belongs to it."""
    value: float

    def is_called(self, metric: str) -> bool:
        """Return True if a metric of this name, or of "evaluation/metric", is meant."""
        return metric in (self.metric, f"{self.evaluation}/{self.metric}")


class EvaluationHistory:
    """The results of all evaluations since the start of a run, in order."""

    def __init__(self, results: Sequence[Evaluated] = ()) -> None:
        self._results = [*results]

    def __len__(self) -> int:
        return len(self._results)

    def add(self, name: str, values: Mapping[str, float], *, step: int) -> list[Evaluated]:
        """Append the results of an evaluation, by the names of its metrics, and return them.

        A result that there is already of the same step is replaced: an epoch that continues after a resume may repeat
        evaluations.
        """
        added = [Evaluated(name, metric, step, float(value)) for metric, value in values.items()]
        for each in added:
            index = len(self._results) - 1
            while index >= 0 and self._results[index].step == step and self._results[index][:2] != each[:2]:
                index -= 1
            if index >= 0 and self._results[index].step == step:
                self._results[index] = each
            else:
                self._results.append(each)
        return added

    def become(self, other: EvaluationHistory) -> None:
        """Take over the results of another history."""
        self._results = [*other._results]

    def weights_replaced(self, step: int) -> None:
        """Note that the weights at a step are no longer those that were evaluated there."""
        self._results = [each._replace(step=-1) if each.step == step else each for each in self._results]

    def of(self, metric: str) -> list[Evaluated]:
        """Return the results of a metric, in order.

        Args:
            metric: The name of a metric, or "evaluation/metric" to choose among several with that name.

        Raises:
            ValueError: Several evaluations have a metric of this name.
        """
        found = [each for each in self._results if each.is_called(metric)]
        sources = sorted({each.evaluation for each in found})
        if len(sources) > 1:
            raise ValueError(
                f"{metric!r} was reported by the evaluations {', '.join(map(repr, sources))}: name one of them, as in "
                f'"{sources[0]}/{metric}"'
            )
        return found

    def names(self) -> list[str]:
        """Return the names of all metrics, in the order of their first results."""
        return list(dict.fromkeys(each.metric for each in self._results))

    def state(self, count: int | None = None) -> Json:
        """Return the first `count` results as JSON; None: all."""
        return encode([list(each) for each in self._results[:count]])[0]

    @classmethod
    def restored(cls, state: Json | None) -> EvaluationHistory:
        """Return the history that `state` described; None, from an older version, is an empty one."""
        return cls([Evaluated(*row) for row in decode(state or [], {})])


def is_better(value: float, than: float | None, *, mode: str, by: float = 0.0) -> bool:
    """Return True if a value is better than another by more than `by`. NaN is never better, and None always worse.

    >>> is_better(0.9, 0.8, mode="max"), is_better(0.9, 0.9, mode="max"), is_better(float("nan"), None, mode="max")
    (True, False, False)
    """
    if math.isnan(value):
        return False
    if than is None:
        return True
    return value > than + by if mode == "max" else value < than - by


def evaluations_since_improvement(values: Sequence[float], *, mode: str, min_delta: float = 0.0) -> int:
    """Return how many values have come since the last one that was better than all before it by more than `min_delta`.

    >>> evaluations_since_improvement([3.0, 2.0, 2.5, 2.0], mode="min")
    2
    >>> evaluations_since_improvement([3.0, 2.9, 2.8, 2.7], mode="min", min_delta=0.25)
    0
    >>> evaluations_since_improvement([3.0, 2.9, 2.8], mode="min", min_delta=0.25)
    2
    """
    best: float | None = None
    since = 0
    for value in values:
        since += 1
        if is_better(value, best, mode=mode, by=min_delta):
            best, since = value, 0
    return since


def best_of(results: Sequence[Evaluated], steps: Collection[int], *, mode: str) -> Evaluated | None:
    """Return the best result at one of some steps, and the earliest of equal ones; None if there is none.

    >>> results = [Evaluated("test", "loss", step, value) for step, value in [(5, 0.1), (10, 0.3), (15, 0.3)]]
    >>> best_of(results, {10, 15}, mode="min").step
    10
    """
    best: Evaluated | None = None
    for each in results:
        if each.step in steps and is_better(each.value, None if best is None else best.value, mode=mode):
            best = each
    return best
