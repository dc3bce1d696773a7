"""`TensorBoardLogger`: the numbers of a run as curves in TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from unisono.loggers.logger import Logger, import_library
from unisono.loggers.rows import Row
from unisono.watch.event_kinds import Event

__all__ = ["TensorBoardLogger"]


class TensorBoardLogger(Logger):
    """Writes event files of TensorBoard, with torch's SummaryWriter. Needs the package tensorboard.

    When a run is resumed, TensorBoard hides the steps that it repeats; when another run starts in the same folder, it
    hides those of the previous run. To compare runs, use a separate folder for each.

    Args:
        folder: The log directory.
        options: Further arguments of `torch.utils.tensorboard.SummaryWriter`, such as flush_secs.

    Raises:
        ModuleNotFoundError: tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], **options: Any) -> None:
        super().__init__()
        self._make = import_library(
            "torch.utils.tensorboard", package="tensorboard", logger="TensorBoardLogger"
        ).SummaryWriter
        self._folder, self._options = os.fspath(folder), options
        self._writer: Any = None
        self._first_step = 0

    def begin(self, facts: Event) -> None:
        """See `Logger`."""
        self.finish(failed=False)
        self._first_step = 0

    def resume(self, step: int) -> None:
        """See `Logger`."""
        self._first_step = step + 1

    def write(self, rows: Sequence[Row]) -> None:
        """See `Logger`."""
        if self._writer is None:
            self._writer = self._make(log_dir=self._folder, purge_step=self._first_step, **self._options)
        for row in rows:
            for name, value in row.values.items():
                self._writer.add_scalar(name, value, global_step=row.step, walltime=row.time)
        self._writer.flush()

    def finish(self, *, failed: bool) -> None:
        """See `Logger`."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
