"""The page of a comparison: what differs, and the curves of all runs over each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.report.chart import Line, render_chart
from unisono.report.comparison_words import figures_of_runs, hint, is_equal, sentences
from unisono.report.markup import text
from unisono.report.page import chart_title, html_page, in_order, is_noisy
from unisono.report.summary import Document

__all__ = ["render_comparison"]

_SHOWN = 200


def render_comparison(comparison: Document) -> str:
    """Return the page of a comparison. Pure."""
    runs = comparison["runs"]
    title = f"{len(runs)} runs compared" if len(runs) > 2 else f"{runs[0]['title']} and {runs[1]['title']}"
    equal = all(map(is_equal, comparison["pairs"]))
    state = f'<b class="state {"finished" if equal else "stopped"}">{"Equal" if equal else "Different"}</b>'
    told = "".join(f"<p>{text(each)}</p>" for each in [*sentences(comparison), *filter(None, [hint(comparison)])])
    keys = "".join(f'<li class="line c{i % 6}"><i></i>{text(run["title"])}</li>' for i, run in enumerate(runs))
    names = [run["title"] for run in runs]
    settings = [(each["name"], [_shown(value) for value in each["values"]]) for each in comparison["settings"]]
    differing = _table(names, settings) if settings else '<p class="remark">No recorded setting differs.</p>'
    body = (
        f'<header><p class="eyebrow"><span>unisono compare</span></p><h1>{text(title)}</h1>'
        f'<p class="verdict">{state}</p>{told}</header>'
        f"<section><h2>What differs in the settings</h2>{differing}</section>"
        f"<section><h2>Results</h2>{_table(names, figures_of_runs(comparison))}</section>"
        f'<section><h2>Curves</h2>{_CONTROLS}<ul class="keys">{keys}</ul>{_charts(runs)}</section>'
    )
    return html_page(f"{title} - unisono compare", body, comparison)


_CONTROLS = (
    '<div class="controls" hidden><label>Smoothing <input type="range" id="smoothing" min="0" max="0.99" '
    'step="0.01"></label><button id="reset" type="button" hidden>Show all steps</button>'
    '<span class="remark">Drag across a chart to zoom.</span></div>'
)


def _charts(runs: Sequence[Document]) -> str:
    names = in_order({name: None for run in runs for name in run["curves"]})
    charts = []
    for name in names:
        lines = [
            Line(str(run["title"]), run["curves"][name], i)
            for i, run in enumerate(runs)
            if name in run["curves"] and run["curves"][name]["x"]
        ]
        if lines:
            title, note = chart_title(name)
            charts.append(render_chart(title, lines, key=name, note=note, smooth=is_noisy(name)))
    return f'<div class="charts">{"".join(charts)}</div>'


def _table(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    head = "<tr><th></th>" + "".join(f"<th>{text(name)}</th>" for name in names) + "</tr>"
    body = "".join(
        f"<tr><th>{text(name)}</th>{''.join(f'<td>{text(value)}</td>' for value in values)}</tr>"
        for name, values in rows
    )
    return f'<div class="wide"><table>{head}{body}</table></div>'


def _shown(value: Any) -> str:
    told = "" if value is None else str(value)
    return told if len(told) <= _SHOWN else f"{told[:_SHOWN]}…"
