"""Shards in a loop of your own: `shard` and the handle that it returns.

The parts are those of a Trainer: `DividedModel` brings blocks together, the engine sums gradients and updates, and
`BufferTransaction` averages buffers. Each rank is a virtual rank here, and what it computes within a step is its share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from operator import is_
from typing import Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.arguments import flag, real
from unisono.collectives.construction import construct_on_all
from unisono.collectives.group import known_group
from unisono.collectives.world import World
from unisono.engine import BufferTransaction, ConsistencyCheck, Engine, Preparation, Totals, Trained, check_trained
from unisono.engine.consistency import GroupConsistencyCheck, NoConsistencyCheck
from unisono.engine.description import check_equal_documents
from unisono.engine.local import LocalEngine
from unisono.engine.model_contents import parameter_names
from unisono.engine.sharded import ShardedEngineFactory
from unisono.engine.step_fingerprint import StepFingerprint, intent_of_call
from unisono.engine.step_transaction import STEP_UNDONE, StepTransaction
from unisono.engine.tree_all_reduce import MakeAllReduce, TreeAllReduce
from unisono.errors import LossError, NonFiniteLossError, UnisonoError
from unisono.job.current import confirm_group
from unisono.job.user_function import refuse_inside
from unisono.parallel.sharding.divided_model import Caller, DividedModel
from unisono.parallel.sharding.gathering import gather_state
from unisono.parallel.sharding.loop_guards import LoopGuards
from unisono.parallel.sharding.loop_setup import check_loop, describe_loop, equalize
from unisono.parallel.sharding.shard import Shard
from unisono.text import a_type

__all__ = ["Sharded", "shard"]

_CALLER = Caller(
    "sharded.step(), sharded.no_grad() and sharded.whole()",
    "unisono.parallel.shard",
    "on every rank, and in a step before clip_grad_norm_",
)
_NONE = Trained((), ())


def shard(model: nn.Module, optimizer: Optimizer, *, parallel: Shard | None = None) -> Sharded:
    """Divide a model, its gradients and its optimizer's state over all ranks, in a loop of your own.

    Every rank must call it, with the same model and optimizer; it begins the job, as `build` does. The weights and
    buffers of all ranks are set to those of rank 0, unless `build` made the model, which has compared them. From then
    on each rank keeps its part alone. With one process nothing is divided, and the handle works in the same way.

    Memory and traffic: as with a Trainer of one share for each rank; see `Shard`.

    Args:
        model: The model, on the CPU. A `Trainer` or another `shard` must not have it.
        optimizer: Its optimizer, which treats each element of a parameter alone. It may have state, equal on all ranks.
        parallel: How to divide. None: as the model was built by `build`; for another model, `Shard()`.

    Returns:
        The handle with which the loop trains.

    Raises:
        TypeError: An argument has the wrong type, or the model is wrapped by another library.
        ValueError: The model or the optimizer cannot be divided so; the message says why and what to do.
        RankMismatchError: Models, optimizers or arguments differ between ranks. Raised on all ranks.
        PeerError: Another rank raised a TypeError or ValueError, has died or does not come in time.
    """
    refuse_inside("unisono.parallel.shard")
    world = World.connect(torch.device("cpu"))

    def check() -> Shard:
        return check_loop(model, optimizer, parallel, ranks=world.size)

    if world.group is None:
        settings = check()
    else:
        settings, _ = construct_on_all(known_group(world.group), "unisono.parallel.shard", check, lambda _: None)
    check_equal_documents(world, describe_loop(settings, model, optimizer), given_to="unisono.parallel.shard")
    equalize(world, model, optimizer)
    return Sharded(model, optimizer, settings, world)


class Sharded:
    """The handle of a model that `shard` has divided.

    Every rank calls `step`, `no_grad` and `whole`, in the same order. It lives as long as the optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, settings: Shard, world: World) -> None:
        self._model, self._optimizer, self._world = model, optimizer, world
        self._divided: DividedModel | None = None
        self._engine: Engine
        self._comparison: ConsistencyCheck
        all_reduce: MakeAllReduce = partial(TreeAllReduce, world)
        if world.size == 1:
            self._engine, self._comparison = LocalEngine(optimizer, [model]), NoConsistencyCheck()
        else:
            self._divided = DividedModel(settings, model, [optimizer], world, caller=_CALLER)
            self._comparison = GroupConsistencyCheck(world)
            self._engine = ShardedEngineFactory(
                world, [model], self._divided.division, self._comparison, virtual_ranks=world.size, overlap=True
            ).engine(optimizer)
        self._buffers = BufferTransaction(
            {"": model},
            world,
            all_reduce,
            virtual_ranks=world.size,
            parameters_move=self._divided is not None and not self._divided.division.grid.keeps_weights,
        )
        self._fingerprint = StepFingerprint({"": optimizer}, {"": model}, call="sharded.step")
        self._transaction = StepTransaction()
        self._trained = _NONE
        self._inputs: tuple[Tensor, ...] | None = None
        """The parameters that backward passes compute gradients for; None: all."""
        self._phase: Literal["between steps", "step", "no_grad", "whole"] = "between steps"
        self._computing = ExitStack()
        """Blocks come together until it is closed."""
        self._paused = 0
        self._loss: Tensor | None = None
        """The sum of this rank's losses in the step; None before the first."""
        self._is_last = self._is_summed = self._is_broken = False
        """True once the last backward pass has begun; once gradients are summed over ranks; and after a failure
        then."""
        self.runs_backward = self.updates = False
        """True while `backward` runs, and while the end of a step writes the weights."""
        self._steps = 0
        self._totals = Totals(0.0, 0.0, new_buffers=False)
        self._mean_loss = math.nan
        self._guards = LoopGuards(self, model, optimizer)
        self._find_trained()
        if self._divided is not None:
            self._divided.division.divide()

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse the call: the handle is not a model.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "shard() returns a handle and leaves the model as it is: keep both, as in sharded = shard(model, "
            "optimizer), and call the model. model = shard(model, optimizer) loses it."
        )

    @property
    def world_size(self) -> int:
        """The number of ranks that train together."""
        return self._world.size

    @property
    def loss(self) -> float:
        """The mean over ranks of the losses of the last step, equal on all of them; NaN before the first one."""
        return self._mean_loss

    @property
    def has_weights(self) -> bool:
        """True if this rank has the values of all parameters: in `whole`, with zero=1, and with one process."""
        return self._divided is None or self._divided.division.has_weights

    @property
    def has_optimizer_state(self) -> bool:
        """True if this rank has the optimizer's whole state: in `whole`, and with one process."""
        return self._divided is None or self._divided.division.is_whole

    @contextmanager
    def step(self) -> Iterator[None]:
        """Take a step: call the model and `backward` inside; the end of the block updates the weights.

        Every rank must enter it, also one that has no data: it calls nothing inside, and counts as zero in the mean.
        The step is made on all ranks or on none. If a rank leaves the block with an error, the others raise
        `PeerError`, weights and buffers are those from before it, and the loop may go on. Call no collectives of your
        own inside: ranks may be waiting for each other's parts.

        Raises:
            LossError: On all ranks, if none called `backward`; on one, if its block's output cannot be seen.
            NonFiniteLossError: On all ranks, if a loss or the norm of the gradient is NaN or infinite.
            RankMismatchError: On all ranks, if they make different calls, train different parameters, or have
                different learning rates or other hyperparameters.
            PeerError: Another rank failed in the step.
            UnisonoError: It is called within another block, or ranks no longer agree on what comes next.
        """
        self._enter("step")
        try:
            self._find_trained()
            self._comparison.compare(self._fingerprint.intent(self._trained, epoch=0, step=self._steps, call=0))
            self._loss, self._is_last, self._is_summed = None, False, False
            self._engine.start(self._transaction, self._trained, leaves=self._world.size)
            self._buffers.start(leaves=self._world.size)  # after the engine, which may move parameters
            try:
                with self._computing:
                    self._computing.enter_context(self._together())
                    yield
                if not self._is_summed:
                    self._sum(None)
                self._apply()
            except BaseException:
                self._engine.abort(alike=False)
                self._buffers.roll_back()
                # Others may have updated their parts, and cannot learn of the error any more.
                self._is_broken = self._is_summed and self._divided is not None
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
            ValueError: It has several elements.
            UnisonoError: It is called outside of `step`, or again after the last backward of a step.
        """
        if self._phase != "step" or self._is_summed:
            where = "after clip_grad_norm_ in the same step" if self._phase == "step" else "outside of sharded.step()"
            raise UnisonoError(
                f"sharded.backward was called {where}: gradients are summed over ranks once in each "
                "`with sharded.step():`, so call it there, before clipping"
            )
        if self._is_last:
            raise UnisonoError(
                "sharded.backward was called again in one step, and the gradients of the last call are on their way to "
                "other ranks: put all but the last one into `with sharded.no_sync():`"
            )
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss is {a_type(loss)}: give sharded.backward the tensor that the loss function returned")
        if loss.numel() != 1:
            raise ValueError(f"loss has shape {list(loss.shape)}, and must be one number: take loss.mean()")
        total = loss.detach().float().reshape(())
        self._loss = total if self._loss is None else self._loss + total
        if not self._paused:
            self._close_forward()
        self.runs_backward = True
        try:
            with nullcontext() if self._divided is None else self._divided.backward():
                loss.backward(inputs=self._inputs)  # type: ignore[no-untyped-call]
        except RuntimeError:
            self._buffers.check_parameters()  # autograd refuses to use those that the forward pass has written to
            raise
        finally:
            self.runs_backward = False

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
            The norm before clipping, a float64 scalar.

        Raises:
            TypeError, ValueError: max_norm is no positive number.
            NonFiniteLossError, LossError, RankMismatchError, PeerError: See `step`.
            UnisonoError: It is called outside of `step`, or again.
        """
        bound = real("max_norm", max_norm)
        if not bound > 0:
            raise ValueError(f"max_norm={max_norm} must be positive; math.inf returns the norm and clips nothing")
        if self._phase != "step" or self._is_summed:
            where = "twice in one step" if self._phase == "step" else "outside of sharded.step()"
            raise UnisonoError(
                f"sharded.clip_grad_norm_ was called {where}: call it once in `with sharded.step():`, after "
                "sharded.backward(loss)"
            )
        self._computing.close()
        norm = self._sum(bound)
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
            self._comparison.compare(intent_of_call("sharded.no_grad()", step=self._steps))
            with torch.no_grad():
                if self.has_weights:
                    yield
                    return
                assert self._divided is not None
                exchange = self._divided.division.exchange
                exchange.begin()
                with self._together():
                    yield
                exchange.end()
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
            self._comparison.compare(intent_of_call(f"sharded.whole({everywhere=})", step=self._steps))
            if self._divided is None:
                yield
                return
            division = self._divided.division
            gather_state(self._world, division, [self._optimizer], everywhere=everywhere)
            try:
                yield
            finally:
                division.divide()
        finally:
            self._phase = "between steps"

    def _enter(self, phase: Literal["step", "no_grad", "whole"]) -> None:
        if self._phase != "between steps":
            raise UnisonoError(
                f"sharded.{phase}() was called within sharded.{self._phase}(): leave that block before, on every rank"
            )
        if self._is_broken:
            raise UnisonoError(
                "an earlier step failed on this rank after gradients had been summed, when other ranks may have "
                "updated their parts of the model: end the job, and start it again from your last checkpoint"
            )
        self._phase = phase

    def _together(self) -> AbstractContextManager[None]:
        return nullcontext() if self._divided is None else self._divided.computing()

    def _find_trained(self) -> None:
        """List the parameters to train; users may freeze and unfreeze them between steps."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._buffers.find()
        before = self._trained.parameters
        if parameters and len(parameters) == len(before) and all(map(is_, parameters, before)):
            return
        names = parameter_names({"": self._model})
        for p in parameters:
            if id(p) not in names:
                raise ValueError(
                    f"the optimizer has a parameter of shape {list(p.shape)} that the model does not have, so its "
                    "gradient would be that of this rank alone: make it part of the model before unisono.parallel.shard"
                )
        if not parameters:
            raise ValueError("the optimizer has no parameter that requires a gradient: there is nothing to train")
        for p in before:
            p.grad = None
        self._trained = Trained(tuple(names[id(p)] for p in parameters), tuple(parameters))
        check_trained(self._trained if self.has_weights else _NONE, self._optimizer, scaled=False)
        trained = {id(p) for p in parameters}
        is_part = any(p.requires_grad and id(p) not in trained for p in self._model.parameters())
        self._inputs = self._trained.parameters if is_part else None
        self._guards.watch(parameters)

    def _close_forward(self) -> None:
        """Add this rank's loss to the totals; the next backward pass is its last."""
        has_loss = self._loss is not None
        self._is_last = True
        self._engine.close_forward(
            self._world.rank,
            self._loss if self._loss is not None else torch.zeros(()),
            float(has_loss),
            new_buffers=self._buffers.new_buffers(sends_early=self._engine.sends_early),
        )

    def _sum(self, clip: float | None) -> float | None:
        """Sum the gradients over ranks. Return their norm before clipping; None without a bound."""
        if not self._is_last:
            self._close_forward()
        self._engine.close_leaf(self._world.rank)
        self._buffers.close_leaf(self._world.rank)
        self._engine.flush()
        self._buffers.launch()
        totals = self._engine.finish()
        self._buffers.receive(self._transaction)
        confirm_group()
        self._comparison.compare(
            intent_of_call(
                "the end of sharded.step()" if clip is None else f"sharded.clip_grad_norm_({clip})", step=self._steps
            )
        )
        where = f"step {self._steps}"
        if not math.isfinite(totals.loss):
            losses = self._world.gather(math.nan if self._loss is None else self._loss.item(), "sharded.step")
            bad = ", ".join(f"{loss} on rank {rank}" for rank, loss in enumerate(losses) if not math.isfinite(loss))
            raise NonFiniteLossError(
                f"the loss of {where} is {bad or 'finite on each rank, and their sum is not'}. {STEP_UNDONE} Look at "
                "the samples, or lower the learning rate. A parameter that is used without a call of its block is NaN "
                "there: leave such blocks out of by= of Shard."
            )
        if totals.weight == 0:
            raise LossError(
                f"no rank called sharded.backward in {where}, so there is nothing to update: leave out the step, on "
                "every rank"
            )
        norm = self._engine.prepare(Preparation(1 / self._world.size, None, clip, None))
        if norm is not None and not math.isfinite(norm):
            raise NonFiniteLossError(
                f"the norm of the gradient of {where} is {norm}, though all losses are finite. {STEP_UNDONE} Look for "
                "roots or logarithms of zero, or lower the learning rate."
            )
        self._totals, self._is_summed = totals, True
        return norm

    def _apply(self) -> None:
        """Write buffers, weights and optimizer state."""
        self._buffers.commit(self._transaction, new_buffers=self._totals.new_buffers)
        self.updates = True
        try:
            self._engine.update(None)
        finally:
            self.updates = False
        self._mean_loss = self._totals.loss / self._world.size
        self._steps += 1
