"""How long operators take: each different one is run on this machine, or computed from rates if it is very large.

A model of many equal layers has few different operators, and each needs the memory of its own arguments alone. So a
model is timed that does not exist, and would not fit. In a model, an operator takes longer than by itself: Python calls
its module, and autograd makes a node. That time is measured, too, in a model with tiny layers.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

from unisono.estimate.crowding import Load
from unisono.estimate.live_memory import LiveMemory
from unisono.estimate.rates import flop_rate, memory_rate

__all__ = ["OperatorTimes", "time_beside_operators"]

_REPEATS, _ENOUGH_S = 5, 0.05
_WIDTH, _LAYERS, _PASSES = 16, 8, 20
"""The model with tiny layers, and its passes."""
_LOADS, _LOADS_S, _LOAD_NBYTES = 32, 0.2, 64 << 20
"""The most operators that stand for a model, how long they may take together, and the most memory of one of them."""
_MOST_NBYTES = 1 << 30
"""The most memory in which an operator is run. Larger ones are as fast as the machine's arithmetic and memory."""
_VIEW_S = 3e-6
"""The time of an operator that only makes a view, with its dispatch."""


class _OperandLayout(NamedTuple):
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True)
class _Timed:
    """Calls with equal layouts."""

    func: Any
    described: Sequence[Any]
    tree: Any
    nbytes: int
    seconds: float
    calls: int = 0

    def make(self) -> Callable[[], Any]:
        """Return such a call. Its arguments are made at once."""
        args, kwargs = tree_unflatten([_made(each) for each in self.described], self.tree)
        return partial(self.func, *args, **kwargs)


class OperatorTimes:
    """Runs each different operator some times, on tensors of the same layouts. Calls with equal layouts run once.

    Args:
        beside_s: What an operator takes in a model beside itself.
    """

    def __init__(self, *, beside_s: float = 0.0) -> None:
        self._beside_s = beside_s
        self._known: dict[Any, _Timed] = {}
        self._rates: tuple[float, float] | None = None
        self.calls = 0
        """Calls so far that computed something."""

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
            found = self._known[key] = _Timed(func, described, tree, nbytes, 0.0)
            if nbytes > _MOST_NBYTES:
                found.seconds = self._computed(func, args, kwargs, result, nbytes)
            else:
                with _disable_current_modes(), torch.no_grad():
                    found.seconds = _time_of(found.make())
        found.calls += 1
        self.calls += 1
        return found.seconds + self._beside_s

    def loads(self) -> list[Load]:
        """Return the operators that have taken most of the time, without the largest ones."""
        small = [each for each in self._known.values() if each.nbytes <= _LOAD_NBYTES]
        small.sort(key=lambda each: each.seconds * each.calls, reverse=True)
        until = itertools.accumulate((each.seconds for each in small), initial=0.0)  # those before each
        return [Load(each.make, each.calls) for each, s in zip(small[:_LOADS], until, strict=False) if s < _LOADS_S]

    def _computed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, nbytes: int) -> float:
        count = flop_registry.get(func._overloadpacket)
        flops = 0 if count is None else count(*args, **kwargs, out_val=result)
        if self._rates is None:
            with _disable_current_modes():
                self._rates = flop_rate(), memory_rate()
        flops_per_s, bytes_per_s = self._rates
        return max(flops / flops_per_s, nbytes / bytes_per_s)


def time_beside_operators() -> float:
    """Return what an operator takes in a model beside itself, in seconds, as one with tiny layers shows."""
    layers = ((nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(_LAYERS))
    model = nn.Sequential(*(each for pair in layers for each in pair))
    batch = torch.ones(_WIDTH, _WIDTH)

    def run() -> None:
        model(batch).mean().backward()

    own_s = 0.0

    def add(func: Any, args: Any, kwargs: Any, result: Any) -> None:
        nonlocal own_s
        own_s += times.seconds(func, args, kwargs, result)

    run()
    found = []
    for _ in range(_REPEATS):  # each quickly after the other, since the speed of a core changes
        times, own_s = OperatorTimes(), 0.0
        model.zero_grad(set_to_none=True)
        with LiveMemory(on_operator=add):
            run()
        whole = []
        for _ in range(_PASSES):
            model.zero_grad(set_to_none=True)
            since_s = time.perf_counter()
            run()
            whole.append(time.perf_counter() - since_s)
        found.append((statistics.median(whole) - own_s) / times.calls)
    return max(0.0, statistics.median(found))


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
    """Return the median time of some calls, after a first one that does not count."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    call()
    times: list[float] = []
    while len(times) < _REPEATS and sum(times) < _ENOUGH_S:
        since_s = clock()
        call()
        times.append(clock() - since_s)
    return statistics.median(times)
