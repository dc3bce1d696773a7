"""The record of one forward pass: a numbered list of calls, and the tensors that they read, write and make.

A call is a call of a block, or of a torch function between blocks. A tensor object has several values if it is modified
in place: each modification makes a new one. All numbers count from 0 in the order in which one process calls.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from unisono.parallel.pipeline.leaves import Builder, flatten
from unisono.parallel.pipeline.placeholder import TensorLayout

__all__ = ["Call", "ForwardProgram", "ObjectRef", "ParameterRef", "TensorObject", "Value", "learned_from"]


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """A place in the result of a call that holds a tensor."""

    number: int


@dataclass(frozen=True, slots=True)
class ParameterRef:
    """A place in the result of a call that holds a parameter or a buffer of a block itself."""

    name: str


@dataclass(slots=True)
class TensorObject:
    """A tensor as the model's code holds it: an object that keeps its identity when it is modified in place."""

    number: int
    call: int | None
    """The call that made it; None for inputs, buffers and constants, which exist before."""
    values: list[int] = field(default_factory=list)
    storage: int = 0
    """Identifies the memory that it shares with its views."""


@dataclass(frozen=True, slots=True)
class Value:
    """The value of a tensor object between two modifications."""

    number: int
    object: int
    call: int | None
    """The call that made or modified it."""
    everywhere: bool
    """True if it depends on no block, parameter or random number: every stage computes it on its own."""
    layout: TensorLayout


@dataclass(slots=True)
class Call:
    """One call of a block or of a torch function."""

    number: int
    name: str
    function: Any
    """The torch function; None for a block."""
    block: str | None
    line: str
    reads: tuple[int, ...] = ()
    """The values whose contents it needs."""
    writes: tuple[int, ...] = ()
    """The values that it makes by modifying a tensor in place."""
    parameters: tuple[str, ...] = ()
    read_buffers: tuple[str, ...] = ()
    """The buffers of blocks that it reads, its own or others'."""
    written_buffers: tuple[str, ...] = ()
    """The buffers of a block that it modifies, such as BatchNorm's running statistics."""
    everywhere: bool = False
    """True if every stage runs it that needs its result."""
    always: bool = False
    """True if every stage runs it in any case: the model's code reads numbers from it."""
    on_stage_of: int | None = None
    """A value: the call runs on the stage that makes it, since it only attaches something to its gradient."""
    hooks: int = 0
    """Which use of hooks for saved tensors it is called within, such as activation checkpointing; 0: none."""
    has_hooks: bool = False
    """True if it uses such hooks within itself."""
    seen: Hashable = None
    """Facts that the model's code learns from its result: numbers that it reads, shapes that depend on them."""
    draws: bool = False
    """True if it draws random numbers."""
    in_function: bool = False
    """True if it is called while gradients are off, as in an `autograd.Function`, which may make its result part of a
    graph without another call."""
    results: tuple[Any, ...] = ()
    """The leaves of its result: an ObjectRef or ParameterRef for each tensor, other leaves as they are."""
    build: Builder = next
    """Builds its result from the leaves."""


def learned_from(result: Any) -> Hashable:
    """Return what code learns from the result of a call without calling torch: numbers, and shapes of tensors.

    >>> import torch
    >>> learned_from(torch.ones(2) == 1) == learned_from(torch.ones(2) == 2), learned_from([1.5]) == learned_from([2])
    (True, False)
    """
    return tuple(
        TensorLayout.of(leaf)
        if isinstance(leaf, Tensor)
        else (leaf.shape, leaf.tobytes())
        if hasattr(leaf, "tobytes")
        else repr(leaf)
        for leaf in flatten(result)[0]
    )


@dataclass(slots=True)
class ForwardProgram:
    """All calls of one forward pass."""

    calls: list[Call] = field(default_factory=list)
    objects: list[TensorObject] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    results: tuple[int, ...] = ()
    """The values that the whole function returned."""
    inputs: dict[int, int] = field(default_factory=dict)
    """The object of each tensor among the inputs, by its place."""
    reads_numbers: bool = False
    """True if the path through the code depends on numbers in the inputs: another batch may take another one."""

    def first_call_of(self, block: str) -> int | None:
        """Return the number of the first call of a block, or None if it is never called."""
        return next((call.number for call in self.calls if call.block == block), None)
