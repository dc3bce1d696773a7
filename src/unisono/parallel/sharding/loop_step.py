"""The steps of a user's loop whose model is divided over ranks: what lies between forward passes and new weights.

The parts are those of a Trainer: `DividedModel` brings blocks together, the engine sums gradients and updates, and
`BufferTransaction` averages buffers. Each rank is a virtual rank here, and what it computes within a step is its share.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import is_

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.collectives.world import World
from unisono.engine import BufferTransaction, ConsistencyCheck, Engine, Preparation, Totals, Trained, check_trained
from unisono.engine.consistency import GroupConsistencyCheck, NoConsistencyCheck
from unisono.engine.local import LocalEngine
from unisono.engine.model_contents import parameter_names
from unisono.engine.sharded import ShardedEngineFactory
from unisono.engine.step_fingerprint import StepFingerprint, intent_of_call
from unisono.engine.step_transaction import STEP_UNDONE, StepTransaction
from unisono.engine.tree_all_reduce import TreeAllReduce
from unisono.errors import LossError, NonFiniteLossError, UnisonoError
from unisono.job.current import confirm_group
from unisono.parallel.sharding.divided_model import DividedModel

__all__ = ["LoopSteps"]


class LoopSteps:
    """Takes the steps of a loop. The calls of a step are `begin`, `backward`, `close`, `sum` and `apply`, or
    `abort`.

    Args:
        model: The model.
        optimizer: Its optimizer.
        divided: The model as it is divided; None with one rank.
        world: The ranks.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, divided: DividedModel | None, world: World) -> None:
        self._model, self._optimizer, self._divided, self._world = model, optimizer, divided, world
        self._engine: Engine
        self.comparison: ConsistencyCheck
        """Compares what ranks are about to do."""
        if divided is None:
            self._engine, self.comparison = LocalEngine(optimizer, [model]), NoConsistencyCheck()
        else:
            self.comparison = GroupConsistencyCheck(world)
            self._engine = ShardedEngineFactory(
                world, [model], divided.division, self.comparison, virtual_ranks=world.size, overlap=True
            ).engine(optimizer)
        self._buffers = BufferTransaction(
            {"": model},
            world,
            partial(TreeAllReduce, world),
            virtual_ranks=world.size,
            parameters_move=divided is not None and not divided.division.grid.keeps_weights,
        )
        self._fingerprint = StepFingerprint({"": optimizer}, {"": model}, call="sharded.step")
        self._transaction = StepTransaction()
        self._trained = Trained((), ())
        self._inputs: tuple[Tensor, ...] | None = None
        """The parameters that backward passes compute gradients for; None: all."""
        self._loss: Tensor | None = None
        """The sum of this rank's losses in the step; None before the first."""
        self._totals = Totals(0.0, 0.0, new_buffers=False)
        self.is_last = self.is_closed = self.is_summed = False
        """True once the last backward pass has begun, once this rank's gradients are handed over, and once those of all
        ranks are summed."""
        self.runs_backward = self.updates = False
        """True while `backward` runs, and while `apply` writes the weights."""
        self.count = 0
        """The number of steps made."""
        self.mean_loss = math.nan
        """The mean over ranks of the losses of the last step."""

    def find_trained(self) -> Trained | None:
        """List the parameters to train; users may freeze and unfreeze them between steps.

        Returns:
            The parameters, if they have changed.

        Raises:
            ValueError: There are none, or one of them is no parameter of the model or cannot be trained.
        """
        parameters = [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._buffers.find()
        before = self._trained.parameters
        if parameters and len(parameters) == len(before) and all(map(is_, parameters, before)):
            return None
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
        is_apart = self._divided is not None and not self._divided.division.has_weights
        check_trained(Trained((), ()) if is_apart else self._trained, self._optimizer, scaled=False)
        trained = {id(p) for p in parameters}
        is_part = any(p.requires_grad and id(p) not in trained for p in self._model.parameters())
        self._inputs = self._trained.parameters if is_part else None
        return self._trained

    def begin(self) -> None:
        """Begin a step. Every rank must call it.

        Raises:
            RankMismatchError: On all ranks, if they are about to do different things.
        """
        self.comparison.compare(self._fingerprint.intent(self._trained, epoch=0, step=self.count, call=0))
        self._loss, self.is_last, self.is_closed, self.is_summed = None, False, False, False
        self._engine.start(self._transaction, self._trained, leaves=self._world.size)
        self._buffers.start(leaves=self._world.size)  # after the engine, which may move parameters

    def together(self) -> AbstractContextManager[None]:
        """Bring blocks together when they are called, for the length of a `with` block."""
        return nullcontext() if self._divided is None else self._divided.computing()

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Compute the gradients of a loss.

        Args:
            loss: A tensor with one element.
            is_last: True to send the gradients of this rank meanwhile; there can be no other backward pass then.
        """
        total = loss.detach().float().reshape(())
        self._loss = total if self._loss is None else self._loss + total
        if is_last:
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

    def close(self) -> None:
        """Hand over this rank's gradients, unless they are summed. Within `together`, other ranks learn of an error.

        Raises:
            UnisonoError: They have been handed over, and their sum has failed.
            LossError: A buffer or a parameter was changed in the forward pass as it must not be.
        """
        if self.is_summed:
            return
        if self.is_closed:
            raise UnisonoError(
                "sharded.clip_grad_norm_ failed in this step, and the program went on in its block: leave the block "
                "with the error, and catch it outside"
            )
        if not self.is_last:
            self._close_forward()
        self.is_closed = True
        self._engine.close_leaf(self._world.rank)
        self._buffers.close_leaf(self._world.rank)

    def sum(self, clip: float | None) -> float | None:
        """Sum the gradients over ranks. Every rank must call it, after `close` and outside of `together`.

        Args:
            clip: The bound of their norm; None: no bound.

        Returns:
            Their norm before clipping; None without a bound.

        Raises:
            LossError, NonFiniteLossError, RankMismatchError: On all ranks; see `Sharded.step`.
            PeerError: Another rank has failed.
        """
        self._engine.flush()
        self._buffers.launch()
        totals = self._engine.finish()
        self._buffers.receive(self._transaction)
        confirm_group()
        self.comparison.compare(
            intent_of_call(
                "the end of sharded.step()" if clip is None else f"sharded.clip_grad_norm_({clip})", step=self.count
            )
        )
        where = f"step {self.count}"
        if not math.isfinite(totals.loss):
            losses = self._world.gather(0.0 if self._loss is None else self._loss.item(), "sharded.step")
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
        self._totals, self.is_summed = totals, True
        return norm

    def apply(self) -> None:
        """Write buffers, weights and optimizer state."""
        self._buffers.commit(self._transaction, new_buffers=self._totals.new_buffers)
        self.updates = True
        try:
            self._engine.update(None)
        finally:
            self.updates = False
        self.mean_loss = self._totals.loss / self._world.size
        self.count += 1

    def abort(self) -> None:
        """Discard the step: buffers and gradients are as before it."""
        self._engine.abort(alike=False)
        self._buffers.roll_back()

    def _close_forward(self) -> None:
        """Add this rank's loss to the totals; the next backward pass is its last."""
        has_loss = self._loss is not None
        self.is_last = True
        self._engine.close_forward(
            self._world.rank,
            self._loss if self._loss is not None else torch.zeros(()),
            float(has_loss),
            new_buffers=self._buffers.new_buffers(sends_early=self._engine.sends_early),
        )
