"""`CSVLogger`: the numbers of a run as a table, one line for each step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from unisono.loggers.csv_table import CsvTable, put_aside
from unisono.loggers.logger import Logger
from unisono.loggers.rows import Row
from unisono.watch.event_kinds import Event

__all__ = ["CSVLogger"]


class CSVLogger(Logger):
    """Writes a CSV file with a line for each step, and a column for each name of a number.

    All numbers of one step are on its line: the loss, numbers that `trainer.log` got after it, an evaluation. A resumed
    run continues in the file, after removing the lines of steps that it repeats. A run that starts from the beginning
    does not add to the lines of another: an older file is renamed (metrics.csv becomes metrics.1.csv). Texts and images
    are left out.

    Args:
        path: The file. Missing folders are created.

    Raises:
        TypeError: path is not a path.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path)
        self._table: CsvTable | None = None
        self._resumed: int | None = None

    def begin(self, facts: Event) -> None:
        """See `Logger`."""
        self.finish(failed=False)
        self._resumed = None

    def resume(self, step: int) -> None:
        """See `Logger`."""
        self._resumed = step

    def write(self, rows: Sequence[Row]) -> None:
        """See `Logger`."""
        if self._table is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self._resumed is None:
                put_aside(self.path)
            self._table = CsvTable(self.path, last_step=self._resumed or 0)
        for row in rows:
            if row.values:
                self._table.add(row)
        self._table.flush()

    def finish(self, *, failed: bool) -> None:
        """See `Logger`."""
        if self._table is not None:
            self._table.close()
            self._table = None
