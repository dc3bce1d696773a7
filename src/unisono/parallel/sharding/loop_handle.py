"""The handle of a model that is divided in a loop of your own: its `with` blocks, and loading and saving of parts.

The steps are those of `loop_step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from unisono.arguments import flag, real
from unisono.collectives.world import World
from unisono.engine.step_fingerprint import intent_of_call
from unisono.errors import UnisonoError
from unisono.parallel.model_handle import ModelHandle
from unisono.parallel.sharding.divided_model import Caller, DividedModel
from unisono.parallel.sharding.gathering import gather_state
from unisono.parallel.sharding.loop_guards import LoopGuards
from unisono.parallel.sharding.loop_parts import PartLoading, own_part
from unisono.parallel.sharding.loop_setup import LoopArguments
from unisono.parallel.sharding.loop_step import LoopSteps
from unisono.parallel.sharding.units import is_divided
from unisono.parallel.state_parts import load_on_all, refuse_single_part
from unisono.text import a_type

__all__ = ["Sharded"]

_CALLER = Caller(
    "sharded.step(), sharded.no_grad() and sharded.whole()",
    "unisono.parallel.shard",
    "on every rank, and in a step before clip_grad_norm_",
    "write to it in `with sharded.whole():`, on every rank",
)
_Phase = Literal["step", "no_grad", "whole", "state_dict", "load_state_dict"]
_PARTLY_UPDATED = (
    "an earlier step failed on this rank after gradients had been summed, when other ranks may have updated their "
    "parts of the model, and cannot learn of it any more: end the job, and start it again from your last checkpoint"
)
_PARTLY_LOADED = (
    "sharded.load_state_dict failed, on this rank or another one, when some values may have been replaced: load a "
    "whole state before"
)


class Sharded(ModelHandle):
    """The handle of a model that `shard` has divided.

    Every rank calls `step`, `no_grad` and `whole`, in the same order. It lives as long as the optimizers.
    """

    _made_by = "sharded = shard(model, optimizer)"

    def __init__(self, model: nn.Module, arguments: LoopArguments, world: World) -> None:
        self._model, self._optimizers, self._world = model, arguments.optimizers, world
        optimizers = [*self._optimizers.values()]
        device = next(p.device for p in model.parameters())
        is_apart = is_divided(arguments.parallel, device, ranks=world.size)
        divided = (
            DividedModel(arguments.parallel, model, optimizers, world, device, caller=_CALLER) if is_apart else None
        )
        self._division = None if divided is None else divided.division
        self._steps = LoopSteps(model, self._optimizers, arguments.scaler, divided, world)
        self._phase: _Phase | Literal["between steps"] = "between steps"
        self._computing = ExitStack()
        """Blocks come together until it is closed."""
        self._paused = 0
        self._obstacle: str | None = None
        """Why there can be no further step."""
        self._guards = LoopGuards(self, model, optimizers)
        self._find_trained(None)
        if self._division is not None:
            self._division.divide()

    @property
    def world_size(self) -> int:
        """The number of ranks that train together."""
        return self._world.size

    @property
    def loss(self) -> float:
        """The mean over ranks of the losses of the last step, equal on all of them; NaN before the first one."""
        return self._steps.mean_loss

    @property
    def has_weights(self) -> bool:
        """True if this rank has the values of all parameters: in `whole`, with zero=1, and with one process."""
        return self._division is None or self._division.has_weights

    @property
    def has_optimizer_state(self) -> bool:
        """True if this rank has the optimizer's whole state: in `whole`, and with one process."""
        return self._division is None or self._division.is_whole

    @property
    def runs_backward(self) -> bool:
        """True while `backward` runs."""
        return self._steps.runs_backward

    @property
    def updates(self) -> bool:
        """True while the end of a step writes the weights."""
        return self._steps.updates

    @contextmanager
    def step(self, optimizer: str | None = None) -> Iterator[None]:
        """Take a step: call the model and `backward` inside; the end of the block updates the weights.

        Every rank must enter it, also one that has no data: it calls nothing inside, and counts as zero in the mean.
        The step is made on all ranks or on none. If a rank leaves the block with an error, the others raise
        `PeerError`, weights and buffers are those from before it, and the loop may go on. Call no collectives of your
        own inside, unless all ranks have called the same parts of the model before: another rank may wait for a part.

        With a scaler, a step whose scaled gradient is not finite leaves weights and optimizers alone, on all ranks, and
        lowers the scale.

        Args:
            optimizer: The name of the one that updates its parameters, of several; the others' get no gradient. None:
                all of them.

        Raises:
            ValueError: There is no optimizer of that name.
            LossError: On all ranks, if none called `backward`; on one, if its block's output cannot be seen.
            NonFiniteLossError: On all ranks, if a loss or the norm of the gradient is NaN or infinite.
            RankMismatchError: On all ranks, if they make different calls, train different parameters, or have
                different learning rates or other hyperparameters.
            PeerError: Another rank failed in the step.
            UnisonoError: It is called within another block, or ranks no longer agree on what comes next.
        """
        if optimizer is not None and not (isinstance(optimizer, str) and optimizer in self._optimizers):
            told = repr(optimizer) if isinstance(optimizer, str) else a_type(optimizer)
            known = ", ".join(map(repr, filter(None, self._optimizers)))
            raise ValueError(
                f"optimizer is {told}: sharded.step takes the name of one of {known}, or none for all of them"
                if known
                else f"optimizer is {told}, and unisono.parallel.shard was given one without a name: leave it out"
            )
        self._enter("step")
        try:
            self._find_trained(optimizer)
            self._steps.begin()
            try:
                with self._computing:
                    self._computing.enter_context(self._steps.together())
                    yield
                    self._steps.close()
                if not self._steps.is_summed:
                    self._steps.sum(None)
                self._steps.apply()
            except BaseException:
                self._steps.abort()
                if self._steps.is_summed and self._division is not None:
                    self._obstacle = _PARTLY_UPDATED
                raise
        finally:
            self._phase = "between steps"

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of this rank's loss, in place of loss.backward(); ranks sum them meanwhile.

        The gradient of the step is the mean over ranks: so with a loss that is the mean over this rank's batch, that
        of the whole batch if all have equally many samples. With `unisono.data.loader`, whose shares may be unequal,
        pass `loss * batches.weight`.

        Args:
            loss: A tensor with one element.

        Raises:
            TypeError: The loss is no tensor.
            ValueError: It has several elements, or the scaler's scale already.
            UnisonoError: It is called outside of `step`, or again after the last backward of a step.
        """
        if self._phase != "step" or self._steps.is_closed:
            where = "after clip_grad_norm_ in the same step" if self._phase == "step" else "outside of sharded.step()"
            raise UnisonoError(
                f"sharded.backward was called {where}: gradients are summed over ranks once in each "
                "`with sharded.step():`, so call it there, before clipping"
            )
        if self._steps.is_last:
            raise UnisonoError(
                "sharded.backward was called again in one step, and the gradients of the last call are on their way to "
                "other ranks: put all but the last one into `with sharded.no_sync():`"
            )
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss is {a_type(loss)}: give sharded.backward the tensor that the loss function returned")
        if loss.numel() != 1:
            raise ValueError(f"loss has shape {list(loss.shape)}, and must be one number: take loss.mean()")
        if self._steps.is_scaled(loss):
            raise ValueError("loss is scaled, and sharded.backward does that: give it without scaler.scale")
        self._steps.backward(loss, is_last=not self._paused)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of `backward` inside on this rank, to add up: all but those of the last one of a step.

        Memory: the whole gradient on each rank until the step ends. Without it, backward can be called once in a step.
        """
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the norm of the whole gradient, as torch.nn.utils.clip_grad_norm_ does. Every rank must call it.

        Call it in `step`, after the last `backward`. The norm has the same bits on all ranks, from exact sums.

        Args:
            max_norm: The bound.

        Returns:
            The norm before clipping, a float64 scalar. With a scaler it is that of the unscaled gradient, and is not
            finite where the step is going to leave weights alone.

        Raises:
            TypeError, ValueError: max_norm is no positive number.
            NonFiniteLossError, LossError, RankMismatchError, PeerError: See `step`.
            UnisonoError: It is called outside of `step`, or again.
        """
        bound = real("max_norm", max_norm)
        if not bound > 0:
            raise ValueError(f"max_norm={max_norm} must be positive; math.inf returns the norm and clips nothing")
        if self._phase != "step" or self._steps.is_closed:
            where = "twice in one step" if self._phase == "step" else "outside of sharded.step()"
            raise UnisonoError(
                f"sharded.clip_grad_norm_ was called {where}: call it once in `with sharded.step():`, after "
                "sharded.backward(loss)"
            )
        self._steps.close()
        self._computing.close()
        norm = self._steps.sum(bound)
        assert norm is not None
        return torch.tensor(norm, dtype=torch.float64)

    @contextmanager
    def no_grad(self) -> Iterator[None]:
        """Call the model without gradients inside, as in torch.no_grad, for an evaluation. Every rank must enter it.

        Blocks come together when they are called, so no rank needs memory for the whole. Ranks may call the model
        differently often, or not at all. Call no collectives of your own inside.

        Raises:
            RankMismatchError: On all ranks, if they make different calls.
            PeerError: Another rank failed inside.
            UnisonoError: It is called within another block.
        """
        self._enter("no_grad")
        try:
            self._steps.comparison.compare(intent_of_call("sharded.no_grad()", step=self._steps.count))
            with torch.no_grad():
                if self.has_weights:
                    yield
                    return
                assert self._division is not None
                self._division.exchange.begin()
                with self._steps.together():
                    yield
                self._division.exchange.end()
        finally:
            self._phase = "between steps"

    @contextmanager
    def whole(self, *, everywhere: bool = True) -> Iterator[None]:
        """Bring weights and optimizer state together, for the length of a `with` block. Every rank must enter it.

        Inside, model and optimizer are as in one process: `state_dict`, `load_state_dict`, calls of the model. Changes
        count; make the same on every rank.

        Memory: the whole state on each rank, or on rank 0, and another rank's part of the optimizer's.

        Args:
            everywhere: False to bring them to rank 0 alone, to be read there: changes are dropped.

        Raises:
            RankMismatchError: On all ranks, if they make different calls.
            UnisonoError: It is called within another block.
        """
        flag("everywhere", everywhere)
        self._enter("whole")
        try:
            self._steps.comparison.compare(intent_of_call(f"sharded.whole({everywhere=})", step=self._steps.count))
            if self._division is None:
                yield
                return
            gather_state(self._world, self._division, self._optimizers.values(), everywhere=everywhere)
            try:
                yield
            finally:
                self._division.divide()
        finally:
            self._phase = "between steps"

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of weights, buffers and optimizer state, for torch.save. Local.

        The parts of all ranks together are a state that any number of ranks can load, also one process. Memory: a copy
        of the part.

        Raises:
            UnisonoError: It is called within another block.
        """
        self._enter("state_dict")
        self._phase = "between steps"
        return own_part(
            self._model,
            self._optimizers,
            self._division,
            rank=self._world.rank,
            ranks=self._world.size,
            steps=self._steps.count,
        )

    def load_state_dict(self, parts: Iterable[Mapping[str, Any]]) -> None:
        """Load a state from the parts that `state_dict` returned on all ranks. Every rank must call it, with all parts.

        A rank keeps what it needs of each part. With a generator, such as `(torch.load(path, mmap=True) for path in
        paths)`, it needs memory for one of them beside its own.

        Args:
            parts: The parts, in any order, of any number of ranks.

        Raises:
            TypeError: parts is a single part.
            CheckpointError: They are not all parts of one state of this model and optimizer. Load others before the
                next step: some may have been loaded.
            PeerError: Another rank could not load them.
            RankMismatchError: Ranks have loaded different states.
        """
        refuse_single_part(parts)
        self._enter("load_state_dict")

        def load() -> int:
            self._obstacle = _PARTLY_LOADED
            return PartLoading(self._model, self._optimizers, self._division).load(parts)

        try:
            self._steps.count = load_on_all(self._world, "sharded.load_state_dict", load)
            self._obstacle = None
        finally:
            self._phase = "between steps"

    def _enter(self, phase: _Phase) -> None:
        if self._phase != "between steps":
            raise UnisonoError(
                f"sharded.{phase}() was called within sharded.{self._phase}(): leave that block before, on every rank"
            )
        if self._obstacle is not None and (phase != "load_state_dict" or self._obstacle != _PARTLY_LOADED):
            raise UnisonoError(self._obstacle)
        self._phase = phase

    def _find_trained(self, optimizer: str | None) -> None:
        found = self._steps.find_trained(optimizer)
        if found is not None:
            self._guards.watch(found)
