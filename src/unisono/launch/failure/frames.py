"""Stack frames as plain data, from tracebacks and from text that Python printed, and the library of each.

A frame is the user's own unless its file belongs to Python, to an installed package or to unisono. Reports show own
frames with their source and fold the others. Pure except for `linecache`, which reads source files.
"""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

__all__ = ["FrameRecord", "frame_at", "frames_in", "frames_of", "is_hidden", "is_own", "library_of", "short_path"]

FrameRecord = dict[str, Any]
"""Data for JSON: file, line, function, source (the line, stripped), library ("" for the user's own code), and `span`,
the columns [start, end) in `source` that Python marks, if it marks less than the whole line."""

_MOST_SOURCE = 240
_INTERACTIVE = ("<stdin>", "<console>", "<input>", "<ipython-", "<python-input")
_STANDARD = tuple({f"{os.path.dirname(os.__file__)}/", f"{sysconfig.get_path('stdlib')}/"})  # noqa: PTH120
_UNISONO = f"{Path(__file__).parents[2]}/"
_LAUNCHER = f"{Path(__file__).parents[1]}/"
# The header of a frame in a traceback and in the output of the fault handler.
_HEADER = re.compile(r'^\s*File "(?P<file>.+?)", line (?P<line>\d+|\?\?\?)(?:,? in (?P<function>.+))?$')


def library_of(file: str) -> str:
    """Return the library that a source file belongs to; "" for the user's own code.

    >>> library_of("/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py"), library_of("<frozen runpy>")
    ('torch', 'python')
    >>> library_of("/home/me/train.py"), library_of("<ipython-input-3-1f5c>")
    ('', '')
    """
    if file.startswith("<"):
        return "" if file.startswith(_INTERACTIVE) else "python" if file.startswith("<frozen") else "generated code"
    for packages in ("/site-packages/", "/dist-packages/"):
        if packages in file:
            return file.rpartition(packages)[2].partition("/")[0].removesuffix(".py")
    if file.startswith(_UNISONO):
        return "unisono"
    return "python" if file.startswith(_STANDARD) else ""


def is_own(frame: Mapping[str, Any]) -> bool:
    """Return True if a frame is the user's code."""
    return not frame["library"]


def is_hidden(file: str) -> bool:
    """Return True if frames of a file are never shown: those of the import system and of the launcher."""
    return file.startswith(("<frozen importlib", "<frozen runpy", _LAUNCHER))


def frame_at(file: str, line: int, function: str, *, source: str | None = None) -> FrameRecord:
    """Return the frame of a place in the code. The source line is read if it is not given."""
    text = linecache.getline(file, line) if source is None else source
    return {
        "file": file,
        "line": line,
        "function": function,
        "source": text.strip()[:_MOST_SOURCE],
        "library": library_of(file),
    }


def frames_of(trace: TracebackType | None, *, most: int = 40) -> list[FrameRecord]:
    """Return the frames of a traceback, outermost first, without those of the import system and of the launcher.

    Of more than `most` frames, as after endless recursion, the middle is left out.
    """
    places = [place for place in _places(trace) if not is_hidden(place[0].co_filename)]
    if len(places) > most:
        places = places[: most // 2] + places[-(most - most // 2) :]
    return [_frame(code, line, instruction) for code, line, instruction in places]


def frames_in(text: str) -> list[FrameRecord]:
    """Return the frames in text that Python printed, in the order of the text.

    >>> frames_in('  File "/home/me/a.py", line 3, in f\\n    g(x)\\n')[0]["source"]
    'g(x)'
    """
    frames = []
    lines = text.splitlines()
    for header, following in zip(lines, [*lines[1:], ""], strict=False):
        found = _HEADER.match(header)
        if found is None or is_hidden(found["file"]):
            continue
        indented = len(following) - len(following.lstrip()) > len(header) - len(header.lstrip())
        source = following if indented and not _HEADER.match(following) else None
        line = int(found["line"]) if found["line"].isdigit() else 0
        frames.append(frame_at(found["file"], line, found["function"] or "", source=source))
    return frames


def short_path(file: str, *, folder: str) -> str:
    """Shorten the path of a source file: relative to the folder if it is in there, or from its package on.

    >>> short_path("/home/me/job/train.py", folder="/home/me/job")
    'train.py'
    >>> short_path("/venv/lib/python3.11/site-packages/torch/nn/functional.py", folder="/home/me/job")
    'torch/nn/functional.py'
    """
    for packages in ("/site-packages/", "/dist-packages/"):
        if packages in file:
            return file.rpartition(packages)[2]
    for standard in _STANDARD:
        if file.startswith(standard):
            return file.removeprefix(standard)
    if file.startswith(_UNISONO):
        return f"unisono/{file.removeprefix(_UNISONO)}"
    return file.removeprefix(f"{folder.rstrip('/')}/")


def _places(trace: TracebackType | None) -> Iterator[tuple[CodeType, int, int]]:
    while trace is not None:
        yield trace.tb_frame.f_code, trace.tb_lineno or 0, trace.tb_lasti
        trace = trace.tb_next


def _frame(code: CodeType, line: int, instruction: int) -> FrameRecord:
    frame = frame_at(code.co_filename, line, code.co_name)
    span = _span(code, line, instruction)
    if span is not None and span != (0, len(frame["source"])):
        frame["span"] = list(span)
    return frame


def _span(code: CodeType, line: int, instruction: int) -> tuple[int, int] | None:
    """Return the evaluated expression's columns in the stripped source line; None if unknown, as before Python 3.11."""
    if not hasattr(code, "co_positions") or instruction < 0:
        return None
    positions: Sequence[int | None] | None = next(islice(code.co_positions(), instruction // 2, None), None)
    if positions is None:
        return None
    first, last, start, end = positions
    if first != line or last != line or start is None or end is None:
        return None
    source = linecache.getline(code.co_filename, line).rstrip()
    # Columns count bytes of UTF-8.
    encoded = source.encode()
    left = len(source) - len(source.lstrip())
    columns = len(encoded[:start].decode(errors="replace")) - left, len(encoded[:end].decode(errors="replace")) - left
    return columns if 0 <= columns[0] < columns[1] <= min(len(source) - left, _MOST_SOURCE) else None
