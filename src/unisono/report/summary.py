"""The summary of a run's events, as one document of bounded size that JSON can hold.

A report is made from this document alone, and holds it. Start reading at `summarise`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from unisono.report.downsampling import Curve
from unisono.report.rank_times import RankTimes
from unisono.report.samples import Samples
from unisono.report.spans import Spans
from unisono.report.step_times import StepTimes
from unisono.watch import Event

__all__ = ["FORMAT", "Document", "summarise"]

Document: TypeAlias = dict[str, Any]
"""The document that `_Summary.document` returns."""

FORMAT = "unisono report 2"
_MOST_CURVES = 60
_MOST_STARTS = 100
_MOST_WARNINGS = 50
_MOST_RECOVERIES = 500
_MOST_TABLES = 50
_MOST_HOTTEST = 8
_MOST_TEXTS = 20
_TEXTS_OF_A_NAME = 5
_MOST_IMAGES = 12
_IMAGES_OF_A_NAME = 6
_OF_TABLES = ("rows", "capacity", "ids", "distinct", "nbytes", "hit_rate", "evicted")
_LONG_S = 5.0
_LONG_TIMES = 20.0
"""A step is long that takes this many seconds, and as many times the median of those before."""
_LONGEST = 1000
"""Characters of a message."""


def summarise(events: Iterable[Event]) -> Document:
    """Return the document of a run. Pure: one pass, with memory that does not depend on the number of events.

    Events and fields that are missing, of another type, or of a later version are passed over.

    Args:
        events: The events of the run, oldest first.

    Returns:
        The document, without its title and source. Its state is "finished", "failed" or "open".
    """
    summary = _Summary()
    for event in events:
        summary.add(event)
    return summary.document()


class _Summary:
    """Adds up events."""

    def __init__(self) -> None:
        self.events = 0
        self.state = "open"
        self.error: str | None = None
        self.digest: str | None = None
        self.facts: dict[str, Any] = {}
        self.starts: list[dict[str, Any]] = []
        self.num_starts = 0
        self.first: float | None = None
        self.last: float | None = None
        self.gaps_s = 0.0
        """Seconds between the end of a process and the next start, which the timeline leaves out."""
        self.world_size = 1
        self.ranks: list[list[float]] = []
        self.steps = self.samples = self.repeated = self.done = 0
        self.epoch: dict[str, Any] = {}
        self.times = StepTimes()
        self.longest: tuple[float, int] = (0.0, 0)
        self.between_s = 0.0
        """Seconds since the previous step that were spent on something other than the next one."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts: Counter[str] = Counter()
        self.curves: dict[str, Curve] = {}
        self.left_out: set[str] = set()
        self.spans = {name: Spans() for name in ("evaluation", "checkpoint", "long step")}
        self.recoveries: list[dict[str, Any]] = []
        self.rank_times = RankTimes()
        self.tables: dict[str, dict[str, Any]] = {}
        self.texts = Samples(names=_MOST_TEXTS, most=_TEXTS_OF_A_NAME)
        self.images = Samples(names=_MOST_IMAGES, most=_IMAGES_OF_A_NAME)
        self.warnings: dict[str, dict[str, Any]] = {}
        self.other_warnings = 0
        self.pipeline: dict[str, Any] | None = None
        self.checkpoint: dict[str, Any] | None = None
        self._handlers: dict[str, Callable[[Event, float], None]] = {
            "run": self._run,
            "resume": self._resume,
            "epoch": self._epoch,
            "step": self._step,
            "times": self.rank_times.add,
            "tables": self._tables,
            "evaluation": self._evaluation,
            "log": self._log,
            "checkpoint": self._checkpoint,
            "recovery": self._recovery,
            "resize": self._resize,
            "pipeline": self._pipeline,
            "warning": self._warning,
            "failure": self._failure,
            "over": self._over,
            "end": self._end,
        }

    def add(self, event: Event) -> None:
        kind, time = event.get("event"), _number(event.get("time"))
        handler = self._handlers.get(kind) if isinstance(kind, str) else None
        if handler is None or time is None or not math.isfinite(time):
            return
        if self.first is None:
            self.first = self.last = time
        assert self.last is not None
        if kind == "run":
            self.gaps_s += max(0.0, time - self.last) if self.events else 0.0
        self.events += 1
        self.last = max(self.last, time)
        handler(event, self._at(time))

    def _at(self, time: float) -> float:
        """Return the seconds that processes of the run have worked until a time."""
        assert self.first is not None
        return max(0.0, time - self.first - self.gaps_s)

    def _run(self, event: Event, at_s: float) -> None:
        self.facts = {key: value for key, value in event.items() if key not in ("time", "event")}
        self.world_size = _whole(event.get("world_size")) or 1
        self.state, self.error, self.digest, self.between_s = "open", None, None, 0.0
        self.rank_times.break_off()
        self.num_starts += 1
        start = {"time": event["time"], "at_s": round(at_s, 3), "world_size": self.world_size, "from_step": 0}
        self.starts = [*self.starts[: _MOST_STARTS - 1], start]
        self._note_ranks(at_s)

    def _note_ranks(self, at_s: float) -> None:
        if self.ranks and self.ranks[-1][1] == self.world_size:
            return
        self.ranks = [*self.ranks[: _MOST_STARTS - 1], [round(at_s, 3), self.world_size]]

    def _resume(self, event: Event, at_s: float) -> None:
        if self.starts:
            self.starts[-1]["from_step"] = _whole(event.get("total_steps")) or 0

    def _epoch(self, event: Event, at_s: float) -> None:
        self.epoch = {key: event.get(key) for key in ("epoch", "epochs", "steps", "run_steps", "num_samples")}
        self.state, self.error = "open", None  # a program that caught a failure goes on
        self._rewind(_whole(event.get("total_steps")))
        self.between_s = 0.0

    def _rewind(self, step: int | None) -> None:
        if step is not None and step < self.done:
            self.repeated += self.done - step
            self.done = step
            for curve in self.curves.values():
                curve.rewind(step)
            self.texts.rewind(step)
            self.images.rewind(step)

    def _step(self, event: Event, at_s: float) -> None:
        step, seconds = _whole(event.get("total_steps")), _number(event.get("step_s"))
        if step is None:
            return
        of = f" of {event['optimizer']}" if isinstance(event.get("optimizer"), str) else ""
        for name in ("loss", "lr", "grad_norm", "memory"):
            if (value := event.get(name)) is not None:
                self._point(f"{name}{of}" if name != "memory" else name, step, value)
        if isinstance(values := event.get("values"), Mapping):
            for name, value in values.items():
                self._point(f"train/{name}{of}", step, value)
        samples = _whole(event.get("samples")) or 0
        is_new = step > self.done
        self.done = max(self.done, step)
        if is_new:
            self.steps, self.samples = self.steps + 1, self.samples + samples
        if seconds is not None and math.isfinite(seconds):
            own_s = max(0.0, seconds - self.between_s)
            if own_s > _LONG_S and self.times.count and own_s > _LONG_TIMES * self.times.quantile(0.5):
                self.spans["long step"].add(max(0.0, at_s - own_s), at_s)
                self.counts["long step"] += 1
            self.times.add(own_s)
            if own_s > self.longest[0]:
                self.longest = (own_s, step)
            if is_new and own_s > 0 and samples:
                self._point("samples/s", step, samples / own_s)
        self.between_s = 0.0

    def _tables(self, event: Event, at_s: float) -> None:
        found = event.get("tables")
        for name, figures in found.items() if isinstance(found, Mapping) else ():
            if isinstance(figures, Mapping) and (name in self.tables or len(self.tables) < _MOST_TABLES):
                self.tables[name] = {
                    **{key: value for key in _OF_TABLES if (value := _number(figures.get(key))) is not None},
                    "hottest": [
                        each
                        for each in _list(figures.get("hottest"))[:_MOST_HOTTEST]
                        if isinstance(each, list) and len(each) == 2 and all(map(_is_number, each))
                    ],
                }

    def _evaluation(self, event: Event, at_s: float) -> None:
        name, values = event.get("name"), event.get("values")
        seconds = _number(event.get("seconds")) or 0.0
        self._spend("evaluation", seconds)
        self.spans["evaluation"].add(max(0.0, at_s - seconds), at_s)
        for metric, found in values.items() if isinstance(values, Mapping) else ():
            value = found.get("value") if isinstance(found, Mapping) else None
            self._point(f"{name}/{metric}", self.done, value)

    def _log(self, event: Event, at_s: float) -> None:
        values = event.get("values")
        for name, value in values.items() if isinstance(values, Mapping) else ():
            self._point(f"log/{name}", self.done, value)
        for name, told in _items(event.get("texts")):
            if isinstance(told, str):
                self.texts.add(name, self.done, {"text": told if len(told) <= _LONGEST else f"{told[:_LONGEST]}…"})
        for name, image in _items(event.get("images")):
            if (found := _image(image)) is not None:
                self.images.add(name, self.done, found)

    def _checkpoint(self, event: Event, at_s: float) -> None:
        seconds = _number(event.get("seconds")) or 0.0
        self.seconds["checkpoint"] += seconds
        self.counts["checkpoint"] += 1
        self.spans["checkpoint"].add(max(0.0, at_s - seconds), at_s)
        self.checkpoint = {key: event.get(key) for key in ("path", "total_steps", "nbytes", "seconds")}

    def _recovery(self, event: Event, at_s: float) -> None:
        seconds = _number(event.get("seconds")) or 0.0
        self._spend("recovery", seconds)
        self.state, self.error = "open", None  # rank 0 may have told its exception before it was replaced
        ranks = [rank for rank in _list(event.get("ranks")) if _whole(rank) is not None]
        self.counts["replaced"] += len(ranks)
        self._change({"kind": "recovery", "ranks": ranks, "call": event.get("call")}, event, at_s, seconds)

    def _resize(self, event: Event, at_s: float) -> None:
        seconds = _number(event.get("seconds")) or 0.0
        self._spend("resize", seconds)
        self.world_size = _whole(event.get("ranks")) or self.world_size
        self._note_ranks(at_s)
        self._change({"kind": "resize", "before": event.get("before"), "ranks": self.world_size}, event, at_s, seconds)

    def _change(self, told: dict[str, Any], event: Event, at_s: float, seconds: float) -> None:
        self.rank_times.break_off()
        if len(self.recoveries) < _MOST_RECOVERIES:
            step = _whole(event.get("total_steps"))
            self.recoveries.append({**told, "step": step, "at_s": round(at_s, 3), "seconds": round(seconds, 4)})

    def _spend(self, what: str, seconds: float) -> None:
        self.seconds[what] += seconds
        self.counts[what] += 1
        self.between_s += seconds

    def _pipeline(self, event: Event, at_s: float) -> None:
        self.pipeline = {key: value for key, value in event.items() if key not in ("time", "event")}

    def _warning(self, event: Event, at_s: float) -> None:
        message = str(event.get("message", ""))[:_LONGEST]
        if message in self.warnings:
            self.warnings[message]["count"] += 1
        elif len(self.warnings) < _MOST_WARNINGS:
            self.warnings[message] = {"message": message, "count": 1, "step": self.done, "time": event["time"]}
        else:
            self.other_warnings += 1

    def _failure(self, event: Event, at_s: float) -> None:
        kind, message = str(event.get("type") or ""), str(event.get("message") or "")
        self.state = "stopped" if kind in ("SIGTERM", "KeyboardInterrupt") else "failed"
        self.error = ": ".join(each for each in (kind, message) if each)[:_LONGEST]

    def _over(self, event: Event, at_s: float) -> None:
        self.state = "finished"

    def _end(self, event: Event, at_s: float) -> None:
        self.state = "finished"
        digest = event.get("digest")
        self.digest = digest if isinstance(digest, str) else None

    def _point(self, name: str, step: int, value: Any) -> None:
        number = _number(value)
        if number is None:
            return
        curve = self.curves.get(name)
        if curve is None:
            if len(self.curves) >= _MOST_CURVES:
                if len(self.left_out) < _MOST_CURVES:
                    self.left_out.add(name)
                return
            curve = self.curves[name] = Curve()
        curve.add(step, number)

    def document(self) -> Document:
        active_s = self._at(self.last) if self.last is not None else 0.0
        times = self.times
        has_times = times.count > 0
        return {
            "format": FORMAT,
            "state": self.state,
            "error": self.error,
            "facts": self.facts,
            "starts": self.starts,
            "epoch": self.epoch,
            "totals": {
                "events": self.events,
                "first_time": self.first,
                "last_time": self.last,
                "active_s": round(active_s, 3),
                "starts": self.num_starts,
                "steps_done": self.done,
                "steps_timed": times.count,
                "samples": self.samples,
                "repeated": self.repeated,
                "replaced": self.counts["replaced"],
                "recoveries": self.counts["recovery"],
                "resizes": self.counts["resize"],
                "evaluations": self.counts["evaluation"],
                "checkpoints": self.counts["checkpoint"],
                "long_steps": self.counts["long step"],
                "digest": self.digest,
            },
            "seconds": {
                "step": round(times.total_s, 3),
                **{key: round(self.seconds[key], 3) for key in ("evaluation", "recovery", "resize", "checkpoint")},
            },
            "step_s": {
                "median": times.quantile(0.5) if has_times else None,
                "p95": times.quantile(0.95) if has_times else None,
                "longest": list(self.longest) if has_times else None,
            },
            "curves": {name: curve.document() for name, curve in self.curves.items()},
            "curves_left_out": sorted(self.left_out),
            "spans": {name: spans.document() for name, spans in self.spans.items()},
            "changes": self.recoveries,
            "ranks": self.ranks,
            "waits": self.rank_times.waits(),
            "times": self.rank_times.document(),
            "tables": self.tables,
            "texts": self.texts.document(),
            "images": self.images.document(),
            "samples_left_out": sorted(self.texts.left_out | self.images.left_out),
            "pipeline": self.pipeline,
            "checkpoint": self.checkpoint,
            "warnings": [*self.warnings.values()],
            "other_warnings": self.other_warnings,
        }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> float | None:
    """Return a number of an event, also one whose JSON is the text "nan", "inf" or "-inf"; None for anything else."""
    if _is_number(value):
        try:
            return float(value)
        except OverflowError:
            return None
    return float(value) if value in ("nan", "inf", "-inf") else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else None


def _image(value: Any) -> dict[str, Any] | None:
    """Return what an event says of an image; None if that is no image."""
    if not isinstance(value, Mapping) or not isinstance(value.get("path"), str):
        return None
    sizes = {key: _whole(value.get(key)) for key in ("width", "height")}
    texts = {key: told[:_LONGEST] for key in ("caption", "thumbnail") if isinstance(told := value.get(key), str)}
    return {"path": value["path"][:_LONGEST], **sizes, **texts} if all(sizes.values()) else None


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    return value.items() if isinstance(value, Mapping) else ()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
