"""What the display says of events that are no progress: pure functions, from an event to its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unisono.watch.event_fields import number_in, whole_in
from unisono.watch.figures import format_bytes, format_elapsed, format_ratio, format_value, plural

if TYPE_CHECKING:
    from unisono.watch.event_kinds import Event

__all__ = ["describe_over", "describe_pipeline", "describe_result", "describe_resume"]


def describe_resume(event: Event) -> str:
    """Return where a run continues.

    >>> describe_resume({"event": "resume", "path": "runs/a", "epoch": 1, "total_steps": 1200})
    'resumed after step 1,200, in epoch 2: runs/a'
    """
    steps, epoch, path = whole_in(event, "total_steps"), whole_in(event, "epoch"), event.get("path")
    text = "resumed"
    if steps is not None:
        text += f" after step {steps:,}"
    if epoch is not None:
        text += f", in epoch {epoch + 1}"
    return f"{text}: {path}" if path else text


def describe_pipeline(event: Event) -> list[str]:
    """Return the stages of a pipeline and what is expected of its steps, a line each; none if the event lacks them."""
    names, shares = event.get("stages"), event.get("shares")
    if not isinstance(names, Sequence) or not isinstance(shares, Sequence):
        return []
    text = f"{plural(len(shares), 'stage')}, of {', '.join(f'{share:.0%}' for share in shares)} of the time"
    if isinstance(nbytes := event.get("nbytes"), Sequence):
        text += f" and {', '.join(map(format_bytes, nbytes))}"
    texts = [f"{text}, beginning with {', '.join(map(str, names))}"]
    if (step_s := number_in(event, "step_s")) is not None:
        texts.append(_expected_step(event, step_s))
    return texts


def _expected_step(event: Event, step_s: float) -> str:
    took = format_elapsed(step_s) if step_s >= 1 else f"{1e3 * step_s:.3g} ms"
    text = f"{event['schedule']}: a step of {took} is expected" if event.get("schedule") else f"a step of {took}"
    if least_s := number_in(event, "least_step_s"):
        text += f", within {step_s / least_s - 1:.0%} of the least possible"
    if (waiting := number_in(event, "waiting")) is not None:
        text += f"; ranks wait {waiting:.0%} of it"
    advised, then, now = (
        number_in(event, key) for key in ("advised_micro_batches", "advised_waiting", "micro_batches")
    )
    if advised is not None and then is not None and now is not None:
        text += f", or {then:.0%} with {advised:.0f} micro-batches instead of {now:.0f} (more virtual ranks)"
    return text


def describe_result(result: Any) -> str:
    """Return the value of a metric; with its total and count, if it has them.

    >>> describe_result({"value": 0.5, "total": 3, "count": 6})
    '0.5000 (3/6)'
    """
    if not isinstance(result, Mapping):
        result = {"value": result}
    value, total, count = (number_in(result, key) for key in ("value", "total", "count"))
    if value is None:
        return ""
    ratio = "" if total is None or count is None else format_ratio(total, count)
    return format_value(value) + (f" ({ratio})" if ratio else "")


def describe_over(event: Event) -> str:
    """Return that a run has nothing left to do, with what was asked for."""
    steps, done = whole_in(event, "total_steps"), whole_in(event, "epoch")
    text = "nothing to do: this run has ended" if steps is None else f"nothing to do: this run ended at step {steps:,}"
    text += "" if done is None else f", after {plural(done, 'epoch')}"
    asked, most = whole_in(event, "epochs"), whole_in(event, "max_steps")
    if asked is not None:
        text += f"; asked for: {plural(asked, 'epoch')}" + ("" if most is None else f" and {plural(most, 'step')}")
    return f"{text}. Ask for more to go on, or give another directory to start anew"
