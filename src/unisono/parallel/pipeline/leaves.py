"""Nested values, such as inputs and results of models, as a list of leaves and a function that rebuilds them.

Lists, tuples, named tuples, dicts of any class and dataclasses are looked into. All else is a leaf.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from torch import Tensor

from unisono.collectives.structure import children, rebuild
from unisono.parallel.pipeline.placeholder import TensorLayout

__all__ = ["Builder", "children_of", "described", "flatten", "rebuilt"]

Builder = Callable[[Iterator[Any]], Any]
"""Builds a nested value from an iterator of its leaves."""

_PLAIN = (Tensor, type(None), bool, int, float, str)
_DEEPEST = 8


def flatten(value: Any) -> tuple[list[Any], Builder]:
    """Return the leaves of a value, and a function that builds it from others.

    >>> leaves, build = flatten({"a": [1, 2], "b": (3, None)})
    >>> leaves, build(iter([5, 6, 7, 8]))
    ([1, 2, 3, None], {'a': [5, 6], 'b': (7, 8)})
    """
    leaves: list[Any] = []
    return leaves, _take(value, leaves)


def _take(value: Any, leaves: list[Any]) -> Builder:
    found = None if isinstance(value, _PLAIN) else children_of(value)
    if found is None:
        leaves.append(value)
        return next
    keys = [key for key, _ in found]
    builders = [_take(child, leaves) for _, child in found]
    return lambda given: rebuilt(value, keys, [build(given) for build in builders])


def children_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the children of a value, as pairs of key and child; None if it is a leaf."""
    return list(value.data.items()) if isinstance(value, UserDict) else children(value)


def rebuilt(value: Any, keys: list[Any], held: list[Any]) -> Any:
    """Return a value like another one with other children, whose keys are those of `children_of`."""
    if not isinstance(value, UserDict):
        return rebuild(value, keys, held)
    made = copy.copy(value)
    made.data.update(zip(keys, held, strict=True))
    return made


def described(value: Any, depth: int = 0) -> Hashable:
    """Return a value without the contents of its tensors, for comparisons.

    >>> described([1, "a"]) == described([1, "a"]), described([1]) == described((1,))
    (True, False)
    """
    if isinstance(value, Tensor):
        return TensorLayout.of(value)
    found = None if isinstance(value, _PLAIN) or depth > _DEEPEST else children_of(value)
    if found is None and not isinstance(value, (*_PLAIN, type)) and hasattr(value, "__dict__"):
        found = list(vars(value).items())
    if found is None:
        return type(value), repr(value)
    return type(value), tuple((repr(key), described(child, depth + 1)) for key, child in found)
