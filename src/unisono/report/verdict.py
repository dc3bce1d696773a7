"""The words of a report: the verdict, and its key figures. Pure functions of the report's document."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from unisono.report.summary import Document
from unisono.text import clip, format_duration
from unisono.watch.figures import format_count, format_rate, format_value, plural

__all__ = ["Figure", "figures", "format_short_time", "format_span", "parts_of_time", "sentence", "state_word"]


class Figure(NamedTuple):
    """A number that stands large at the top of the page."""

    name: str
    value: str
    detail: str


def state_word(document: Document) -> str:
    """Return the state of the run as a word."""
    return {"finished": "Finished", "running": "Running", "failed": "Failed", "stopped": "Stopped"}.get(
        document["state"], "Unknown"
    )


def sentence(document: Document) -> str:
    """Return the verdict: how far the run has come, in what time."""
    totals, epoch = document["totals"], document["epoch"]
    steps, whole = totals["steps_done"], epoch.get("run_steps")
    time = format_span(totals["active_s"])
    done = plural(steps, "step")
    if document["state"] == "finished":
        epochs = epoch.get("epochs")
        return f"{plural(epochs, 'epoch')}, {done} in {time}." if epochs else f"{done} in {time}."
    of = f" of {format_count(whole)}" if whole else ""
    if document["state"] == "running":
        left = _left_s(document)
        return f"Step {format_count(steps)}{of} after {time}" + (f", about {format_span(left)} left." if left else ".")
    if document["state"] == "failed":
        return f"Ended by an exception after step {format_count(steps)}{of}, after {time}."
    if document["error"]:
        return f"Ended by a signal after step {format_count(steps)}{of}, after {time}."
    return f"Ended early, after step {format_count(steps)}{of}: it failed, was killed, or its loop was left."


def _left_s(document: Document) -> float | None:
    whole, median = document["epoch"].get("run_steps"), document["step_s"]["median"]
    left = (whole or 0) - document["totals"]["steps_done"]
    return left * median if left > 0 and median else None


def figures(document: Document) -> list[Figure]:
    """Return the figures at the top of the page."""
    totals, found = document["totals"], []
    curves: dict[str, Any] = document["curves"]
    for name in [name for name in curves if name == "loss" or name.startswith("loss of ")][:1]:
        loss = curves[name]
        if loss["last"] is not None:
            least, at = loss["least"] or (loss["last"], 0)
            detail = f"least {format_value(least)} at step {format_count(at)}"
            found.append(Figure("Training loss" + name.removeprefix("loss"), format_value(loss["last"]), detail))
    for name in [name for name in curves if "/" in name and not name.startswith(("train/", "log/", "samples/"))][:1]:
        last = curves[name]["last"]
        if last is not None:
            evaluated = plural(totals["evaluations"], "evaluation")
            found.append(Figure(clip(name, 40, at="middle"), format_value(last), f"the last of {evaluated}"))
    median = document["step_s"]["median"]
    if median:
        per_s = totals["samples"] / document["seconds"]["step"] if document["seconds"]["step"] else math.nan
        found.append(Figure("Speed", f"{format_rate(per_s)}/s", f"samples; a step takes {format_short_time(median)}"))
    ranks = document["ranks"][-1][1] if document["ranks"] else 1
    virtual, device = document["facts"].get("virtual_ranks"), document["facts"].get("device")
    detail = ", ".join(
        text
        for text in (plural(virtual, "virtual rank") if isinstance(virtual, int) else "", str(device or ""))
        if text
    )
    found.append(Figure("Ranks", format_count(ranks), clip(detail, 60)))
    found.append(_lost(document))
    return found


def _lost(document: Document) -> Figure:
    totals, seconds, checkpoint = document["totals"], document["seconds"], document["checkpoint"]
    if document["state"] in ("failed", "stopped"):
        saved = checkpoint.get("total_steps") if checkpoint else 0
        if isinstance(saved, int) and saved < totals["steps_done"]:
            since = f"since the checkpoint of step {format_count(saved)}" if saved else "there is no checkpoint"
            return Figure("Steps lost", format_count(totals["steps_done"] - saved), since)
    if totals["repeated"]:
        detail = f"in {plural(totals['starts'], 'start')}"
        return Figure("Steps repeated", format_count(totals["repeated"]), detail)
    if totals["recoveries"]:
        replaced = plural(totals["replaced"], "rank")
        return Figure("Lost", "nothing", f"{replaced} replaced in {format_short_time(seconds['recovery'])}")
    if totals["starts"] > 1:
        return Figure("Lost", "nothing", f"{totals['starts'] - 1} resumed, no step repeated")
    return Figure("Lost", "nothing", "no rank was lost")


def parts_of_time(document: Document) -> list[tuple[str, float, str]]:
    """Return where the time of the run went: (name, seconds, explanation) of each part, which add up to all."""
    seconds, active_s = document["seconds"], document["totals"]["active_s"]
    parts = _parts_of_steps(document, min(seconds["step"], active_s))
    parts.append(("evaluations", seconds["evaluation"], plural(document["totals"]["evaluations"], "evaluation")))
    parts.append(("recoveries", seconds["recovery"], plural(document["totals"]["replaced"], "rank") + " replaced"))
    parts.append(("changes of ranks", seconds["resize"], "unisono scale"))
    rest = max(0.0, active_s - sum(part for _, part, _ in parts))
    parts.append(("other", rest, "start, reading ahead of an epoch, saving, your code between epochs"))
    return [part for part in parts if part[1] > 0]


def _parts_of_steps(document: Document, step_s: float) -> list[tuple[str, float, str]]:
    times = document["times"]
    if times is None:
        return [("steps", step_s, "reading data, computing, exchanging gradients")]
    # Some steps are in no event: the first ones, and those of the last second.
    factor = document["totals"]["steps_timed"] / times["steps"]
    seconds = {name: factor * of_all for name, of_all in times["mean"].items()}
    if (whole_s := sum(seconds.values())) > step_s > 0:
        seconds = {name: each * step_s / whole_s for name, each in seconds.items()}
    is_seen = "waiting" in seconds
    if "virtual_ranks" not in document["facts"]:  # a loop of one's own, of which one rank has told
        own = {
            "data": ("data", "waiting for the next batch, on rank 0"),
            "compute": ("compute", "everything else in your loop, on rank 0"),
            "waiting": ("waits", "for other ranks, on rank 0"),
        }
        return [(own[name][0], each, own[name][1]) for name, each in seconds.items() if name in own]
    told = {
        "data": ("data", "waiting for the next batch"),
        "compute": ("compute", "forward and backward" if is_seen else "steps on GPUs, with what they wait for"),
        "waiting": ("waits", "for other ranks"),
        "update": ("update", "summing the gradient, and updating the weights"),
    }
    parts = [(told[name][0], each, told[name][1] + "; mean over ranks") for name, each in seconds.items()]
    return [*parts, ("loop", max(0.0, step_s - sum(seconds.values())), "your code between steps")]


def format_span(seconds: float) -> str:
    """Return a duration as people say it, also one below a second.

    >>> [format_span(s) for s in (0.0005, 0.31, 75.0, 7400.0, 200_000.0)]
    ['0.5 ms', '310 ms', '1 min 15 s', '2 h 3 min', '2 d 7 h']
    """
    if seconds >= 48 * 3600:
        hours = int(seconds // 3600)
        return f"{hours // 24} d {hours % 24} h"
    return format_duration(seconds) if seconds >= 1 else format_short_time(seconds)


def format_short_time(seconds: float) -> str:
    """Return a duration with three digits."""
    if seconds >= 1:
        return f"{seconds:.3g} s" if seconds < 60 else format_duration(seconds)
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} µs"
