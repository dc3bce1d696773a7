"""`TensorBoardLogger`: the numbers of a run as curves in TensorBoard, and its texts and images."""

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
        self._summary = import_library(
            "tensorboard.compat.proto.summary_pb2", package="tensorboard", logger="TensorBoardLogger"
        ).Summary
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
            for name, text in row.texts.items():
                self._writer.add_text(name, text, global_step=row.step, walltime=row.time)
            for name, image in row.images.items():
                # As the file is: add_image takes pixels, and PIL to make a file of them again.
                found = self._summary.Image(encoded_image_string=image.path.read_bytes())
                summary = self._summary(value=[self._summary.Value(tag=name, image=found)])
                self._writer.file_writer.add_summary(summary, row.step, row.time)
        self._writer.flush()

    def finish(self, *, failed: bool) -> None:
        """See `Logger`."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
