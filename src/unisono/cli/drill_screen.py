"""The output of `unisono drill`: a line that changes while one waits, the rows of the table, and the verdict."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from statistics import median

import click

from unisono.drill.fault_table import heading, table_row
from unisono.drill.injector import Resize, Strike
from unisono.drill.job_log import JobLog
from unisono.drill.run_drill import Outcome, RunFacts
from unisono.launch.output.streams import wants_colour
from unisono.text import clip
from unisono.watch.figures import format_elapsed, plural

__all__ = ["Screen"]

_REFRESH_S = 0.1
_REMEDY = (
    "What begins anew in the new process of a rank is the usual reason: plain variables of the script that its steps "
    "depend on. Give what holds them to Trainer as stateful={...}; see docs/recovery.md."
)
_WIDE = 120
"""Characters in a line where there is no terminal."""


class Screen:
    """The reporter of a drill (`drill.Reporter`): the table on standard output, progress on a terminal's error."""

    def __init__(self) -> None:
        self._is_live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._colour = wants_colour(os.environ, terminal=sys.stdout.isatty())
        self._width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDE
        self._shown_s = 0.0
        self._has_heading = False

    def begin(self, what: str) -> None:
        """Print what the drill does."""
        self._say(click.style("unisono drill", bold=True) + f": {what}")

    def running(self, name: str, log: JobLog, done: Sequence[Strike | Resize]) -> None:
        """Show how far a run has come."""
        now_s = time.monotonic()
        if not self._is_live or now_s < self._shown_s + _REFRESH_S:
            return
        self._shown_s = now_s
        of = "" if log.run_steps is None else f" of {log.run_steps}"
        at = f"step {log.latest}{of}" if log.latest else "starts"
        faults = [each.fault.kind for each in done if isinstance(each, Strike)]
        last = f", {plural(len(faults), 'fault')}, the last one {faults[-1]}" if faults else ""
        columns = shutil.get_terminal_size().columns
        sys.stderr.write("\r\x1b[K" + clip(f"{name}: {at}{last}", columns - 1))
        sys.stderr.flush()

    def ended(self, facts: RunFacts, remark: str) -> None:
        """Print that a run has ended."""
        words = f"{facts.name:<15} {plural(facts.steps, 'step')} in {format_elapsed(facts.seconds)}"
        self._say(f"{words}, {remark}" if remark else words)

    def struck(self, strike: Strike | Resize) -> None:
        """Print what became of a fault, or of a change of the number of ranks."""
        if not self._has_heading:
            self._has_heading = True
            self._say(click.style(heading(self._width), dim=True))
        self._say(table_row(strike, self._width))

    def verdict(self, outcome: Outcome) -> None:
        """Print whether the bits are equal, and how long the ranks have waited."""
        steps = plural(outcome.runs[-1].steps, "step")
        timed = [each for each in outcome.done if isinstance(each, Strike) and each.resumed_s is not None]
        times_s = [each.resumed_s for each in timed if each.fault.kind != "stop" and each.resumed_s is not None]
        scripts_s = [each.script_s for each in timed if each.fault.kind != "stop" and each.script_s is not None]
        self._say("")
        if times_s:
            but = " (of ranks that were not stopped)" if len(timed) > len(times_s) else ""
            script = f", of which the script takes {median(scripts_s):.2f} s" if scripts_s else ""
            self._say(f"median time from a fault to the next new step: {median(times_s):.2f} s{script}{but}")
        if outcome.differences:
            self._say(click.style("different bits", fg="red", bold=True) + ": the disturbed run is not the calm one")
            for each in outcome.differences:
                self._say(self._wrapped(f"- {each}", "  "))
            self._say(self._wrapped(_REMEDY))
        else:
            same = click.style("same bits", fg="green", bold=True)
            where = f"on {plural(outcome.ranks, 'rank')}"
            self._say(f"{same}: {steps} and the state at the end {where} are those of the calm runs")

    def failed(self, reason: str, report: str) -> None:
        """Print why the drill has failed, with what the run has printed."""
        if report:
            self._say(f"{report}\n")
        words = self._wrapped(f"failed: {reason}")
        self._say(click.style("failed", fg="red", bold=True) + words.removeprefix("failed"))

    def kept(self, folder: str) -> None:
        """Print where the runs are kept."""
        self._say(f"events and output of all runs are in {folder}")

    def clear(self) -> None:
        """Remove the line that changes."""
        if self._is_live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _wrapped(self, text: str, indent: str = "") -> str:
        return textwrap.fill(text, self._width, subsequent_indent=indent, break_on_hyphens=False)

    def _say(self, text: str) -> None:
        self.clear()
        click.echo(text, color=self._colour)
