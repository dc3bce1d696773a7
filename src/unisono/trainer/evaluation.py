"""Evaluation: every sample once, whatever the number of ranks, a mean that is exact, and the event that tells of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unisono.data.batch import Batch
from unisono.job.user_function import count_collectives, enter, leave, refuse_collectives_since
from unisono.metrics.metric import Metric
from unisono.trainer.modules import to_device
from unisono.trainer.run_context import RunContext
from unisono.trainer.snapshot import Cursor
from unisono.trainer.step import Loss
from unisono.trainer.value_sums import ValueSums
from unisono.watch import EventLog

__all__ = ["evaluate", "tell"]


def evaluate(run: RunContext, function: Loss, models: Any, batches: Iterator[Batch]) -> Metric | dict[str, Metric]:
    """Average what a function says of each sample over all ranks' batches.

    Sums are float64, per virtual rank and then in tree order, so the result is the same on any number of ranks. One
    small exchange at the end; every rank must call it.
    """
    sums = ValueSums("evaluated function")
    for batch in batches:
        for share in batch.shares:
            for part, micro_batch in enumerate(share.micro_batches):
                run.set_generators("evaluate/model", batch.step, share.virtual_rank, part)
                items = to_device(micro_batch.items, run.device)
                counted = count_collectives()
                inside = enter("the evaluated function")
                try:
                    result = function(models, items)
                    refuse_collectives_since(counted)
                finally:
                    leave(inside)
                values = result if isinstance(result, Mapping) else {"": result}
                sums.add(share.virtual_rank, values, samples=len(micro_batch.indices))
    metrics = sums.means(run.world, "trainer.evaluate")
    return metrics[""] if [*metrics] == [""] else metrics


def tell(log: EventLog, result: Metric | dict[str, Metric], *, name: str, cursor: Cursor, seconds: float) -> None:
    """Emit what an evaluation came to.

    Args: name is that of a single result, and of the whole for a dict of results, which have their own.
    """
    metrics: dict[str, Metric] = {name: result} if isinstance(result, Metric) else result
    log.emit(
        "evaluation",
        # Between two epochs the result is the last one's.
        epoch=max(0, cursor.epoch - (cursor.step == 0)),
        name="evaluation" if isinstance(result, Metric) else name,
        values={key: {"value": float(m), "total": m.total, "count": m.count} for key, m in metrics.items()},
        seconds=round(seconds, 3),
    )
