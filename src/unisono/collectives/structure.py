"""Nested values: dicts, lists, tuples, named tuples and dataclasses, with tensors and numbers as leaves.

`take_apart` returns the leaves in an order that is the same on all ranks, each with its place for messages, and a
function that builds the same structure around other leaves. Pure.
"""

from __future__ import annotations

import copy
import dataclasses
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.collectives.reduce_ops import name_of
from unisono.errors import RankMismatchError
from unisono.mismatch import by_value
from unisono.text import a_type

__all__ = ["Leaf", "Parts", "check_concat", "children", "compare", "concatenate", "rebuild", "step_into", "take_apart"]

_MOST_PLACES = 3
"""Places that a message names at most."""


class Leaf(NamedTuple):
    """A tensor, number or None, and its place in the structure."""

    place: str
    """The expression for it, such as value['a'][0]."""
    value: Any


class Parts(NamedTuple):
    """A value as leaves and structure."""

    leaves: list[Leaf]
    build: Callable[[Sequence[Any]], Any]
    """Builds the same structure around other leaves."""


def children(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the children of a structure, as pairs of key and child; None if the value is no structure."""
    kind = type(value)
    if kind is list or isinstance(value, tuple):
        known = kind in (list, tuple) or hasattr(kind, "_fields") or hasattr(kind, "n_sequence_fields")
        return list(enumerate(value)) if known else None
    if isinstance(value, dict):
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def step_into(place: str, key: Any) -> str:
    """Return the place of a child.

    >>> step_into("value", 0), step_into("value", "a"), step_into("value", ".a")
    ('value[0]', "value['a']", 'value.a')
    """
    if isinstance(key, str) and key.startswith(".") and key[1:].isidentifier():
        return place + key
    return f"{place}[{key!r}]"


def take_apart(value: Any, *, place: str = "value") -> Parts:
    """Return the leaves of a value, and a function that builds the same structure around others.

    Entries of dicts are in the order of their keys' text, so that the order in which they were made does not matter.

    Raises:
        TypeError: A leaf is not a tensor, number or None.
    """
    leaves: list[Leaf] = []
    build = _take(value, place, leaves)
    return Parts(leaves, lambda replaced: build(iter(replaced)))


def _take(value: Any, place: str, leaves: list[Leaf]) -> Callable[[Any], Any]:
    if isinstance(value, (Tensor, bool, int, float)) or value is None:
        leaves.append(Leaf(place, value))
        return next
    found = children(value)
    if found is None:
        number = _plain_number(value)
        if number is None:
            if hasattr(value, "__array_interface__"):
                raise TypeError(f"{place} is an array of numpy: make a tensor of it by torch.from_numpy()")
            raise TypeError(
                f"{place} is {a_type(value)}, and only tensors, numbers and None, also in dicts, lists, "
                "tuples and dataclasses, can be reduced: gather() and all_gather() take any object"
            )
        leaves.append(Leaf(place, number))
        return next
    if isinstance(value, dict):
        found.sort(key=lambda pair: (type(pair[0]).__name__, repr(pair[0])))
    keys = [key for key, _ in found]
    builders = [_take(child, step_into(place, key), leaves) for key, child in found]
    return lambda leaves: rebuild(value, keys, [build(leaves) for build in builders])


def rebuild(value: Any, keys: Sequence[Any], held: Sequence[Any]) -> Any:
    """Return a structure like another one with other children, whose keys are those in `children`."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*held)
    if isinstance(value, (list, tuple)):
        return type(value)(held)
    made = copy.copy(value)  # not by __init__, which may take other arguments; keeps all else that a subclass has
    for key, child in zip(keys, held, strict=True):
        if isinstance(value, dict):
            made[key] = child
        else:
            object.__setattr__(made, key[1:], child)  # also where the dataclass is frozen
    return made


def _plain_number(value: Any) -> int | float | None:
    """Return a scalar of another library as a Python number; None if it is not a number."""
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else None


def signature(leaves: Iterable[Leaf]) -> list[tuple[str, str]]:
    """Return the place and kind of every leaf, which must be equal on all ranks."""
    return [(leaf.place, kind_of(leaf.value)) for leaf in leaves]


def kind_of(value: Any) -> str:
    """Return the kind of a leaf as words, without its values.

    >>> kind_of(torch.ones(2, 3)), kind_of(1.5), kind_of(None)
    ('float32 [2, 3]', 'a number', 'None')
    """
    if isinstance(value, Tensor):
        return f"{name_of(value.dtype)} {list(value.shape)}"
    return "None" if value is None else "a number"


def compare(signatures: Sequence[Sequence[tuple[str, str]]], ranks: Sequence[int]) -> str | None:
    """Return the differences between the signatures of ranks as words; None if they are equal.

    >>> compare([[("value['b']", "float32 [4]")]] * 2 + [[("value['b']", "float32 [3]")]], [0, 1, 2])
    "value['b'] is float32 [3] on rank 2, float32 [4] on ranks 0-1"
    """
    tables = [dict(each) for each in signatures]
    places = list(dict.fromkeys(place for table in tables for place in table))
    found = []
    for place in places:
        kinds = {rank: table.get(place, "not there") for rank, table in zip(ranks, tables, strict=True)}
        if len({*kinds.values()}) > 1:
            found.append(f"{place} is {by_value(kinds, rarest_first=True)}")
    if not found:
        return None
    more = f", and {len(found) - _MOST_PLACES} places more" if len(found) > _MOST_PLACES else ""
    return "; ".join(found[:_MOST_PLACES]) + more


def check_concat(value: Any, dim: int | None) -> None:
    """Check that a value can be concatenated with others along a dimension; None is always allowed.

    Raises:
        TypeError: The dimension is not an int, or a leaf is not a tensor.
        ValueError: A tensor does not have the dimension.
    """
    if dim is None:
        return
    if type(dim) is not int:
        raise TypeError(f"concat={dim!r} must be the number of a dimension")
    for place, leaf in take_apart(value).leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"concat={dim} joins tensors, and {place} is {leaf!r}: leave concat out to get a list")
        if not -leaf.dim() <= dim < leaf.dim():
            raise ValueError(
                f"concat={dim} needs tensors with that dimension, and {place} has shape {list(leaf.shape)}: reshape "
                "it, or leave concat out to get a list"
            )


def concatenate(values: Sequence[Any], dim: int, ranks: Sequence[int], call: str) -> Any:
    """Concatenate the tensors of equal structures along a dimension.

    Raises:
        RankMismatchError: They do not match; the message names ranks and places.
    """
    taken = [take_apart(value) for value in values]

    def kind(tensor: Tensor) -> str:
        shape = [str(length) for length in tensor.shape]
        shape[dim] = "*"
        return f"{name_of(tensor.dtype)} [{', '.join(shape)}]"

    differs = compare([[(leaf.place, kind(leaf.value)) for leaf in parts.leaves] for parts in taken], ranks)
    if differs is not None:
        raise RankMismatchError(f"{call}: {differs}: make them agree, or leave concat out to get a list")
    columns = zip(*(parts.leaves for parts in taken), strict=True)
    return taken[0].build([torch.cat([leaf.value for leaf in column], dim) for column in columns])
