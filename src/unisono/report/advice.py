"""Warnings about a run, with their remedies. Pure functions of the report's document; see `advise`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from unisono.report.summary import Document
from unisono.report.verdict import format_span
from unisono.text import clip, name_ranks
from unisono.watch.figures import format_bytes, format_count, format_rate, plural

__all__ = ["Advice", "advise"]

_WAIT_PART = 0.15
"""The part of its time that a rank may wait, more than another one does, before that is worth a sentence."""
_SLOWER = 1.5
_GROWN = 1.5


class Advice(NamedTuple):
    """Something to know about the run, and what to do."""

    what: str
    remedy: str


def advise(document: Document) -> list[Advice]:
    """Return what the user should know of the run, and what to do, most urgent first."""
    rules = (_end, _not_finite, _repeated, _waits, _long_steps, _speed, _memory, _pipeline, _log, _warnings)
    return [advice for rule in rules for advice in rule(document)]


def _end(document: Document) -> Iterator[Advice]:
    if document["state"] not in ("failed", "stopped"):
        return
    what = document["error"] or "The run has no end: it failed, was killed, or its loop was left. See its output."
    done, checkpoint = document["totals"]["steps_done"], document["checkpoint"]
    saved = checkpoint.get("total_steps") if checkpoint else None
    if not isinstance(saved, int):
        yield Advice(what, "It has no checkpoint: starting the same command again begins anew.")
        return
    loss = f"and repeats {plural(done - saved, 'step')}" if done > saved else "and loses nothing"
    yield Advice(what, f"Start the same command again: it continues from step {format_count(saved)}, {loss}.")


def _not_finite(document: Document) -> Iterator[Advice]:
    for name, curve in document["curves"].items():
        if not curve["bad"]:
            continue
        times = plural(curve["bad"], "time")
        what = f"{clip(name, 60)} was not finite {times}, first at step {format_count(curve['first_bad'])}."
        if name.startswith("grad_norm"):
            yield Advice(what, 'With autocast="fp16" such steps are skipped now and then; otherwise lower lr.')
        else:
            yield Advice(what, "Look at the samples of that step; lower the learning rate or clip the gradient.")


def _repeated(document: Document) -> Iterator[Advice]:
    if repeated := document["totals"]["repeated"]:
        what = f"{plural(repeated, 'step')} had to be computed again after a stop."
        yield Advice(what, "Save more often with checkpoints=Checkpoints(every_steps=...); see docs/checkpoints.md.")


def _waits(document: Document) -> Iterator[Advice]:
    """Advise on ranks that wait for a slower one."""
    size = len(document["waits"][-1][2]) if document["waits"] else 0
    same = [(end - start, parts) for start, end, parts in document["waits"] if len(parts) == size]
    whole_s = sum(seconds for seconds, _ in same)
    if size < 2 or not whole_s:
        return
    mean = [sum(seconds * parts[rank] for seconds, parts in same) / whole_s for rank in range(size)]
    least, most = min(mean), max(mean)
    if most - least < _WAIT_PART:
        return
    slow = name_ranks(rank for rank in range(size) if mean[rank] - least < _WAIT_PART / 3)
    what = f"Ranks wait for {slow}: up to {most:.0%} of their time, while {slow} waited {least:.0%}."
    virtual = document["facts"].get("virtual_ranks")
    if isinstance(virtual, int) and virtual % size:
        yield Advice(what, f"{size} ranks do not divide {virtual} virtual ranks evenly: use a number that does.")
    else:
        yield Advice(what, _why_slow(document, mean))


def _why_slow(document: Document, waits: Sequence[float]) -> str:
    """Return what takes the rank that waits the least longer than the others, as far as that is known."""
    times = document["times"] or {"ranks": {}}
    slow = min(range(len(waits)), key=lambda rank: waits[rank])
    longer: dict[str, tuple[float, float]] = {}
    for name in ("data", "compute"):
        of_ranks = times["ranks"].get(name, ())
        if len(of_ranks) == len(waits):
            per_step = [each / times["steps_of_ranks"] for each in of_ranks]
            longer[name] = per_step[slow], _median([*per_step[:slow], *per_step[slow + 1 :]])
    if not longer:
        return "See what else runs on its cores, and whether its samples take longer to read."
    name, (own_s, other_s) = max(longer.items(), key=lambda each: each[1][0] - each[1][1])
    told = f"take {format_span(own_s)} of a step on rank {slow}, and {format_span(other_s)} on others"
    if name == "data":
        return f"Batches {told}: see what its disk and its workers do."
    return f"Forward and backward {told}: see what else runs on its cores, and whether its samples are longer."


def _long_steps(document: Document) -> Iterator[Advice]:
    if count := document["totals"]["long_steps"]:
        seconds, step = document["step_s"]["longest"]
        what = f"{plural(count, 'step')} took far longer than others, up to {format_span(seconds)}"
        yield Advice(f"{what} (step {format_count(step)}).", "`unisono stacks` shows where ranks are, meanwhile.")


def _speed(document: Document) -> Iterator[Advice]:
    curve = document["curves"].get("samples/s")
    if curve is None or len(curve["mean"]) < 40:
        return
    quarter = len(curve["mean"]) // 4
    early, late = _median(curve["mean"][quarter // 4 : quarter]), _median(curve["mean"][-quarter:])
    if late and early / late > _SLOWER:
        what = f"The run has become slower: {format_rate(early)} samples/s at first, {format_rate(late)} at last."
        yield Advice(what, "See whether something else runs there, or something grows: a list, a cache, a graph.")


def _memory(document: Document) -> Iterator[Advice]:
    curve = document["curves"].get("memory")
    if curve is None or len(curve["mean"]) < 20:
        return
    early, late = (int(curve["mean"][place]) for place in (len(curve["mean"]) // 4, -1))
    if late > _GROWN * early:
        what = f"Memory of rank 0 has grown from {format_bytes(early)} to {format_bytes(late)}."
        yield Advice(what, "Keep numbers instead of tensors in lists: a loss that is kept keeps its graph.")


def _pipeline(document: Document) -> Iterator[Advice]:
    found = document["pipeline"] or {}
    waiting, advised = found.get("waiting"), found.get("advised_micro_batches")
    if isinstance(waiting, int | float) and isinstance(advised, int):
        what = f"Ranks of the pipeline wait for {waiting:.0%} of a step."
        yield Advice(what, f"With {advised} micro-batches they would wait for less than a tenth; see docs/pipeline.md.")


def _log(document: Document) -> Iterator[Advice]:
    if not document["facts"]:
        yield Advice("The log has no start of a run.", "It seems to be cut off: parts of this page are missing.")


def _warnings(document: Document) -> Iterator[Advice]:
    for warning in document["warnings"]:
        times = f" ({warning['count']} times)" if warning["count"] > 1 else ""
        yield Advice(f"{warning['message']}{times}", f"A warning at step {format_count(warning['step'])}.")
    if document["other_warnings"]:
        yield Advice(f"{plural(document['other_warnings'], 'further warning')}.", "They are in events.jsonl.")


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else math.nan
