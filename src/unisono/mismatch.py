"""Messages about differences between ranks that must agree. Pure: nothing is sent here.

Each rank describes itself by a document of values by name, such as {"lr of parameter group 0": 0.1}. A message lists
the entries that differ, with all their values and the ranks that have them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from unisono.text import clip, name_ranks

__all__ = [
    "CALL", "REMEDY", "CallDescription", "Document", "by_value", "describe_mismatch", "list_differences", "list_ranks",
    "tell_differences",
]  # fmt: skip

REMEDY = "Make all ranks call the same, in the same order."

Document: TypeAlias = Mapping[str, Any]
"""Properties of a rank by name: plain values with a meaningful `repr`; lists are compared entry by entry."""

CALL = "call"
"""The entry that names the call. If it differs nothing else is compared: see `describe_mismatch`."""

_TOLD = 4
_LONGEST = 120


class _Absent:
    """The value of an entry that a rank does not have."""

    def __repr__(self) -> str:
        return "missing"


_ABSENT = _Absent()


class CallDescription(NamedTuple):
    """One call of a rank, for errors."""

    name: str
    """The call as it must be equal on all ranks, such as "all_reduce with op 'sum'"."""
    text: str = ""
    """The name with the group and the value, as far as they are known."""
    where: str = ""
    """The line of the program, if it is known."""

    def __str__(self) -> str:
        return (self.text or self.name) + (self.where and f" at {self.where}")


def describe_mismatch(
    calls: Mapping[int, CallDescription], *, absent: Sequence[int] = (), remedy: str = REMEDY
) -> str | None:
    """Return the message for ranks that make different calls; None if all calls have the same name.

    Args:
        calls: The call of each rank, by rank.
        absent: Ranks without a known call.
        remedy: The last sentence of the message.

    >>> barrier = CallDescription("barrier")
    >>> print(describe_mismatch({0: CallDescription("send"), 1: barrier, 2: barrier}))
    ranks call different things: send on rank 0, barrier on ranks 1-2. Make all ranks call the same, in the same order.
    >>> print(describe_mismatch({0: CallDescription("gather", "gather of an int", "a.py:7"), 1: barrier}))
    ranks call different things: gather on rank 0, barrier on rank 1:
      rank 0: gather of an int at a.py:7
      rank 1: barrier
    Make all ranks call the same, in the same order.
    """
    names = {rank: calls[rank].name for rank in sorted(calls)}
    if len({*names.values()}) < 2:
        return None
    headline = f"ranks call different things: {by_value(names)}"
    lines = [(rank, str(call)) for rank, call in calls.items()] + [(rank, "has not come there") for rank in absent]
    if not absent and {text for _, text in lines} == {*names.values()}:
        return f"{headline}. {remedy}"
    return f"{headline}:{list_ranks(lines)}\n{remedy}"


def by_value(
    texts: Mapping[int, str], *, separator: str = ", ", last: str | None = None, rarest_first: bool = False
) -> str:
    """Return the different texts, each with the ranks that have it, in order of their first appearance.

    Args:
        texts: The text of each rank.
        separator: The text between two of them.
        last: The text before the last of them. None: `separator`.
        rarest_first: True to begin with the text that the fewest ranks have.

    >>> by_value({0: "2 GPUs", 1: "none", 2: "2 GPUs"}), by_value({0: "a", 1: "b", 2: "a"}, rarest_first=True)
    ('2 GPUs on ranks 0, 2, none on rank 1', 'b on rank 1, a on ranks 0, 2')
    """
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    order = sorted(ranks, key=lambda text: (len(ranks[text]), ranks[text])) if rarest_first else list(ranks)
    clauses = [f"{clip(text, _LONGEST)} on {name_ranks(ranks[text])}" for text in order]
    *others, final = clauses
    return separator.join(others) + (last or separator) + final if others else final


def list_ranks(lines: Sequence[tuple[int, str]]) -> str:
    """Return a line for each different text, with the ranks that have it."""
    whose: dict[str, list[int]] = {}
    for rank, text in lines:
        whose.setdefault(text, []).append(rank)
    return "".join(f"\n  {name_ranks(ranks)}: {text}" for text, ranks in whose.items())


def tell_differences(everyone: Sequence[Document], ranks: Sequence[int] | None = None) -> str | None:
    """Return the differences between the documents of ranks, in a few clauses; None if they are equal.

    Args:
        everyone: The documents.
        ranks: The ranks that they describe; None is 0, 1, 2, ….

    >>> tell_differences([{"lr": 0.1}, {"lr": 0.1}, {"lr": 0.2}])
    'lr is 0.1 on ranks 0-1 and 0.2 on rank 2'
    """
    found = list_differences(everyone, ranks)
    if not found:
        return None
    more = f"; and {len(found) - _TOLD} more" if len(found) > _TOLD else ""
    return "; ".join(found[:_TOLD]) + more


def list_differences(everyone: Sequence[Document], ranks: Sequence[int] | None = None) -> list[str]:
    """Return the differences between documents: a clause for each entry, in the order of the documents.

    >>> list_differences([{"names": ["a", "b"]}, {"names": ["a", "c"]}])
    ["names differ at number 1: 'b' on rank 0 and 'c' on rank 1"]
    >>> list_differences([{"names": ["a", "b"]}, {"names": ["b"]}])
    ["names are 2 on rank 0 and 1 on rank 1 ('a' is not on all)"]
    """
    ranks = range(len(everyone)) if ranks is None else ranks
    shared: list[str] = []
    partial: list[str] = []
    for name in dict.fromkeys(name for document in everyone for name in document):
        values = [document.get(name, _ABSENT) for document in everyone]
        if _all_equal(values):
            continue
        is_partial = any(value is _ABSENT for value in values)
        (partial if is_partial else shared).append(_clause(name, values, ranks))
    # Entries that only some ranks have follow from entries that all have, such as the number of groups.
    return shared or partial


def _clause(name: str, values: Sequence[Any], ranks: Sequence[int]) -> str:
    if not all(isinstance(value, list) for value in values):
        return f"{name} is {_all_values(map(repr, values), ranks)}"
    if all(len(value) == len(values[0]) for value in values):
        place, items = next((i, items) for i, items in enumerate(zip(*values, strict=True)) if not _all_equal(items))
        return f"{name} differ at number {place}: {_all_values(map(repr, items), ranks)}"
    held = [set(map(_shown, value)) for value in values]
    some = next((item for value in values for item in map(_shown, value) if not all(item in h for h in held)), None)
    return f"{name} are {_all_values((str(len(value)) for value in values), ranks)}" + (
        f" ({some} is not on all)" if some else ""
    )


def _all_values(texts: Iterable[str], ranks: Sequence[int]) -> str:
    return by_value(dict(zip(ranks, texts, strict=True)), last=" and ")


def _shown(value: Any) -> str:
    return clip(repr(value), _LONGEST)


def _all_equal(values: Sequence[Any]) -> bool:
    # By repr, so that NaN equals NaN, and 1 differs from 1.0 and True.
    return len(set(map(repr, values))) == 1
