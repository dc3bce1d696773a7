"""The memory of the tensors that are alive at each moment of a computation, by watching its operators.

Works on fake tensors, which have no memory, as on real ones. What an operator allocates inside and frees before it
returns is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveMemory", "MemoryEvent", "ParameterEvent", "PassEvent", "peak_nbytes", "storage_key"]


class MemoryEvent(NamedTuple):
    """A storage that begins or ends to exist."""

    storage: int
    """Its number."""
    nbytes: int
    """Its size in bytes: negative when it is freed."""


class ParameterEvent(NamedTuple):
    """An operator reads a parameter, or the gradient of a parameter is complete."""

    parameter: int
    """Its number in `model.parameters()`."""
    has_gradient: bool


PassEvent: TypeAlias = MemoryEvent | ParameterEvent


def storage_key(tensor: Tensor) -> int:
    """Return what identifies the storage of a tensor while it exists."""
    key: int = tensor.untyped_storage()._cdata
    return key


def peak_nbytes(events: Iterable[PassEvent], *, without: Iterable[int] = ()) -> int:
    """Return the most bytes that were alive at a time, as events tell.

    Args:
        events: What happened, in order.
        without: Numbers of storages that do not count.

    >>> events = [MemoryEvent(0, 8), MemoryEvent(1, 4), MemoryEvent(0, -8), MemoryEvent(2, 6), MemoryEvent(1, -4)]
    >>> peak_nbytes(events), peak_nbytes(events, without=[0])
    (12, 10)
    """
    left_out = frozenset(without)
    now = most = 0
    for event in events:
        if isinstance(event, MemoryEvent) and event.storage not in left_out:
            now += event.nbytes
            most = max(most, now)
    return most


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each storage that an operator makes while it is active, and when that is freed.

    Args:
        known: Tensors that exist already, which do not count.
        parameters: Those of the model: reads of them are noted, and gradients when they are complete.
        on_operator: Called with each operator, its arguments and its result.
    """

    def __init__(
        self,
        known: Iterable[Tensor] = (),
        *,
        parameters: Sequence[Tensor] = (),
        on_operator: Callable[[Any, Sequence[Any], Mapping[str, Any], Any], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[PassEvent] = []
        self._parameters = {storage_key(p): number for number, p in enumerate(parameters)}
        self._numbers: dict[int, int] = {storage_key(tensor): -1 for tensor in known}
        self._count = 0
        self._on_operator = on_operator

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator, and note what it makes."""
        kwargs = dict(kwargs or {})
        if self._parameters and not func.is_view:
            self._note_reads((args, kwargs))
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                self._note(leaf)
        if self._on_operator is not None:
            self._on_operator(func, args, kwargs, result)
        return result

    def number_of(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage in the events; -1 if it was there before."""
        return self._numbers.get(storage_key(tensor), -1)

    def note_gradient(self, number: int) -> None:
        """Note that the gradient of a parameter is complete."""
        self.events.append(ParameterEvent(number, True))

    def _note_reads(self, values: Any) -> None:
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                number = self._parameters.get(storage_key(leaf))
                if number is not None:
                    self.events.append(ParameterEvent(number, False))

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._numbers:
            return
        self._numbers[key] = number = self._count
        self._count += 1
        nbytes = storage.nbytes()
        self.events.append(MemoryEvent(number, nbytes))
        weakref.finalize(storage, _forget, self._numbers, self.events, key, MemoryEvent(number, -nbytes))


def _forget(numbers: dict[int, int], events: list[PassEvent], key: int, event: MemoryEvent) -> None:
    if numbers.get(key) == event.storage:
        del numbers[key]
    events.append(event)
