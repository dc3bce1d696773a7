"""Evaluation: every sample once on any number of ranks, an exact mean, and the event that reports it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unisono.data.batch import Batch
from unisono.metrics.average import Average
from unisono.parallel.pipeline.cut_model import CutModel
from unisono.parallel.sharding.divided_model import DividedModel
from unisono.trainer.carried import CarriedStates
from unisono.trainer.run_context import RunContext
from unisono.trainer.sample_results import SampleResults
from unisono.trainer.snapshot import Cursor
from unisono.trainer.step import Loss
from unisono.trainer.value_sums import ValueSums
from unisono.watch import EventLog
from unisono.watch.loop_fields import LoggedFields

__all__ = ["evaluate", "tell", "tell_values"]


def evaluate(
    run: RunContext,
    carried: CarriedStates,
    function: Loss,
    models: Any,
    batches: Iterator[Batch],
    *,
    cut: CutModel | DividedModel | None = None,
) -> Average | dict[str, Average]:
    """Return the mean of a function's values over the samples of all ranks' batches. Every rank must call it.

    Sums are float64, per virtual rank and then in tree order, so the result is the same on any number of ranks. Ranks
    exchange them once, at the end.

    Raises:
        LossError: On this rank, the function returned anything other than `Trainer.evaluate` allows.
            On all ranks, it returned a dict for some micro-batches and a single value for others.
        GroupError: On this rank, the function called a collective.
    """
    sums = ValueSums("evaluated function")
    results = SampleResults(run, function, models, what="the evaluated function", carried=carried, cut=cut)
    if run.exchange is not None:
        run.exchange.begin(is_step=False)
    try:
        for batch in batches:
            for share, micro_batch, result in results.of(batch):
                sums.add(share.virtual_rank, result, samples=len(micro_batch.indices))
    finally:
        if run.exchange is not None:
            run.exchange.drain()
    metrics = sums.means(run.world, "trainer.evaluate")
    return metrics[""] if [*metrics] == [""] else metrics


def tell(log: EventLog, result: Average | dict[str, Average], *, name: str, cursor: Cursor, seconds: float) -> None:
    """Emit the event of an evaluation. `name` names a single result, or a dict of results that have their own names."""
    metrics: dict[str, Average] = {name: result} if isinstance(result, Average) else result
    log.emit(
        "evaluation",
        epoch=_epoch(cursor),
        name="evaluation" if isinstance(result, Average) else name,
        values={key: {"value": float(m), "total": m.total, "count": m.count} for key, m in metrics.items()},
        seconds=round(seconds, 3),
    )


def tell_values(log: EventLog, fields: LoggedFields, *, cursor: Cursor) -> None:
    """Emit the event of what the user's loop logs."""
    log.emit("log", epoch=_epoch(cursor), total_steps=cursor.total_steps, **fields)


def _epoch(cursor: Cursor) -> int:
    # Between two epochs, what is told belongs to the last one.
    return max(0, cursor.epoch - (cursor.step == 0))
