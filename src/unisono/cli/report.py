"""`unisono report`: a page that shows a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from unisono.errors import ReportError
from unisono.report.output import write_lines, write_page
from unisono.report.page import read_report, render_page
from unisono.report.source import events_of, open_run
from unisono.report.summary import Document
from unisono.report.thumbnails import read_thumbnails
from unisono.report.trace import trace_of
from unisono.report.verdict import sentence, state_word
from unisono.watch import read_events
from unisono.watch.figures import format_bytes

__all__ = ["report"]


@click.command(short_help="Make a page that shows a run.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The page; - for standard output. Default: RUN/report.html",
)
@click.option("--json", "as_json", is_flag=True, help="Print what the page shows as JSON, and write no page.")
@click.option(
    "--trace", type=click.Path(path_type=Path), help="Write the run's times for ui.perfetto.dev instead of a page."
)
def report(run: Path, output: Path | None, as_json: bool, trace: Path | None) -> int:
    """Make a page that shows a run: what became of it, its curves, its ranks, and where the time went.

    RUN is the directory of a Trainer, also while it trains. The page is one file that needs no network. With --json,
    RUN may also be a page, whose data is printed.

    \b
    unisono report runs/digits
    unisono report runs/digits -o digits.html
    unisono report --json digits.html
    unisono report runs/digits --trace trace.json
    """
    if trace is not None:
        if as_json or output is not None:
            raise click.UsageError("--trace writes a trace and no page: give it without --json and --output")
        if is_page(run):
            raise ReportError(f"{run} is a page, which has no single steps: give the directory of the run")
        write_lines(trace, trace_of(read_events(events_of(run))))
        click.echo(f"{trace} ({format_bytes(trace.stat().st_size)}); open it at https://ui.perfetto.dev")
        return 0
    if as_json:
        if output is not None:
            raise click.UsageError("--json prints to standard output, and --output is for a page: give one of them")
        document = read_report(run) if is_page(run) else open_run(run)
        click.echo(json.dumps(document, indent=1))
        return 0
    if is_page(run):
        raise ReportError(f"{run} is a page: open it in a browser, or print its data with --json")
    document = open_run(run)
    if output is None:
        output = (run if run.is_dir() else run.parent) / "report.html"
    page = render_page(document, read_thumbnails(document, events_of(run).parent))
    if str(output) == "-":
        click.echo(page, nl=False)
        return 0
    write_page(output, page)
    _tell(document, output, len(page.encode()))
    return 0


def is_page(path: Path) -> bool:
    """Return True if a path is meant as a page, and not as a run."""
    return path.suffix.lower() in (".html", ".htm") and not path.is_dir()


def _tell(document: Document, output: Path, nbytes: int) -> None:
    verdict = f"{state_word(document)}: {sentence(document)}"
    click.echo(f"{verdict}\n{output} ({format_bytes(nbytes)})", file=sys.stdout)
