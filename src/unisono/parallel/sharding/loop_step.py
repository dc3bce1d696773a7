"""The steps of a user's loop whose model is divided over ranks: what lies between forward passes and new weights.

The parts are those of a Trainer: `DividedModel` brings blocks together, the engine sums gradients and updates, and
`BufferTransaction` averages buffers. Each rank is a virtual rank here, and what it computes within a step is its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import is_

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from unisono.collectives.world import World
from unisono.engine import BufferTransaction, ConsistencyCheck, Engine, Preparation, Totals, Trained, check_trained
from unisono.engine.consistency import GroupConsistencyCheck, NoConsistencyCheck
from unisono.engine.host_tree_all_reduce import group_all_reduce
from unisono.engine.joint_optimizer import JointOptimizer, parts_of, trained_by
from unisono.engine.local import LocalEngine
from unisono.engine.model_contents import parameter_names
from unisono.engine.sharded import ShardedEngineFactory
from unisono.engine.step_fingerprint import StepFingerprint, intent_of_call
from unisono.engine.step_transaction import STEP_UNDONE, StepTransaction
from unisono.errors import LossError, NonFiniteLossError, UnisonoError
from unisono.job.current import confirm_group
from unisono.parallel.sharding.divided_model import DividedModel

__all__ = ["LoopSteps"]


class _Selection:
    """The optimizers that a step updates: all, or one of several.

    Args:
        optimizers: They, by name.
        modules: The models by the prefix of their names.
        engine: Makes an engine.
    """

    def __init__(
        self,
        optimizers: Mapping[str, Optimizer],
        modules: Mapping[str, nn.Module],
        engine: Callable[[Optimizer], Engine],
    ) -> None:
        parts = [*optimizers.values()]
        self.optimizer = JointOptimizer(parts) if len(parts) > 1 else parts[0]
        self.engine = engine(self.optimizer)
        self.fingerprint = StepFingerprint(optimizers, modules, call="sharded.step")
        self.trained = Trained((), ())
        self.inputs: tuple[Tensor, ...] | None = None
        """The parameters that backward passes compute gradients for; None: all."""
        self.trainable: tuple[Tensor, ...] | None = None
        """The trainable parameters of all optimizers when `trained` was made; None: never."""


class LoopSteps:
    """Takes the steps of a loop. The calls of a step are `find_trained`, `begin`, `backward`, `close`, `sum` and
    `apply`, or `abort`.

    Args:
        model: The model.
        optimizers: Its optimizers by name.
        scaler: What scales losses; None: nothing does.
        divided: The model as it is divided; None if this rank has all of it.
        world: The ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        scaler: GradScaler | None,
        divided: DividedModel | None,
        world: World,
    ) -> None:
        self._model, self._optimizers, self._scaler, self._divided, self._world = (
            model, optimizers, scaler, divided, world,
        )  # fmt: skip
        self.comparison: ConsistencyCheck
        """Compares what ranks are about to do."""
        self._make_engine: Callable[[Optimizer], Engine]
        if divided is None:
            self.comparison = NoConsistencyCheck()
            self._make_engine = partial(LocalEngine, modules=[model], resumes=True)
        else:
            self.comparison = NoConsistencyCheck() if world.size == 1 else GroupConsistencyCheck(world)
            self._make_engine = ShardedEngineFactory(
                world, [model], divided.division, self.comparison, virtual_ranks=world.size, overlap=True
            ).engine
        self._selections: dict[str | None, _Selection] = {}
        """Those of earlier steps, by the name of an optimizer; None: all."""
        self._now = self._select(None)
        """That of the step under way."""
        self._buffers = BufferTransaction(
            {"": model},
            world,
            partial(group_all_reduce, world, None),
            virtual_ranks=world.size,
            parameters_move=divided is not None and not divided.division.keeps_weights,
        )
        if scaler is not None:  # a rank without a loss scales none, but must unscale like the others
            scaler.scale(torch.zeros((), device=next(model.parameters()).device))
        self._transaction = StepTransaction()
        self._trainable: tuple[Tensor, ...] = ()
        """The parameters of all optimizers that require a gradient."""
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

    def find_trained(self, optimizer: str | None) -> tuple[Tensor, ...] | None:
        """List the parameters to train; users may freeze and unfreeze them between steps.

        Args:
            optimizer: The name of the optimizer that the next step updates; None: all of them.

        Returns:
            The parameters of all optimizers that require a gradient, if they have changed.

        Raises:
            ValueError: There are none, or one of them is no parameter of the model or cannot be trained.
        """
        groups = [group for each in self._optimizers.values() for group in each.param_groups]
        trainable = tuple(p for group in groups for p in group["params"] if p.requires_grad)
        self._buffers.find()
        is_new = len(trainable) != len(self._trainable) or not all(map(is_, trainable, self._trainable))
        if is_new:
            for p in self._trainable:
                p.grad = None
            self._trainable = trainable
        self._now = now = self._select(optimizer)
        if now.trainable is not self._trainable:
            self._list_trained(now, "the optimizer" if optimizer is None else f"optimizer {optimizer!r}")
        return trainable if is_new else None

    def _select(self, optimizer: str | None) -> _Selection:
        if optimizer not in self._selections:
            chosen = self._optimizers if optimizer is None else {optimizer: self._optimizers[optimizer]}
            self._selections[optimizer] = _Selection(chosen, {"": self._model}, self._make_engine)
        return self._selections[optimizer]

    def _list_trained(self, selection: _Selection, what: str) -> None:
        """List the parameters that a selection of the optimizers trains."""
        names = parameter_names({"": self._model})
        groups = selection.optimizer.param_groups
        parameters = tuple(p for group in groups for p in group["params"] if p.requires_grad)
        for p in parameters:
            if id(p) not in names:
                raise ValueError(
                    f"{what} has a parameter of shape {list(p.shape)} that the model does not have, so its "
                    "gradient would be that of this rank alone: make it part of the model before unisono.parallel.shard"
                )
        if not parameters:
            raise ValueError(f"{what} has no parameter that requires a gradient: there is nothing to train")
        selection.trained = Trained(tuple(names[id(p)] for p in parameters), parameters)
        if self._divided is None or self._divided.division.has_weights:
            for part in parts_of(selection.optimizer):
                check_trained(trained_by(part, selection.trained), part, scaled=False)
        trained = {id(p) for p in parameters}
        is_part = any(p.requires_grad and id(p) not in trained for p in self._model.parameters())
        selection.inputs = parameters if is_part else None
        selection.trainable = self._trainable

    def begin(self) -> None:
        """Begin a step. Every rank must call it.

        Raises:
            RankMismatchError: On all ranks, if they are about to do different things.
        """
        now = self._now
        options = "" if self._scaler is None else f", scale={self._scaler.get_scale()}"
        self.comparison.compare(now.fingerprint.intent(now.trained, epoch=0, step=self.count, call=0, options=options))
        self._loss, self.is_last, self.is_closed, self.is_summed = None, False, False, False
        now.engine.start(self._transaction, now.trained, leaves=self._world.size)
        self._buffers.start(leaves=self._world.size)  # after the engine, which may move parameters

    def together(self) -> AbstractContextManager[None]:
        """Bring blocks together when they are called, for the length of a `with` block."""
        return nullcontext() if self._divided is None else self._divided.computing()

    def is_scaled(self, loss: Tensor) -> bool:
        """Return True if a loss is what the scaler's `scale` has returned: a product with the scale."""
        scale = None if self._scaler is None else self._scaler._scale
        factors = [getattr(loss.grad_fn, name, None) for name in ("_saved_self", "_saved_other")]
        return scale is not None and any(
            isinstance(factor, Tensor) and factor.data_ptr() == scale.data_ptr() for factor in factors
        )

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Compute the gradients of a loss.

        Args:
            loss: A tensor with one element, not scaled.
            is_last: True to send the gradients of this rank meanwhile; there can be no other backward pass then.
        """
        total = loss.detach().float().reshape(())
        self._loss = total if self._loss is None else self._loss + total
        if is_last:
            self._close_forward()
        self.runs_backward = True
        try:
            with nullcontext() if self._divided is None else self._divided.backward():
                scaled = loss if self._scaler is None else self._scaler.scale(loss)
                scaled.backward(inputs=self._now.inputs)  # type: ignore[no-untyped-call]
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
        self._now.engine.close_leaf(self._world.rank)
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
        self._now.engine.flush()
        self._buffers.launch()
        totals = self._now.engine.finish()
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
        norm = self._now.engine.prepare(Preparation(1 / self._world.size, self._scaler, clip, None))
        if norm is not None and self._scaler is None and not math.isfinite(norm):
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
            self._now.engine.update(self._scaler)
            if self._scaler is not None:
                self._scaler.update()
        finally:
            self.updates = False
        self.mean_loss = self._totals.loss / self._world.size
        self.count += 1

    def abort(self) -> None:
        """Discard the step: buffers and gradients are as before it."""
        self._now.engine.abort(alike=False)
        self._buffers.roll_back()
        if self._scaler is not None:
            self._scaler._per_optimizer_states.clear()  # otherwise it refuses to unscale the gradients of the next step

    def _close_forward(self) -> None:
        """Add this rank's loss to the totals; the next backward pass is its last."""
        has_loss = self._loss is not None
        self.is_last = True
        self._now.engine.close_forward(
            self._world.rank,
            self._loss if self._loss is not None else torch.zeros(()),
            float(has_loss),
            new_buffers=self._buffers.new_buffers(sends_early=self._now.engine.sends_early),
        )
