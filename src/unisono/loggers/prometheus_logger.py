"""`PrometheusLogger`: the latest numbers of a run as a file that Prometheus' node exporter reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from unisono.loggers.logger import Logger
from unisono.loggers.prometheus_text import LatestNumbers
from unisono.loggers.rows import Row
from unisono.watch.event_kinds import Event

__all__ = ["PrometheusLogger"]


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
        self._given = run
        self._latest = LatestNumbers(run or self.path.stem)

    def begin(self, facts: Event) -> None:
        """See `Logger`."""
        directory = facts.get("directory")
        self._latest.run = self._given or (Path(directory).name if directory else self.path.stem)
        self._latest.ranks, self._latest.values = facts.get("world_size"), {}

    def write(self, rows: Sequence[Row]) -> None:
        """See `Logger`."""
        for row in rows:
            self._latest.add(row)
        self._save(state=0)

    def finish(self, *, failed: bool) -> None:
        """See `Logger`."""
        if self._latest.values:
            self._save(state=2 if failed else 1)

    def _save(self, *, state: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The collector reads names that end in .prom alone, so never this one.
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        beside.write_text(self._latest.text(state=state), encoding="utf-8")
        beside.replace(self.path)
