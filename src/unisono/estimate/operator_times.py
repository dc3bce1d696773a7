"""How long operators take: each different one is run on this machine, or computed from rates if it is very large.

A model of many equal layers has few different operators, and they need the memory of their own arguments alone. So a
model is timed that does not exist, and would not fit. Operators take turns, as in a model: one that follows itself
finds its code and its arguments in the caches of the core, and takes as little as half of its time in a step. Those
that have a tensor in common, such as the many of an update, have it here, too. In a model, an operator also takes
longer since Python calls its module, and autograd makes a node. That is measured in a model with tiny layers.
"""

from __future__ import annotations

import itertools
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

from unisono.estimate.crowding import Load
from unisono.estimate.live_memory import LiveMemory, storage_key
from unisono.estimate.rates import flop_rate, memory_rate

__all__ = ["OperatorClock", "OperatorTimes", "TimedOperator", "time_beside_operators"]

_ROUNDS, _ENOUGH_S = 5, 2.0
"""How often operators take turns, and the seconds after which two rounds are enough."""
_TOGETHER_NBYTES = 256 << 20
"""The memory of the operators that take turns: more than caches have."""
_REPEATS = 5
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


class _Operand(NamedTuple):
    value: Any
    """What is given to the operator; of a tensor, its layout."""
    shared: tuple[int, _OperandLayout] | None = None
    """What operators have in common: the number of the tensor's memory, with its layout."""


@dataclass(slots=True)
class TimedOperator:
    """Calls with equal layouts."""

    func: Any
    operands: Sequence[_Operand]
    tree: Any
    nbytes: int
    seconds: float | None = None
    """None: not known yet."""
    calls: int = 0

    def make(self) -> Callable[[], Any]:
        """Return such a call. Its arguments are made at once."""
        return self.make_of({})

    def make_of(self, tensors: dict[tuple[int, _OperandLayout], Tensor]) -> Callable[[], Any]:
        """Return such a call, with tensors that others have in common with it. Gets those that are not there yet."""
        values = []
        for value, shared in self.operands:
            if shared is None:
                values.append(_made(value))
            else:
                if shared not in tensors:
                    tensors[shared] = _made(value)
                values.append(tensors[shared])
        args, kwargs = tree_unflatten(values, self.tree)
        return partial(self.func, *args, **kwargs)


class OperatorTimes:
    """Runs each different operator some times, on tensors of the same layouts. Calls with equal layouts run once.

    Args:
        beside_s: What an operator takes in a model beside itself.
    """

    def __init__(self, *, beside_s: float = 0.0) -> None:
        self._beside_s = beside_s
        self._known: dict[Any, TimedOperator] = {}
        self._rates: tuple[float, float] | None = None
        self._memory: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._numbers = itertools.count()
        self.calls = 0
        """Calls so far that computed something."""

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> TimedOperator | None:
        """Note a call, for `measure`. Tensors may be fake.

        Returns:
            What calls with equal layouts have in common; None if it only makes a view.
        """
        if func.is_view or _is_metadata(func, result):
            return None
        leaves, tree = tree_flatten((tuple(args), dict(kwargs)))
        described = tuple(_described(leaf) for leaf in leaves)
        key = (func, described, str(tree))
        found = self._known.get(key)
        if found is None:
            tensors = [leaf for leaf in (*leaves, *tree_leaves(result)) if isinstance(leaf, Tensor)]
            nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            operands = [
                _Operand(value, self._shared(leaf, value)) for leaf, value in zip(leaves, described, strict=True)
            ]
            found = self._known[key] = TimedOperator(func, operands, tree, nbytes)
            if nbytes > _MOST_NBYTES:
                found.seconds = self._computed(func, args, kwargs, result, nbytes)
        found.calls += 1
        self.calls += 1
        return found

    def measure(self) -> None:
        """Run the operators that have been noted, in turn, as many at once as have not too much memory."""
        group: list[TimedOperator] = []
        for each in [each for each in self._known.values() if each.seconds is None]:
            if group and sum(other.nbytes for other in group) + each.nbytes > _TOGETHER_NBYTES:
                _time_in_turn(group)
                group = []
            group.append(each)
        if group:
            _time_in_turn(group)

    def sum_of(self, noted: Iterable[TimedOperator | None]) -> float:
        """Return the time of some calls, as `note` has returned them, in a model."""
        return sum(_VIEW_S if each is None else (each.seconds or 0.0) + self._beside_s for each in noted)

    def seconds(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
        """Return the time of a call, in seconds. One that was not noted before is run by itself."""
        noted = self.note(func, args, kwargs, result)
        if noted is not None and noted.seconds is None:
            self.measure()
        return self.sum_of([noted])

    def loads(self) -> list[Load]:
        """Return the operators that have taken most of the time, without the largest ones."""
        small = [each for each in self._known.values() if each.nbytes <= _LOAD_NBYTES]
        small.sort(key=lambda each: (each.seconds or 0.0) * each.calls, reverse=True)
        until = itertools.accumulate((each.seconds or 0.0 for each in small), initial=0.0)  # those before each
        return [Load(each.make, each.calls) for each, s in zip(small[:_LOADS], until, strict=False) if s < _LOADS_S]

    def _computed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, nbytes: int) -> float:
        count = flop_registry.get(func._overloadpacket)
        flops = 0 if count is None else count(*args, **kwargs, out_val=result)
        if self._rates is None:
            with _disable_current_modes():
                self._rates = flop_rate(), memory_rate()
        flops_per_s, bytes_per_s = self._rates
        return max(flops / flops_per_s, nbytes / bytes_per_s)

    def _shared(self, leaf: Any, value: Any) -> tuple[int, _OperandLayout] | None:
        """Return what operators have in common that are given the same tensor. Indices are valid for one alone."""
        if not isinstance(leaf, Tensor) or not leaf.dtype.is_floating_point:
            return None
        storage = leaf.untyped_storage()
        known = self._memory.get(key := storage_key(leaf))
        if known is None or known[0]() is None:  # its memory was given back, and this is another one
            known = self._memory[key] = weakref.ref(storage), next(self._numbers)
        return known[1], value


