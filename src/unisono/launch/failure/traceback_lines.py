"""The lines of a report for the frames of an error: the user's own with their source. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from unisono.launch.failure.frames import FrameRecord, is_own, short_path

__all__ = ["frame_lines", "short_place"]

_MOST_FRAME_LINES = 16


def frame_lines(
    frames: Sequence[FrameRecord], folder: str, *, most: int = _MOST_FRAME_LINES, within: Sequence[FrameRecord] = ()
) -> Iterator[tuple[str, str]]:
    """Yield the lines for frames, outermost first: the user's own with their source, runs of others in one line.

    `within` are the frames of the error that this one led to.
    """
    # A program in an installed package has no user frames: then the innermost three are shown.
    told = any(is_own(frame) for frame in (*frames, *within))
    shown = frames if told else [*frames[:-3], *map(_as_own, frames[-3:])]
    lines: list[list[tuple[str, str]]] = []
    runs = [(own, list(run)) for own, run in groupby(shown, is_own)]
    innermost = next((frame for frame in reversed(shown) if is_own(frame)), None)
    for number, (own, run) in enumerate(runs):
        if not own:
            text = f"… {len(run)} frame{'s' * (len(run) > 1)} in {_libraries(run)}"
            if number == len(runs) - 1:
                text += f", the last one {short_place(run[-1], folder)} in {run[-1]['function']}"
            lines.append([(text, "dim")])
            continue
        for _, repeated in groupby(run, lambda frame: (frame["file"], frame["line"])):
            same = list(repeated)
            times = f" ({len(same)} times or more)" if len(same) > 2 else ""
            lines.append(_own_lines(same[-1], folder, times, marked=same[-1] is innermost))
    yield from _fold(lines, most)


def _own_lines(frame: FrameRecord, folder: str, times: str, *, marked: bool) -> list[tuple[str, str]]:
    within = f" in {frame['function']}" if frame["function"] else ""
    lines = [(f"{short_place(frame, folder)}{within}{times}", "")]
    if frame["source"]:
        lines.append((f"    {frame['source']}", ""))
        if marked and "span" in frame:
            start, end = frame["span"]
            lines.append((f"    {' ' * start}{'^' * (end - start)}", "error"))
    return lines


def _fold(groups: Sequence[list[tuple[str, str]]], most: int) -> Iterator[tuple[str, str]]:
    """Yield the lines of groups; leave out groups after the first until at most `most` lines, or two groups, remain."""
    kept, left_out = list(groups), 0
    while sum(map(len, kept)) > most and len(kept) > 2:
        del kept[1]
        left_out += 1
    for number, lines in enumerate(kept):
        if number == 1 and left_out:
            yield f"… {left_out} more place{'s' * (left_out > 1)}", "dim"
        yield from lines


def _libraries(frames: Sequence[FrameRecord]) -> str:
    *first, last = dict.fromkeys(frame["library"] for frame in frames)
    return f"{', '.join(first)} and {last}" if first else str(last)


def _as_own(frame: FrameRecord) -> FrameRecord:
    return {**frame, "library": ""}


def short_place(frame: FrameRecord, folder: str) -> str:
    """Return the file, relative to a folder, and the line of a frame."""
    return f"{short_path(frame['file'], folder=folder)}:{frame['line']}"
