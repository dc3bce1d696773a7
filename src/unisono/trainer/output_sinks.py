"""Where the outputs of a prediction go, chunk by chunk: to tensors in memory, or to a safetensors file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from unisono.errors import LossError
from unisono.state.rows_file import RowsFile
from unisono.state.safetensors_format import type_name
from unisono.trainer.outputs import Layout, Rows

__all__ = ["FileSink", "MemorySink", "OutputSink"]


class OutputSink(Protocol):
    """Receives the outputs, chunk by chunk."""

    def take(self, layout: Layout, rows: Rows) -> None:
        """Receive the outputs of the next samples."""

    def finish(self) -> None:
        """Complete the output."""

    def close(self) -> None:
        """Release open files; without an earlier `finish`, discard the output."""


class MemorySink:
    """Keeps outputs as tensors. With a known number of rows, memory is allocated once."""

    def __init__(self, rows: int | None) -> None:
        self._rows, self._done = rows, 0
        self._layout: Layout | None = None
        self._whole: Rows = {}
        self._chunks: list[Rows] = []

    def take(self, layout: Layout, rows: Rows) -> None:
        """See `OutputSink`."""
        self._layout = layout
        if self._rows is None:
            self._chunks.append(rows)
            return
        if not self._whole:
            self._whole = {column.name: column.empty(self._rows) for column in layout.columns}
        for name, tensor in rows.items():
            self._whole[name][self._done : self._done + len(tensor)] = tensor
        self._done += len(next(iter(rows.values())))

    def finish(self) -> None:
        """See `OutputSink`."""
        if self._layout is not None and self._rows is None:
            for column in self._layout.columns:
                self._whole[column.name] = torch.cat([chunk.pop(column.name) for chunk in self._chunks])

    def close(self) -> None:
        """See `OutputSink`."""

    def outputs(self) -> Any:
        """Return the outputs in the form in which the function returns them."""
        assert self._layout is not None, "a dataset has samples"
        return self._layout.rebuild(self._whole)


class FileSink:
    """Writes outputs to a safetensors file."""

    def __init__(self, path: Path, *, rows: int | None) -> None:
        self._path = path
        self._file = RowsFile(path, rows=rows)

    def take(self, layout: Layout, rows: Rows) -> None:
        """Write rows; see `OutputSink`.

        Raises:
            LossError: The file cannot hold a type or name.
        """
        for column in layout.columns:
            if type_name(column.dtype) is None:
                raise LossError(
                    f"{self._path} cannot hold outputs of type {column.dtype}: safetensors has none such. Return real "
                    'numbers (torch.view_as_real for complex ones), or use to="main".'
                )
            if column.name == "__metadata__" or not column.name.isprintable():
                raise LossError(f"{self._path} cannot hold outputs named {column.name!r}: use another name.")
        with self._explained():
            self._file.append(rows)

    def finish(self) -> None:
        """See `OutputSink`."""
        with self._explained():
            self._file.finish()

    def close(self) -> None:
        """See `OutputSink`."""
        self._file.discard()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self._path} cannot be written ({error.strerror}). Free space there, or give another path",
            ) from error