class OperatorClock:
    """Tells the time that operators have taken so far: by their description, or real time.

    Args:
        times: Says how long operators take. None: real time counts.
        notes: True to note operators, and to count them instead of their time, until `timed` tells it.
    """

    def __init__(self, times: OperatorTimes | None, *, notes: bool = False) -> None:
        self._times, self._seconds = times, 0.0
        self._noted: list[TimedOperator | None] | None = [] if notes and times is not None else None

    def on_operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Take note of an operator."""
        if self._noted is not None and self._times is not None:
            self._noted.append(self._times.note(func, args, kwargs, result))
        elif self._times is not None:
            self._seconds += self._times.seconds(func, args, kwargs, result)

    def __call__(self) -> float:
        """Return the seconds so far, or the number of operators."""
        if self._noted is not None:
            return len(self._noted)
        if self._times is not None:
            return self._seconds
        return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()

    def timed(self, counts: Sequence[float]) -> list[float]:
        """Return the seconds of operators that followed each other, of which some have been counted; see `notes`."""
        if self._noted is None or self._times is None:
            return [*counts]
        self._times.measure()
        ends = [round(end) for end in itertools.accumulate(counts, initial=0.0)]
        return [self._times.sum_of(self._noted[begin:end]) for begin, end in itertools.pairwise(ends)]


def time_beside_operators() -> float:
    """Return what an operator takes in a model beside itself, in seconds, as one with tiny layers shows."""
    layers = ((nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(_LAYERS))
    model = nn.Sequential(*(each for pair in layers for each in pair))
    batch = torch.ones(_WIDTH, _WIDTH)

    def run() -> None:
        model(batch).mean().backward()

    run()
    found = []
    for _ in range(_REPEATS):  # each quickly after the other, since the speed of a core changes
        times = OperatorTimes()
        clock = OperatorClock(times, notes=True)
        model.zero_grad(set_to_none=True)
        with LiveMemory(on_operator=clock.on_operator):
            run()
        (own_s,) = clock.timed([clock()])
        whole = []
        for _ in range(_PASSES):
            model.zero_grad(set_to_none=True)
            since_s = time.thread_time()
            run()
            whole.append(time.thread_time() - since_s)
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


def _time_in_turn(operators: Sequence[TimedOperator]) -> None:
    """Find the median times of operators that take turns, after a first round that does not count."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    tensors: dict[tuple[int, _OperandLayout], Tensor] = {}
    times: list[list[float]] = [[] for _ in operators]
    with _disable_current_modes(), torch.no_grad():
        calls = [each.make_of(tensors) for each in operators]
        begun_s = time.perf_counter()
        for number in range(_ROUNDS + 1):
            for call, own in zip(calls, times, strict=True):
                since_s = clock()
                call()
                own.append(clock() - since_s)
            if number > 1 and time.perf_counter() - begun_s > _ENOUGH_S:
                break
    for each, own in zip(operators, times, strict=True):
        each.seconds = statistics.median(own[1:])
