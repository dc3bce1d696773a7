"""How the calls of ranks are described in errors: who called what, with what, where, and in what ranks differ.

Ranks send such descriptions to each other over the job's store in check mode (`collectives.check_mode`) and when a call
is late (`collectives.watchdog`). Nothing here sends or waits. Start reading at `difference`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from unisono.collectives.structure import compare, kind_of, signature, take_apart
from unisono.mismatch import CallDescription, describe_mismatch, list_ranks

__all__ = [
    "Kinds", "Members", "describe", "difference", "kinds_of", "place_of", "user_frame",
]  # fmt: skip

Kinds = list[tuple[str, str]]
"""Places in a value and what is there, as `collectives.structure.signature` gives them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Members:
    """Who takes part in the calls of a group, from where one of them stands."""

    group: str
    """The group's name, the same on all ranks and used once."""
    own: int
    """This rank. Ranks are those of the job."""
    ranks: tuple[int, ...]
    described: str
    """Who they are, as "ranks 0, 2"; "" for the whole job."""

    @property
    def where(self) -> str:
        """What follows the name of a call in messages."""
        return self.described and f" in the group of {self.described}"


def kinds_of(value: Any, place: str = "value") -> Kinds:
    """Return what a value is made of, as it must be on all ranks; what cannot be taken apart is named by its type."""
    if isinstance(value, Tensor):
        return [(place, describe(value))]
    try:
        return signature(take_apart(value, place=place).leaves)
    except TypeError:
        return [(place, _a(type(value).__qualname__))]


def describe(value: Any) -> str:
    """Write what a value is, without what is in it.

    >>> describe(torch.ones(2, requires_grad=True)), describe({"a": 1}), describe(None)
    ('float32 [2] that requires a gradient', 'a dict', 'None')
    """
    if isinstance(value, Tensor):
        where = "" if value.device.type == "cpu" else f" on {value.device.type}"
        follows = " that requires a gradient" if value.requires_grad and torch.is_grad_enabled() else ""
        return f"{kind_of(value)}{where}{follows}"
    return "None" if value is None else _a(type(value).__qualname__)


def user_frame(above: int = 0) -> FrameType:
    """Return the frame outside of unisono and torch that is being executed; if there is none, the outermost.

    Args: above is how many frames over the caller's are known to be none; each costs time.
    """
    frame = sys._getframe(above + 1)
    while _is_ours(frame.f_globals.get("__name__", "")) and frame.f_back is not None:
        frame = frame.f_back
    return frame


@lru_cache(maxsize=1024)
def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("unisono", "torch")


def place_of(code: CodeType, instruction: int) -> str:
    """Write where code is, as file:line in function.

    Args: instruction is a frame's `f_lasti`. To find its line takes longer the longer the function is.
    """
    line = next((line for start, end, line in code.co_lines() if start <= instruction < end), None)
    inside = "" if code.co_name == "<module>" else f" in {code.co_name}"
    return f"{Path(code.co_filename).name}:{line}{inside}"


def difference(entries: Sequence[dict[str, Any]], ranks: Sequence[int], *, absent: Sequence[int] = ()) -> str | None:
    """Return in what the calls of ranks differ; None if they do not. Args: absent are ranks without a known call."""
    calls = {
        rank: CallDescription(entry["call"], entry["text"], entry["where"])
        for rank, entry in zip(ranks, entries, strict=True)
    }
    if mismatch := describe_mismatch(calls, absent=absent):
        return mismatch
    kinds = [entry["kinds"] for entry in entries if entry["kinds"] is not None]
    who = [rank for rank, entry in zip(ranks, entries, strict=True) if entry["kinds"] is not None]
    found = compare([[tuple(pair) for pair in each] for each in kinds], who) if kinds else None
    if found is None:
        return None
    lines = [(rank, str(call)) for rank, call in calls.items()] + [(rank, "has not come there") for rank in absent]
    return f"ranks disagree in {entries[0]['call']}: {found}:{list_ranks(lines)}\nMake the values alike on all ranks."


def _a(noun: str) -> str:
    """Put the article before a noun."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
