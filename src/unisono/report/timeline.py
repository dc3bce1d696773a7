"""The timeline of a run: a row for each rank, and rows for evaluations and checkpoints. See `render_timeline`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from unisono.report.markup import text
from unisono.report.scales import Scale
from unisono.report.summary import Document
from unisono.report.verdict import format_span
from unisono.text import format_ranks
from unisono.watch.figures import format_count, plural

__all__ = ["render_timeline"]

_WIDTH = 1000
_MOST_RANKS = 64
_LEAST = 1.2
"""The least width of a mark, so that none is invisible."""


def render_timeline(document: Document) -> str:
    """Return the timeline, complete without JavaScript; empty if no time has passed."""
    whole_s = document["totals"]["active_s"]
    if not whole_s:
        return ""
    xs = Scale(0.0, whole_s, False)
    size = max((ranks for _, ranks in document["ranks"]), default=1)
    shown = min(size, _MOST_RANKS)
    rows = []
    for name, title in (("evaluation", "evaluations"), ("checkpoint", "checkpoints"), ("long step", "long steps")):
        if spans := document["spans"][name]:
            rows.append(_row(title, _spans(xs, spans, name), kind=f"marks {name.split()[0]}"))
    dense = " dense" if shown > 16 else ""
    for rank in range(shown):
        label = f"rank {rank}" if shown <= 16 or rank % 8 == 0 else ""
        rows.append(_row(label, _rank(document, xs, rank), kind=f"rank{dense}"))
    if size > shown:
        rows.append(f'<p class="remark">The first {shown} of {size} ranks.</p>')
    ticks = _time_ticks(whole_s)
    below = "".join(f'<span style="left:{100 * xs.at(x):.2f}%">{_clock(x, ticks)}</span>' for x in ticks)
    return (
        f'<div class="timeline">{"".join(rows)}<div class="row axis"><span class="label"></span>'
        f'<div class="x">{below}</div></div></div>{_legend(document)}{_changes(document)}'
    )


def _row(label: str, drawn: str, *, kind: str) -> str:
    return (
        f'<div class="row {kind}"><span class="label">{text(label)}</span>'
        f'<svg viewBox="0 0 {_WIDTH} 20" preserveAspectRatio="none" aria-hidden="true">{drawn}</svg></div>'
    )


def _spans(xs: Scale, spans: Sequence[Sequence[float]], name: str) -> str:
    return "".join(
        _box(xs, start, end, "mark", f"{plural(int(count), name)}, {format_span(seconds)}, at {_clock(start)}")
        for start, end, count, seconds in spans
    )


def _rank(document: Document, xs: Scale, rank: int) -> str:
    """Return the row of a rank: when it was there, how long it waited, and when it was replaced."""
    whole_s = document["totals"]["active_s"]
    changes = [*document["ranks"], [whole_s, 0]]
    parts = [_box(xs, start, end, "present") for (start, ranks), (end, _) in pairwise(changes) if rank < ranks]
    if waits := [(start, end, found[rank]) for start, end, found in document["waits"] if rank < len(found)]:
        parts.append(f'<path class="waiting" d="{_waits(xs, waits)}"/>')
    for change in document["changes"]:
        told = f"{change['kind']} at {_clock(change['at_s'])}, {format_span(change['seconds'])}"
        start = change["at_s"] - change["seconds"]
        if change["kind"] == "recovery":
            is_new = rank in change["ranks"]
            parts.append(_box(xs, start, change["at_s"], "replaced" if is_new else "paused", told))
    starts = document["starts"][1:]
    parts += [f'<path class="start" d="M{_WIDTH * xs.at(start["at_s"]):.5g} 0v20"/>' for start in starts]
    return "".join(parts)


def _waits(xs: Scale, waits: Iterable[tuple[float, float, float]]) -> str:
    return "".join(
        f"M{_WIDTH * xs.at(start):.5g} 20v-{20 * part:.3g}H{_WIDTH * xs.at(end):.5g}v{20 * part:.3g}z"
        for start, end, part in waits
    )


def _box(xs: Scale, start: float, end: float, kind: str, told: str = "") -> str:
    left, right = _WIDTH * xs.at(start), _WIDTH * xs.at(end)
    width = max(_LEAST, right - left)
    left = min(left, _WIDTH - width)
    title = f"<title>{text(told)}</title>" if told else ""
    return f'<rect class="{kind}" x="{left:.5g}" width="{width:.4g}" height="20">{title}</rect>'


def _legend(document: Document) -> str:
    entries = ['<span class="key present"></span> at work']
    if document["waits"]:
        entries.append('<span class="key waiting"></span> waiting for other ranks, as a part of the height')
    if any(change["kind"] == "recovery" for change in document["changes"]):
        entries.append('<span class="key replaced"></span> replaced')
    if len(document["starts"]) > 1:
        entries.append('<span class="key start"></span> started again; the time between is left out')
    return f'<p class="legend">{"".join(f"<span>{entry}</span>" for entry in entries)}</p>'


def _changes(document: Document) -> str:
    """Return the list of recoveries and changes of the number of ranks."""
    shown = document["changes"][:20]
    if not shown:
        return ""
    told = []
    for change in shown:
        if change["kind"] == "recovery":
            ranks = change["ranks"]
            what = f"rank{'s' * (len(ranks) > 1)} {format_ranks(ranks)} replaced"
            call = change["call"]
            what += f" in {call}" if isinstance(call, str) and call else ""
        else:
            what = f"{change['before']} → {plural(change['ranks'], 'rank')}"
        step = f" after step {format_count(change['step'])}" if change["step"] is not None else ""
        told.append(f"<li>{_clock(change['at_s'])}: {text(what)}{step}, {format_span(change['seconds'])}</li>")
    more = len(document["changes"]) - len(shown)
    rest = f"<li>and {more} more</li>" if more else ""
    return f'<ul class="changes">{"".join(told)}{rest}</ul>'


def _time_ticks(whole_s: float, most: int = 6) -> list[float]:
    """Return round times within the run.

    >>> _time_ticks(100.0), _time_ticks(0.5)
    ([0, 20, 40, 60, 80, 100], [0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    """
    units = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400]
    sizes: list[float] = [unit * 10.0**power for power in (-6, -5, -4, -3, -2, -1) for unit in (1, 2, 5)]
    sizes += units
    size = next((size for size in sizes if whole_s / size <= most), 86400.0 * (1 + whole_s // (most * 86400)))
    return [round(i * size, 9) for i in range(int(whole_s / size + 1e-9) + 1)]


def _clock(seconds: float, ticks: Sequence[float] = ()) -> str:
    """Return a time since the start, with as much detail as the others on the axis need.

    >>> _clock(75), _clock(7380), _clock(0.31), _clock(0.0, [0.0, 20.0]), _clock(90000.0)
    ('1:15', '2:03 h', '0.31 s', '0', '25:00 h')
    """
    if not seconds:
        return "0"
    fine = ticks[1] if len(ticks) > 1 else seconds
    if seconds < 60 and fine < 60:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02} h"
