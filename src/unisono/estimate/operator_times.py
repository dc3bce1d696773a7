"""How long operators take: each different one is run on this machine, or computed from rates if it is very large.

A model of many equal layers has few different operators, and each needs the memory of its own arguments alone. So a
model is timed that does not exist, and would not fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

from unisono.estimate.rates import flop_rate, memory_rate

__all__ = ["OperatorTimes"]

_REPEATS, _ENOUGH_S = 5, 0.05
_MOST_NBYTES = 1 << 30
"""The most memory in which an operator is run. Larger ones are as fast as the machine's arithmetic and memory."""
_VIEW_S = 3e-6
"""The time of an operator that only makes a view, with its dispatch."""
_AUTOGRAD_S = 4e-6
"""The time that autograd adds to an operator: a node of the graph, and its call in the backward pass."""


class _OperandLayout(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class OperatorTimes:
    """Runs each different operator some times, on tensors of the same layouts. Calls with equal layouts run once."""

    def __init__(self) -> None:
        self._known: dict[Any, float] = {}
        self._rates: tuple[float, float] | None = None

    def seconds(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
        """Return the time of a call, in seconds. Tensors may be fake."""
        if func.is_view or _is_metadata(func, result):
            return _VIEW_S
        leaves, tree = tree_flatten((tuple(args), dict(kwargs)))
        described = tuple(_described(leaf) for leaf in leaves)
        key = (func, described, str(tree))
        found = self._known.get(key)
        if found is None:
            tensors = [leaf for leaf in (*leaves, *tree_leaves(result)) if isinstance(leaf, Tensor)]
            nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            if nbytes > _MOST_NBYTES:
                found = self._computed(func, args, kwargs, result, nbytes)
            else:
                found = self._measure(func, described, tree)
            self._known[key] = found
        return found + _AUTOGRAD_S

    @property
    def different(self) -> int:
        """The number of different calls so far."""
        return len(self._known)

    def _computed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, nbytes: int) -> float:
        count = flop_registry.get(func._overloadpacket)
        flops = 0 if count is None else count(*args, **kwargs, out_val=result)
        if self._rates is None:
            with _disable_current_modes():
                self._rates = flop_rate(), memory_rate()
        flops_per_s, bytes_per_s = self._rates
        return max(flops / flops_per_s, nbytes / bytes_per_s)

    def _measure(self, func: Any, described: Sequence[Any], tree: Any) -> float:
        with _disable_current_modes(), torch.no_grad():
            args, kwargs = tree_unflatten([_made(each) for each in described], tree)
            return _time_of(lambda: func(*args, **kwargs))


def _is_metadata(func: Any, result: Any) -> bool:
    return not isinstance(result, (Tensor, tuple, list, type(None))) or func._schema.name == "aten::detach"


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf if leaf.__hash__ is not None else repr(leaf)
    return _OperandLayout(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype)


def _made(leaf: Any) -> Any:
    if not isinstance(leaf, _OperandLayout):
        return leaf
    made = torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype)
    if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
        return made.fill_(0.5)
    return made.zero_()  # indices, which are valid in any table


def _time_of(call: Callable[[], Any]) -> float:
    """Return the shortest time of some calls, after a first one that does not count: others may use the cores, too."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    call()
    times: list[float] = []
    while len(times) < _REPEATS and sum(times) < _ENOUGH_S:
        since_s = clock()
        call()
        times.append(clock() - since_s)
    return min(times)
