"""A report as one HTML file that needs nothing else: no network, and no JavaScript for what it says.

The page is made from the document of a run (`summary`), which it holds as JSON, and from its images. Start
reading at `render_page`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path
from typing import Any

from unisono.errors import ReportError
from unisono.report.advice import advise
from unisono.report.chart import Line, render_chart
from unisono.report.markup import embedded_json, text
from unisono.report.samples_page import render_images, render_texts
from unisono.report.scales import format_tick
from unisono.report.summary import FORMAT, Document
from unisono.report.timeline import render_timeline
from unisono.report.verdict import figures, format_span, parts_of_time, sentence, state_word
from unisono.watch.figures import format_bytes, format_count, format_value, plural

__all__ = ["chart_title", "format_last", "html_page", "in_order", "is_noisy", "read_report", "render_page"]

_TITLES = {
    "loss": "Training loss",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "samples/s": "Throughput",
    "memory": "Memory of rank 0",
}
_NOTES = {"grad_norm": "before clipping", "samples/s": "samples per second", "memory": "bytes"}
_EMBEDDED = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
_SHOWN_HOTTEST = 5
_SHOWN_RANKS = 16
_SHOWN = 300
"""Characters of an argument or setting."""


def render_page(document: Document, thumbnails: Mapping[str, str] | None = None) -> str:
    """Return the page of a run. Pure.

    Args:
        document: What `summary.summarise` returns, with its title.
        thumbnails: The images of the run, as data: URLs by path (`thumbnails.read_thumbnails`). None: it shows none.
    """
    sections = [
        _head(document),
        _advice(document),
        _curves(document),
        _section("Images", render_images(document, thumbnails or {})),
        _section("Texts", render_texts(document)),
        _section("Timeline", render_timeline(document)),
        _section("Where the time went", _time(document)),
        _section("Embedding tables", _tables(document)),
        _section("The run", _facts(document)),
    ]
    title = f"{document['title']} - unisono report"
    return html_page(title, "".join(sections), document)


def html_page(title: str, body: str, data: Mapping[str, Any]) -> str:
    """Return a whole page, with its styles, its script and its data."""
    own = files("unisono.report")
    style, script = ((own / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    # Nothing is loaded, and a browser lets nothing be loaded, whatever stands in the page.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        f'content="light dark"><link rel="icon" href="data:,"><title>{text(title)}</title>\n'
        f"<style>\n{style}</style></head>\n"
        f"<body><main>{body}</main>\n"
        f'<script type="application/json" id="data">{embedded_json(data)}</script>\n'
        f"<script>\n{script}</script></body></html>\n"
    )


def read_report(path: Path) -> Document:
    """Return the document in a page; the page's script is not run.

    Raises:
        ReportError: The file cannot be read, or is no report.
    """
    try:
        page = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}") from error
    found = _EMBEDDED.findall(page)
    try:
        document = json.loads(found[-1]) if found else None
    except ValueError as error:
        raise ReportError(f"{path} is damaged: its data is not JSON ({error})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ReportError(f"{path} is no page of `unisono report`, or one of another version")
    return document


def in_order(names: Iterable[str]) -> list[str]:
    """Return the names of curves as they are shown: losses, evaluations, the usual ones, the user's own."""

    def place(name: str) -> tuple[int, str]:
        base = name.partition(" of ")[0]
        usual = {"loss": 0, "lr": 2, "grad_norm": 3, "samples/s": 4, "memory": 7}
        own = {"train": 5, "log": 6}.get(name.partition("/")[0], 1)
        return usual.get(base, own), name

    return sorted(names, key=place)


def chart_title(name: str) -> tuple[str, str]:
    """Return the heading of a chart and the remark beside it.

    >>> chart_title("loss of judge"), chart_title("test/accuracy"), chart_title("grad_norm")
    (('Training loss of judge', ''), ('test/accuracy', ''), ('Gradient norm', 'before clipping'))
    """
    base, of, optimizer = name.partition(" of ")
    if base in _TITLES:
        return f"{_TITLES[base]}{of}{optimizer}", _NOTES.get(base, "")
    return name.removeprefix("train/").removeprefix("log/"), {"train": "per step", "log": "logged"}.get(
        name.partition("/")[0], ""
    )


def is_noisy(name: str) -> bool:
    """Return True if a curve is one that people smooth."""
    return name.partition(" of ")[0] not in ("lr", "memory")


def format_last(name: str, value: float) -> str:
    """Return the latest value of a curve."""
    if name == "memory":
        return format_bytes(int(value))
    return format_tick(value) if name.partition(" of ")[0] in ("lr", "samples/s") else format_value(value)


def _section(heading: str, content: str) -> str:
    return f"<section><h2>{heading}</h2>{content}</section>" if content else ""


