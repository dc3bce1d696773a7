"""Formatting of ranks, types, durations and long values in messages. Pure; does not import torch, for the launcher."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Literal

__all__ = [
    "a_type",
    "clip",
    "format_duration",
    "format_ranks",
    "list_first",
    "name_ranks",
    "parse_ranks",
    "without_cpp_place",
]

_CPP_PLACE = re.compile(r"^\[(?:enforce fail at )?[^\]\s]+:\d+\] (?:err == 0\. )?")

# "an SGD", which is spelled, and "an Upsample", but "a OneCycleLR" and "a UniformSampler".
_TAKES_AN = re.compile(r"[aei]|o(?!ne)|u(?:n(?!i)|p)", re.IGNORECASE)
_SPELLED_WITH_AN = re.compile(r"[FHLMNRSX][B-DF-HJ-NP-TV-Z]")


def a_type(value: object) -> str:
    """Return the name of a value's type with its article.

    >>> a_type(3), a_type("x"), a_type([]), a_type(None), a_type(OSError())
    ('an int', 'a str', 'a list', 'a NoneType', 'an OSError')
    >>> [a_type(type(name, (), {})()) for name in ("SGD", "SAM", "Upsample", "OneCycleLR", "UniformSampler")]
    ['an SGD', 'a SAM', 'an Upsample', 'a OneCycleLR', 'a UniformSampler']
    """
    name = type(value).__name__
    return f"{'an' if _TAKES_AN.match(name) or _SPELLED_WITH_AN.match(name) else 'a'} {name}"


def format_ranks(ranks: Iterable[int], *, separator: str = ", ") -> str:
    """Return ranks in ascending order, with neighbours as spans.

    >>> format_ranks([3, 0, 1]), format_ranks({0, 1, 2, 3, 6}, separator=",")
    ('0-1, 3', '0-3,6')
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank <= spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return separator.join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def parse_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks in a text of `format_ranks`, or those still readable in one that was cut.

    >>> parse_ranks("0-1, 3"), parse_ranks("0-3,6"), parse_ranks("0,2,…,8")
    ((0, 1, 3), (0, 1, 2, 3, 6), (0, 2, 8))
    """
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (last or first).isdigit():
            found += range(int(first), int(last or first) + 1)
    return tuple(found)


def name_ranks(ranks: Iterable[int], *, longest: int = 40) -> str:
    """Return ranks as words, beginning with "rank", by which the launcher recognizes errors about lost peers.

    >>> name_ranks([2]), name_ranks([0, 1, 3])
    ('rank 2', 'ranks 0-1, 3')
    >>> name_ranks(range(0, 1000, 2), longest=10)
    'ranks 0, 2, 4, … (500 in all)'
    """
    numbers = set(ranks)
    listed = format_ranks(numbers)
    if len(listed) > longest:
        listed = f"{listed[: longest + 1].rpartition(', ')[0]}, … ({len(numbers)} in all)"
    return f"rank{'s' * (len(numbers) > 1)} {listed}"


def list_first(values: Collection[object], most: int) -> str:
    """Return the first values, with the number of all if there are more.

    >>> list_first([4, 8], 3), list_first(range(40), 3)
    ('4, 8', '0, 1, 2, … (40 in all)')
    """
    shown = ", ".join(str(value) for value, _ in zip(values, range(most), strict=False))
    return f"{shown}, … ({len(values)} in all)" if len(values) > most else shown


def format_duration(seconds: float) -> str:
    """Return a time span in words.

    >>> format_duration(0.4), format_duration(31.4), format_duration(75), format_duration(7400)
    ('0.4 s', '31 s', '1 min 15 s', '2 h 3 min')
    """
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def clip(text: str, most: int, *, at: Literal["start", "middle", "end"] = "end") -> str:
    """Return a text of at most `most` characters, with "…" in place of those cut out.

    >>> clip("abcdefgh", 5), clip("abcdefgh", 5, at="start"), clip("abcdefgh", 5, at="middle"), clip("abc", 5)
    ('abcd…', '…efgh', 'ab…gh', 'abc')
    """
    if len(text) <= most:
        return text
    if at == "middle":
        half = max(1, (most - 1) // 2)
        return f"{text[:half]}…{text[-half:]}"
    return f"{text[: most - 1]}…" if at == "end" else f"…{text[1 - most :]}"


def without_cpp_place(message: str) -> str:
    """Return a message of torch's libraries without the line of C++ that it begins with.

    >>> without_cpp_place("[../third_party/gloo/gloo/transport/tcp/pair.cc:525] Connection closed by peer")
    'Connection closed by peer'
    """
    return _CPP_PLACE.sub("", message)
