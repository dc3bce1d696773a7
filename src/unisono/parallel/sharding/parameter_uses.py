"""Brings units together when an operation of torch reads one of their parameters, whatever the modules are.

In a forward pass, a unit is together until an operation reads a parameter of another one. In a backward pass, autograd
reads what it has saved without a word, so a unit is given back once nothing refers to its memory but what asks for it
again: `Saved` tensors, which bring their unit together when they are unpacked. Operations of activation checkpointing
save tensors in a backward pass that are no such ones; their unit stays until the last one of these is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode

from unisono.engine.sharded import Division

__all__ = ["ParameterUses", "Saved"]

_DATA = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag")),
        Tensor.data.__set__,  # type: ignore[attr-defined]
    }
)
"""Accesses to attributes that read or replace values, or show them."""
_READS_NOTHING = frozenset(
    {
        Tensor.dim, Tensor.size, Tensor.stride, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__,
        Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.requires_grad_, Tensor.__hash__,
    }
)  # fmt: skip


class Saved:
    """A tensor that autograd has saved, and that lies in the memory of a unit.

    Args:
        unit: The number of the unit.
        tensor: The tensor, detached.
        alive: How many of these there are in each memory.
    """

    __slots__ = ("_alive", "_key", "tensor", "unit")

    def __init__(self, unit: int, tensor: Tensor, alive: dict[int, int]) -> None:
        self.unit, self.tensor, self._alive = unit, tensor, alive
        self._key = tensor.untyped_storage()._cdata
        alive[self._key] = alive.get(self._key, 0) + 1

    def __del__(self) -> None:
        self._alive[self._key] -= 1


class ParameterUses(TorchFunctionMode):
    """Sees operations that read parameters. Within it, each unit is together while they need it.

    Args:
        division: The units.
    """

    def __init__(self, division: Division) -> None:
        super().__init__()
        self._division, units = division, division.units
        self._of_memory = {key: u for u, unit in enumerate(units) for key in (*unit.storages(), *unit.placeholders())}
        self._active = [0] * len(units)
        """How many operations under way read each unit."""
        self._alive: dict[int, int] = {}
        self._last = -1
        """The unit that was brought together last."""
        self._own_references = _references_of_parameter()
        self._node: object = None
        """The node of autograd that runs."""
        self._of_node: set[int] = set()
        """The units that it reads."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch with the units of its arguments together."""
        kwargs = kwargs or {}
        if func is Tensor.backward:
            return self._run_backward(*args, **kwargs)
        is_attribute = getattr(func, "__name__", "") in ("__get__", "__set__")
        if func in _READS_NOTHING or (is_attribute and func not in _DATA):
            return func(*args, **kwargs)
        numbers = sorted({*self._units_of((*args, *kwargs.values()))})
        for number in numbers:
            self._active[number] += 1
        try:
            for number in numbers:
                self.bring(number)
            return func(*args, **kwargs)
        finally:
            for number in numbers:
                self._active[number] -= 1

    def bring(self, number: int) -> None:
        """Bring a unit together, and first give back those that nobody needs."""
        units = self._division.units
        if units[number].is_together:
            return
        with torch._C.DisableTorchFunction():  # this mode is on in a backward pass
            self._give_back(number)
            self._division.exchange.need(number)
        self._last = number

    def save(self, number: int, tensor: Tensor) -> Saved:
        """Return what autograd is to save for a tensor in the memory of a unit."""
        return Saved(number, tensor, self._alive)

    def unpack(self, saved: Saved) -> Tensor:
        """Return what autograd has saved. Its unit stays together while the node that asks for it runs."""
        node = torch._C._current_autograd_node()
        if node is not self._node:
            self._node, self._of_node = node, set()
        self._of_node.add(saved.unit)
        self.bring(saved.unit)
        return saved.tensor

    def end_backward(self) -> None:
        """Give back all units but the last one, with which the next forward pass may begin."""
        self._node, self._of_node = None, set()
        for number, unit in enumerate(self._division.units):
            if unit.is_together and number != self._last:
                unit.divide()

    def _run_backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | Tensor | None = None,
    ) -> None:
        """Do what `Tensor.backward` does, within this mode: the code of a model may run again there."""
        inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs or ())
        gradients = torch.autograd._make_grads((loss,), (gradient,), is_grads_batched=False)
        keeps = create_graph if retain_graph is None else retain_graph
        with self:
            _engine_run_backward(
                (loss,), gradients, keeps, create_graph, inputs, allow_unreachable=True, accumulate_grad=True
            )

    def _give_back(self, wanted: int) -> None:
        is_backward = torch._C._current_autograd_node() is not None
        for number, unit in enumerate(self._division.units):
            if not unit.is_together or self._active[number] or number == wanted:
                continue
            if is_backward and (number in self._of_node or self._is_referred_to(number)):
                continue
            unit.divide()

    def _is_referred_to(self, number: int) -> bool:
        """Return True if anything but a parameter, its unit and `Saved` tensors refers to a unit's memory."""
        unit = self._division.units[number]
        for p in unit.parameters:
            key = p.untyped_storage()._cdata
            if _references(key) > self._own_references + self._alive.get(key, 0):
                return True
        return False

    def _units_of(self, values: Iterable[Any]) -> Iterator[int]:
        for value in values:
            if isinstance(value, Tensor):
                if value.layout is torch.strided and not value.is_meta and not _is_wrapped(value):
                    number = self._of_memory.get(value.untyped_storage()._cdata)
                    if number is not None:
                        yield number
            elif isinstance(value, list | tuple):
                yield from self._units_of(value)


def _is_wrapped(tensor: Tensor) -> bool:
    """Return True for a tensor of torch.func, which has no memory itself."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _references(memory: int) -> int:
    return torch._C._storage_Use_Count(memory)


def _references_of_parameter() -> int:
    """Return how many references there are to memory to which a parameter and its unit refer, and nothing else."""
    whole = torch.empty(1)
    parameter = torch.nn.Parameter(torch.empty(0))
    parameter.data = whole
    return _references(parameter.untyped_storage()._cdata)