def _head(document: Document) -> str:
    state = document["state"]
    made = _date(document.get("made"))
    tiles = "".join(
        f"<div><dt>{text(name)}</dt><dd>{text(value)}<small>{text(detail)}</small></dd></div>"
        for name, value, detail in figures(document)
    )
    digest = document["totals"]["digest"]
    identity = f'<p class="digest">Digest <code>{text(digest)}</code></p>' if digest else ""
    began = _date(document["totals"]["first_time"])
    stale = f'<p class="remark">As of {text(made)}. Run the command again for a newer page.</p>'
    return (
        f'<header><p class="eyebrow"><span>unisono report</span><span>begun {text(began)}</span></p>'
        f"<h1>{text(document['title'])}</h1>"
        f'<p class="verdict"><b class="state {text(state)}">{state_word(document)}</b> {text(sentence(document))}</p>'
        f'<dl class="figures">{tiles}</dl>{identity}{stale if state == "running" else ""}</header>'
    )


def _advice(document: Document) -> str:
    found = advise(document)
    if not found:
        return ""
    items = "".join(f"<li><p>{text(what)}</p><p>{text(remedy)}</p></li>" for what, remedy in found)
    return f'<section class="advice"><h2>What to know</h2><ul>{items}</ul></section>'


def _curves(document: Document) -> str:
    curves = document["curves"]
    charts = []
    for name in in_order(curves):
        if curves[name]["x"]:
            title, note = chart_title(name)
            last = curves[name]["last"]
            lines = [Line("", curves[name])]
            smooth = is_noisy(name)
            charts.append(render_chart(title, lines, key=name, note=note, smooth=smooth, now=format_last(name, last)))
    if not charts:
        return _section("Curves", '<p class="remark">No step has been done yet.</p>')
    left_out = document["curves_left_out"]
    rest = f'<p class="remark">{plural(len(left_out), "further curve")} not shown.</p>' if left_out else ""
    controls = (
        '<div class="controls" hidden><label>Smoothing <input type="range" id="smoothing" min="0" max="0.99" '
        'step="0.01"></label><button id="reset" type="button" hidden>Show all steps</button>'
        '<span class="remark">Drag across a chart to zoom.</span></div>'
    )
    return f'<section><h2>Curves</h2>{controls}<div class="charts">{"".join(charts)}</div>{rest}</section>'


def _time(document: Document) -> str:
    parts = parts_of_time(document)
    whole_s = sum(seconds for _, seconds, _ in parts)
    if not whole_s:
        return ""
    bar = "".join(
        f'<i class="part {name.split()[0]}" style="width:{100 * seconds / whole_s:.3f}%"></i>'
        for name, seconds, _ in parts
    )
    rows = "".join(
        f'<tr><td><i class="swatch {name.split()[0]}"></i>{text(name)}</td><td>{format_span(seconds)}</td>'
        f"<td>{seconds / whole_s:.1%}</td><td>{text(told)}</td></tr>"
        for name, seconds, told in parts
    )
    times, totals = document["step_s"], document["totals"]
    lines = []
    if times["median"]:
        longest_s, step = times["longest"]
        lines.append(
            f"A step takes {format_span(times['median'])} (median), 5 % take longer than {format_span(times['p95'])}; "
            f"the longest was step {format_count(step)} with {format_span(longest_s)}."
        )
    if totals["checkpoints"]:
        lines.append(
            f"{plural(totals['checkpoints'], 'checkpoint')} took {format_span(document['seconds']['checkpoint'])}, "
            "in the background while steps went on."
        )
    below = "".join(f"<p>{text(line)}</p>" for line in lines)
    return (
        f'<div class="bar" aria-hidden="true">{bar}</div><table class="times">{rows}</table>{below}{_ranks(document)}'
    )


def _ranks(document: Document) -> str:
    """Return a bar for each rank, of what a step takes there, or for those that wait the least if there are many."""
    times = document["times"]
    if times is None or len(times["ranks"]["compute"]) < 2:
        return ""
    of_ranks, steps = times["ranks"], times["steps_of_ranks"]
    size = len(of_ranks["compute"])
    longest_s = max(sum(each[rank] for each in of_ranks.values()) for rank in range(size))
    whole_s = max(longest_s, times["seconds_of_ranks"])  # with the loop's own code
    shown = sorted(range(size), key=lambda rank: of_ranks.get("waiting", [0.0] * size)[rank])[:_SHOWN_RANKS]
    rows = []
    for rank in sorted(shown):
        parts = [(name, each[rank]) for name, each in of_ranks.items()]
        bar = "".join(
            f'<i class="part {"waits" if name == "waiting" else name}" style="width:{100 * each / whole_s:.3f}%" '
            f'title="{name} {format_span(each / steps)}"></i>'
            for name, each in parts
        )
        told = f"{of_ranks['waiting'][rank] / whole_s:.0%} waiting" if "waiting" in of_ranks else ""
        rows.append(
            f'<div class="row"><span class="label">rank {rank}</span><div class="bar">{bar}</div>'
            f"<span>{told}</span></div>"
        )
    of = f", the {len(shown)} of {size} that wait the least" if len(shown) < size else ""
    return f'<div class="ranks"><h3>A step on each rank{of}</h3>{"".join(rows)}</div>'


