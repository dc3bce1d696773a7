"""Writing a page or a trace: as a whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from unisono.errors import ReportError

__all__ = ["write_lines", "write_page"]


def write_page(path: Path, page: str) -> None:
    """Write a page, in the place of an older one.

    A reader sees the older page or the new one, never a part. What is no regular file, such as a pipe, is written to.

    Raises:
        ReportError: It cannot be written; an older page is as it was.
    """
    write_lines(path, [page])


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write texts one after the other in the same way; the whole need not be in memory.

    Raises:
        ReportError: It cannot be written; an older file is as it was.
    """
    content = (line.encode() for line in lines)
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                file.writelines(content)
            return
        _replace(path.resolve(), content)
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror}; give another place with -o") from error


def _replace(path: Path, content: Iterable[bytes]) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:50]}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(content)
        mask = os.umask(0)
        os.umask(mask)
        Path(name).chmod(0o666 & ~mask)  # mkstemp's files are for their owner alone
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
