"""`PrometheusLogger`: the latest numbers of a run as a file that Prometheus' node exporter reads."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from unisono.loggers.logger import Logger
from unisono.loggers.rows import Row
from unisono.watch.event_kinds import Event

__all__ = ["PrometheusLogger"]

_STATES = "0: the run goes on. 1: its process has ended. 2: it has ended by an exception or SIGTERM."


class PrometheusLogger(Logger):
    """Keeps the latest numbers of a run in a text file, for the textfile collector of Prometheus' node exporter.

    The file is replaced as a whole, at most twice a second, and stays when the run has ended.

    Args:
        path: The file, whose name must end in ".prom" for the collector. Missing folders are created.
        run: The value of the label "run". None: the name of the run's directory, or of the file if it has none.

    Raises:
        TypeError: path is not a path.
    """

    def __init__(self, path: str | os.PathLike[str], *, run: str | None = None) -> None:
        super().__init__()
        self.path = Path(path)
        self._given, self._run = run, run or self.path.stem
        self._step_done = self._epoch = 0
        self._time = 0.0
        self._ranks: int | None = None
        self._values: dict[str, float] = {}

    def begin(self, facts: Event) -> None:
        """See `Logger`."""
        directory = facts.get("directory")
        self._run = self._given or (Path(directory).name if directory else self.path.stem)
        self._ranks, self._values = facts.get("world_size"), {}

    def write(self, rows: Sequence[Row]) -> None:
        """See `Logger`."""
        for row in rows:
            self._step_done, self._epoch, self._time = row.step, row.epoch, row.time
            self._values.update(row.values)
        self._save(state=0)

    def finish(self, *, failed: bool) -> None:
        """See `Logger`."""
        if self._values:
            self._save(state=2 if failed else 1)

    def _save(self, *, state: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The collector reads names that end in .prom alone, so never this one.
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        beside.write_text("".join(f"{line}\n" for line in self._lines(state)), encoding="utf-8")
        beside.replace(self.path)

    def _lines(self, state: int) -> Iterator[str]:
        run = f'run="{_escaped(self._run)}"'
        yield from _metric(
            "unisono_state", "0: the run goes on. 1: it has ended. 2: it has failed.", f"{{{run}}}", state
        )
        yield from _metric("unisono_steps", "Steps of the run that are done.", f"{{{run}}}", self._step_done)
        yield from _metric("unisono_epoch", "The epoch, from 0.", f"{{{run}}}", self._epoch)
        if self._ranks is not None:
            yield from _metric("unisono_start_ranks", "Ranks at the start of the process.", f"{{{run}}}", self._ranks)
        yield from _metric("unisono_step_timestamp_seconds", "When the latest numbers came.", f"{{{run}}}", self._time)
        yield "# HELP unisono_value The latest value of a number of the run, by its name."
        yield "# TYPE unisono_value gauge"
        for name, value in self._values.items():
            yield f'unisono_value{{{run},name="{_escaped(name)}"}} {_number(value)}'


def _metric(name: str, told: str, labels: str, value: float) -> Iterator[str]:
    yield f"# HELP {name} {told}"
    yield f"# TYPE {name} gauge"
    yield f"{name}{labels} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "+Inf" if number > 0 else "-Inf"
    return repr(number)