def _tables(document: Document) -> str:
    """Return a row for each embedding table, with what a step has looked up there last."""
    rows = []
    for name, each in document.get("tables", {}).items():
        hottest = ", ".join(f"{row} ({part:.1%})" for row, part in each["hottest"][:_SHOWN_HOTTEST])
        cells = [
            name,
            format_count(int(each["rows"])) if "rows" in each else "",
            f"{each['hit_rate']:.1%}" if "hit_rate" in each else "",
            format_count(int(each["ids"])) if "ids" in each else "",
            f"{each['distinct']:.0%}" if "distinct" in each else "",
            format_bytes(int(each["nbytes"])) if "nbytes" in each else "",
            hottest,
        ]
        rows.append("<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in cells) + "</tr>")
    if not rows:
        return ""
    heads = (
        "Table",
        "Rows in use",
        "Ids with a row",
        "Ids in a step",
        "Distinct",
        "Read in a step",
        "Most frequent ids",
    )
    head = "".join(f"<th>{each}</th>" for each in heads)
    note = '<p class="remark">Ids are those of one step on rank 0, the last one that was looked at.</p>'
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>{note}"


def _facts(document: Document) -> str:
    facts, totals = document["facts"], document["totals"]
    machine = _mapping(facts.get("machine"))
    checkpoint = document["checkpoint"]
    number = facts.get("parameters")
    rows: list[tuple[str, Any]] = [
        ("Command", " ".join(_quoted(facts.get("arguments"))) or None),
        ("Git commit", _commit(_mapping(facts.get("git")))),
        ("Parameters", format_count(number) if isinstance(number, int) else None),
        ("Seed", facts.get("seed")),
        ("Virtual ranks", facts.get("virtual_ranks")),
        ("Device", facts.get("device")),
        ("Threads per rank", facts.get("threads")),
        ("Directory", facts.get("directory")),
        ("Machine", ", ".join(str(each) for each in (machine.get("host"), machine.get("system")) if each) or None),
        ("Processor", _processor(machine)),
        ("GPU", machine.get("gpu")),
        ("Versions", _versions(facts)),
        ("Samples", format_count(totals["samples"]) if totals["samples"] else None),
        ("Last checkpoint", _checkpoint(checkpoint) if checkpoint else None),
        ("Events", f"{format_count(totals['events'])} in {document.get('source', '')}"),
    ]
    shown = _rows((name, value) for name, value in rows if value not in (None, ""))
    settings = _mapping(facts.get("settings"))
    heading = "Arguments of the Trainer" if "virtual_ranks" in facts else "Settings"
    folded = (
        f"<details><summary>{heading}</summary><table>{_rows(settings.items())}</table></details>" if settings else ""
    )
    starts = ""
    if totals["starts"] > 1:
        told = "".join(
            f"<tr><td>{text(_date(start['time']))}</td><td>from step {format_count(start['from_step'])}</td>"
            f"<td>{plural(start['world_size'], 'rank')}</td></tr>"
            for start in document["starts"]
        )
        starts = f"<details open><summary>{plural(totals['starts'], 'start')}</summary><table>{told}</table></details>"
    return f'<table class="facts">{shown}</table>{starts}{folded}'


def _rows(pairs: Iterable[tuple[Any, Any]]) -> str:
    return "".join(f"<tr><th>{text(name)}</th><td>{text(_short(value))}</td></tr>" for name, value in pairs)


def _short(value: Any) -> str:
    told = value if isinstance(value, str) else json.dumps(value) if isinstance(value, dict | list) else str(value)
    return told if len(told) <= _SHOWN else f"{told[:_SHOWN]}…"


def _quoted(arguments: Any) -> Sequence[str]:
    return [shlex.quote(str(each)) for each in arguments] if isinstance(arguments, list) else []


def _processor(machine: Mapping[str, Any]) -> str | None:
    told = [str(machine["processor"])] if machine.get("processor") else []
    if isinstance(machine.get("cores"), int):
        told.append(plural(machine["cores"], "core"))
    if isinstance(machine.get("memory"), int):
        told.append(format_bytes(machine["memory"]))
    return ", ".join(told) or None


def _commit(git: Mapping[str, Any]) -> str | None:
    commit = git.get("commit")
    if not commit:
        return None
    return f"{commit}, {git['branch']}" if git.get("branch") else f"{commit}, on no branch"


def _versions(facts: Mapping[str, Any]) -> str:
    machine = _mapping(facts.get("machine"))
    found = {"unisono": facts.get("version"), "torch": facts.get("torch"), "Python": machine.get("python")}
    return ", ".join(f"{name} {version}" for name, version in found.items() if version)


def _checkpoint(checkpoint: Mapping[str, Any]) -> str:
    nbytes = checkpoint.get("nbytes")
    size = f", {format_bytes(nbytes)}" if isinstance(nbytes, int) else ""
    return f"{checkpoint.get('path')}{size}"


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _date(time_s: Any) -> str:
    """Return a time in UTC, so that a page is the same wherever it is made."""
    try:
        return datetime.fromtimestamp(time_s, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    except (TypeError, ValueError, OverflowError, OSError):
        return "unknown"
