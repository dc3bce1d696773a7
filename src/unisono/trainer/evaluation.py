"""Evaluation: every sample once, whatever the number of ranks, a mean that is exact, and the event that tells of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unisono.data.batch import Batch
from unisono.job.user_function import count_collectives, enter, leave, refuse_collectives_since
from unisono.metrics.metric import Metric
from unisono.parallel.losses import read_loss
from unisono.plan import Node, fold
from unisono.trainer.modules import to_device
from unisono.trainer.run_context import RunContext
from unisono.trainer.snapshot import Cursor
from unisono.trainer.step import Loss
from unisono.watch import EventLog

__all__ = ["evaluate", "tell"]

_Sums = dict[str, tuple[float, float]]


def evaluate(run: RunContext, function: Loss, models: Any, batches: Iterator[Batch]) -> Metric | dict[str, Metric]:
    """Average what a function says of each sample over all ranks' batches.

    Sums are float64, per virtual rank and then in tree order, so the result is the same on any number of ranks. One
    small exchange at the end; every rank must call it.
    """
    own: dict[int, _Sums] = {virtual_rank: {} for virtual_rank in run.block}
    single = True
    for batch in batches:
        for share in batch.shares:
            sums = own[share.virtual_rank]
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
                single = not isinstance(result, Mapping)
                for name, value in ({"": result} if single else result).items():
                    what = "evaluated function" + (f" (entry {name!r})" if name else "")
                    found = read_loss(_as_number(value), samples=len(micro_batch.indices), what=what)
                    before = sums.get(name, (0.0, 0.0))
                    sums[name] = (before[0] + found.total.double().item(), before[1] + found.weight_number(what))
    everyone: dict[int, _Sums] = {}
    for single_there, part in run.world.gather((single, own), "trainer.evaluate"):
        everyone |= part
        single = single and single_there
    names = list(dict.fromkeys(name for _, sums in sorted(everyone.items()) for name in sums))
    metrics = {name: Metric(*_total(everyone, name)) for name in names}
    return metrics[""] if single else metrics


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


def _total(everyone: Mapping[int, _Sums], name: str) -> tuple[float, float]:
    values = {Node(v, v + 1): sums.get(name, (0.0, 0.0)) for v, sums in everyone.items()}
    return fold(values, leaves=len(everyone), add=lambda a, b: (a[0] + b[0], a[1] + b[1]))


def _as_number(value: Any) -> Any:
    """Let truth values count as 0 and 1; everything else is read like a loss."""
    return value.float() if hasattr(value, "dtype") and str(value.dtype) == "torch.bool" else value
