"""Descriptions of the calls of ranks in errors: the operation, its value, the line of the program, and the differences.

Ranks send such descriptions to each other over the job's store in check mode (`collectives.check_mode`) and when a call
is late (`collectives.late_call_check`). Nothing here sends or waits. Start reading at `difference`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.collectives.structure import compare, kind_of, signature, take_apart
from unisono.mismatch import CallDescription, describe_mismatch, list_ranks

__all__ = ["ComparisonPlace", "Kinds", "describe", "difference", "kinds_of", "place_of", "user_frame"]

Kinds = list[tuple[str, str]]
"""The places in a value and what each holds, as `collectives.structure.signature` returns them."""


class ComparisonPlace(NamedTuple):
    """The ranks of one group whose calls are compared, and the store over which that is done."""

    store: dist.Store  # type: ignore[name-defined]
    """The store that all ranks share."""
    group: str
    """The name of the group, the same on all ranks and used once."""
    own: int
    """This rank. Ranks are those of the job."""
    ranks: tuple[int, ...]
    """The members of the group."""
    where: str
    """The words after the name of a call in messages, such as " in the group of ranks 0, 2"."""


def kinds_of(value: Any, place: str = "value") -> Kinds:
    """Return the structure of a value, which must be equal on all ranks; its type's name if it is not reducible."""
    if isinstance(value, Tensor):
        return [(place, describe(value))]
    try:
        return signature(take_apart(value, place=place).leaves)
    except TypeError:
        return [(place, _a(type(value).__qualname__))]


def describe(value: Any) -> str:
    """Return the kind of a value as words, without its content.

    >>> describe(torch.ones(2, requires_grad=True)), describe({"a": 1}), describe(None)
    ('float32 [2] that requires a gradient', 'a dict', 'None')
    """
    if isinstance(value, Tensor):
        where = "" if value.device.type == "cpu" else f" on {value.device.type}"
        follows = " that requires a gradient" if value.requires_grad and torch.is_grad_enabled() else ""
        return f"{kind_of(value)}{where}{follows}"
    return "None" if value is None else _a(type(value).__qualname__)


def user_frame(above: int = 0) -> FrameType:
    """Return the innermost frame outside of unisono and torch; the outermost frame if there is none.

    Args:
        above: Frames above the caller's that are known to be inside; looking at each costs time.
    """
    frame = sys._getframe(above + 1)
    while _is_ours(frame.f_globals.get("__name__", "")) and frame.f_back is not None:
        frame = frame.f_back
    return frame


@lru_cache(maxsize=1024)
def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("unisono", "torch")


def place_of(code: CodeType, instruction: int) -> str:
    """Return the place of an instruction, as "file:line in function".

    Args:
        code: The code of the function. The longer it is, the longer the search for the line takes.
        instruction: A frame's `f_lasti`.
    """
    line = next((line for start, end, line in code.co_lines() if start <= instruction < end), None)
    inside = "" if code.co_name == "<module>" else f" in {code.co_name}"
    return f"{Path(code.co_filename).name}:{line}{inside}"


def difference(entries: Sequence[dict[str, Any]], ranks: Sequence[int], *, absent: Sequence[int] = ()) -> str | None:
    """Return the difference between the calls of ranks as a message; None if they are equal.

    Args:
        entries: The call of each rank, as `CallChecker` and `LateCallChecker` publish it.
        ranks: The ranks of the entries.
        absent: Ranks without a known call.
    """
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
    return f"ranks disagree in {entries[0]['call']}: {found}:{list_ranks(lines)}\nMake the values match on all ranks."


def _a(noun: str) -> str:
    """Return a noun with its article."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
