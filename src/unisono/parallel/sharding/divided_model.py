"""The model of a run that is divided over ranks, while it computes: blocks come together when they are called.

In a forward pass, a block is together from its call until another block is called. In a backward pass it is from the
moment when the first gradient of its outputs arrives until those of all its inputs have, or, if that cannot be seen,
until the end of the pass. A tensor that autograd has saved and that lies in a block's memory brings the block together
when it is read, whatever the order. Blocks that compute again in a backward pass (activation checkpointing) stay
together there, since autograd may hold what they have saved again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from unisono.collectives.world import World
from unisono.engine.base import Trained
from unisono.engine.model_contents import plain_name
from unisono.engine.sharded import Division, ShardedUnit
from unisono.engine.trainable import sharing_obstacle
from unisono.errors import LossError, UnisonoError
from unisono.parallel.call_check import CallCheck
from unisono.parallel.pipeline.blocks import calls_seen_by
from unisono.parallel.sharding.built_parts import built_parts
from unisono.parallel.sharding.parameter_uses import ParameterUses, Saved
from unisono.parallel.sharding.shard import Shard
from unisono.parallel.sharding.units import REST, grid_of, units_of

__all__ = ["TRAINER", "Caller", "DividedModel", "check_memory"]


class Caller(NamedTuple):
    """The caller of a divided model, for messages."""

    places: str
    """Where the model may be called."""
    given: str
    """The call that has divided it."""
    later: str
    """The remedy for calling it at another time."""
    writes: str
    """The remedy for writing to its parameters."""


TRAINER = Caller(
    "trainer.step, trainer.evaluate and trainer.predict",
    "parallel=Shard(...)",
    "or call it after the loop over trainer.epochs",
    "write to it before the first step or after the loop over trainer.epochs, or by trainer.load",
)


class DividedModel:
    """A model whose parameters are divided over ranks.

    Args:
        shard: The user's settings.
        model: The model.
        optimizers: The optimizers of the run.
        world: The ranks.
        device: Where the model computes.
        caller: What calls the model.

    Raises:
        ValueError: A name is not that of a block, or the memory of a parameter cannot be divided.
    """

    def __init__(
        self,
        shard: Shard,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        world: World,
        device: torch.device,
        *,
        caller: Caller = TRAINER,
    ) -> None:
        self.model, self._shard, self._world, self._device, self._caller = model, shard, world, device, caller
        self.divides_sums = shard.sums == "divided"
        """True if sums of gradients are divided over ranks after each share."""
        built = built_parts(model)
        if built is None:
            check_memory(model)
        blocks, unit_of, members = units_of(shard, model)
        grid, on_cpu = grid_of(shard, device, rank=world.rank, ranks=world.size), shard.offloads(device)
        units = (
            [
                ShardedUnit(name, {plain_name(each): p for each, p in own.items()}, grid, on_cpu=on_cpu)
                for name, own in members.items()
            ]
            if built is None
            else built.units
        )
        self._blocks = blocks or {}
        numbers = {unit.name: number for number, unit in enumerate(units)}
        self._numbers = {name: numbers[unit] for name, unit in unit_of.items()}
        """The number of the unit of each block."""
        self.division = Division(world, units, optimizers, grid, is_whole=built is None)
        self._uses = ParameterUses(self.division) if blocks is None else None
        """Brings units together by the operations that read them; None: calls of blocks do."""
        self._alive: dict[int, int] = {}
        self._of_storage = {key: u for u, unit in enumerate(units) for key in unit.storages()}
        self._placeholders = {
            key: name for unit in units for key, name in zip(unit.placeholders(), unit.names, strict=True)
        }
        self._calls: Counter[int] = Counter()
        """How often blocks of each unit were called in the forward pass of this micro-batch."""
        self._ended: Counter[int] = Counter()
        """How many of these calls' backward passes are seen to have ended."""
        self._called: set[str] = set()
        """The blocks that were called in it."""
        self._repeated: set[int] = set()
        """The units of which a block was called twice: what it has saved may be read at any time."""
        self._active = [0] * len(units)
        """How many calls of each unit are under way."""
        self._left: int | None = None
        """The unit that is together though its call has ended: the backward pass may begin with it."""
        self._is_backward = self._is_computing = False
        if built is None:
            model.register_forward_pre_hook(CallCheck(self))
        else:
            built.owned_by(self)

    def copied(self, model: nn.Module) -> DividedModel:
        """Return a copy of the model as it is divided in the same way; no optimizer trains it."""
        return DividedModel(self._shard, model, (), self._world, self._device, caller=self._caller)

    def check_call(self, module: nn.Module) -> None:
        """Refuse a call of the model where its blocks cannot come together.

        Raises:
            UnisonoError: No step, evaluation or prediction is under way, and the model is divided.
        """
        if not self._is_computing and not self.division.has_weights:
            raise UnisonoError(
                f"{type(module).__name__} was called outside of {self._caller.places}, and with "
                f"{self._caller.given} each rank has a part of its parameters alone: use one of these, "
                f"{self._caller.later}"
            )

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Bring blocks together when they are called, for the length of a `with` block. Each rank calls this.

        The exchange has begun. If the block ends with an error, the other ranks learn of it.
        """
        division = self.division
        self._is_computing = True
        try:
            if division.has_weights:
                yield
                return
            self._refuse_writes()
            if self._uses is not None:
                with self._uses, saved_tensors_hooks(self._pack, self._unpack):
                    yield
                return
            with calls_seen_by(self._blocks, self._call), saved_tensors_hooks(self._pack, self._unpack):
                if REST in self._numbers:
                    self._bring(self._numbers[REST])
                yield
        except BaseException:
            division.exchange.fail()
            raise
        finally:
            self._is_computing = self._is_backward = False
            self._left = None
            self._forget_calls()
            self._active = [0] * len(self._active)
            if not division.has_weights:
                for unit in division.units:
                    if unit.is_together:
                        unit.divide()

    def _refuse_writes(self) -> None:
        """Refuse writes to parameters that are apart, whose values would be lost."""
        found = [name for unit in self.division.units if (name := unit.written_apart()) is not None]
        if found:
            raise UnisonoError(
                f"parameter {found[0]!r} was written to where this rank has no more than a part of it, so that the "
                f"values are lost (torch refuses that, except for fill_ and zero_): {self._caller.writes}"
            )

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run the backward pass of a micro-batch within this."""
        self._is_backward = True
        try:
            yield
        finally:
            self._is_backward = False
            if self.division.has_weights:
                pass
            elif self._uses is not None:
                self._uses.end_backward()
            else:
                for number, unit in enumerate(self.division.units):
                    if unit.is_together and unit.name != REST and number != self._left:
                        unit.divide()
                self._forget_calls()

    def _forget_calls(self) -> None:
        self._calls.clear()
        self._ended.clear()
        self._called.clear()
        self._repeated.clear()

    def _call(self, name: str, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a block."""
        number = self._numbers[name]
        inputs = [] if self._is_backward else _inner_tensors((args, kwargs))
        if not self._is_backward:
            self._calls[number] += 1
            if name in self._called:
                self._repeated.add(number)
            self._called.add(name)
        self._bring(number)
        self._active[number] += 1
        try:
            result = own(*args, **kwargs)
        finally:
            self._active[number] -= 1
        if self._is_backward:
            return result
        self._left = number
        if torch.is_grad_enabled() or inputs:
            self._watch(number, name, inputs, result)
        return result

    def _watch(self, number: int, name: str, inputs: Sequence[Tensor], result: Any) -> None:
        """See when the backward pass of a call begins and ends."""
        outputs = _inner_tensors(result)
        if torch.is_grad_enabled() and not outputs and not any(isinstance(x, Tensor) for x in tree_leaves(result)):
            raise LossError(
                f"block {name!r} returned an object of type {type(result).__name__}, in which no tensor is found, so "
                "its backward pass cannot be seen: return a tensor, a tuple, a dict, or a class that is registered by "
                "torch.utils._pytree.register_pytree_node; or leave the block out of by="
            )
        for output in outputs:
            output.register_hook(partial(self._begin_backward, number))  # type: ignore[no-untyped-call]
        if inputs:
            waiting = {id(tensor) for tensor in inputs}
            for tensor in inputs:
                tensor.register_hook(partial(self._end_backward, number, waiting, id(tensor)))  # type: ignore[no-untyped-call]

    def _begin_backward(self, number: int, _: Tensor) -> None:
        self._bring(number)

    def _end_backward(self, number: int, waiting: set[int], own: int, _: Tensor) -> None:
        if own in waiting:
            waiting.discard(own)
            self._ended[number] += not waiting
        is_over = not waiting and self._ended[number] == self._calls[number] and number not in self._repeated
        if not is_over or not self._is_backward or self._active[number]:
            return
        if not self.division.has_weights and self.division.units[number].is_together:
            self.division.units[number].divide()

    def _bring(self, number: int) -> None:
        """Bring a unit together, and give back the one whose call ended before."""
        unit, left = self.division.units[number], self._left
        if left is not None and left != number and not self._active[left] and not self._is_backward:
            self._left = None
            if self.division.units[left].is_together:
                self.division.units[left].divide()
        if not unit.is_together:
            self.division.exchange.need(number)
            if self._is_backward:
                self._left = number  # the forward pass of the next micro-batch may begin with the last one

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.layout is not torch.strided or tensor.is_meta:
            return tensor.detach()
        key = tensor.untyped_storage()._cdata
        number = self._of_storage.get(key)
        if number is not None and self._uses is not None:
            return self._uses.save(number, tensor.detach())
        if number is not None:
            return Saved(number, tensor.detach(), self._alive)
        if key in self._placeholders:
            raise LossError(
                f"parameter {self._placeholders[key]!r} was used outside of its block, where this rank has no more "
                "than a part of it: leave its block out of by=, so that it is there in the whole step, or name a "
                "block around all of its uses"
            )
        return tensor.detach()

    def _unpack(self, saved: Any) -> Tensor:
        if type(saved) is not Saved:
            return saved  # type: ignore[no-any-return]
        if self._uses is not None:
            return self._uses.unpack(saved)
        self._bring(saved.unit)
        return saved.tensor


def check_memory(model: nn.Module, what: str = "Shard") -> None:
    """Refuse parameters whose memory cannot come and go, or of which ranks cannot update parts.

    Args:
        model: The model.
        what: What divides it, for messages.

    Raises:
        ValueError: There is one.
    """
    named = dict(model.named_parameters())
    devices = sorted({str(p.device) for p in named.values()})
    if len(devices) > 1:
        raise ValueError(f"{what} divides models on one device for each rank, and this one is on {', '.join(devices)}")
    obstacle = sharing_obstacle(Trained(tuple(named), tuple(named.values())), [*named.values(), *model.buffers()])
    if obstacle is not None:
        raise ValueError(
            f"{what} lets each rank have a part of each parameter's memory, and {obstacle}. Give it memory of its own: "
            "p.data = p.data.contiguous().clone()"
        )


def _inner_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a value that autograd has computed."""
    return [x for x in tree_leaves(value) if isinstance(x, Tensor) and x.requires_grad and not x.is_leaf]
