"""One step as a transaction: compute this rank's shares, sum over all ranks, check, and only then update.

Until the summed loss is known to be finite, nothing changes that could not be undone: if anything fails, gradients are
discarded and buffers restored, and the weights are written last.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from operator import is_
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.data.batch import Batch
from unisono.embedding import TableOptimizer
from unisono.engine import (
    STEP_UNDONE,
    BufferTransaction,
    EngineFactory,
    Preparation,
    StepTransaction,
    Totals,
    Trained,
    check_trained,
    drop,
    parts_of,
    trained_by,
)
from unisono.engine.local_steps import LocalStepsEngine
from unisono.engine.model_contents import parameter_names
from unisono.engine.sharded import ShardedEngine, ShardedEngineFactory
from unisono.engine.staged import DividedStagedEngine, StagedBuffers, StagedEngineFactory
from unisono.engine.step_fingerprint import StepFingerprint
from unisono.engine.weight_comparison import WeightComparison
from unisono.errors import LossError, NonFiniteLossError, TableFullError
from unisono.job.current import confirm_group
from unisono.job.user_function import count_collectives, enter, leave, refuse_collectives_since
from unisono.metrics.average import Average
from unisono.trainer.attribute_writes import AttributeWrites
from unisono.trainer.changed_gradients import check_gradients
from unisono.trainer.closure import check_closure, needs_closure, step_with_closure
from unisono.trainer.loop_actions import LeftGradients, LoopActions
from unisono.trainer.loss_check import check_totals
from unisono.trainer.modes import begin_training, idle_dropout
from unisono.trainer.modules import foreign_parameter
from unisono.trainer.run_context import RunContext
from unisono.trainer.step_gradients import PLAIN_STEP, Loss, StepGradients, StepOptions
from unisono.trainer.step_result import StepResult

__all__ = ["Loss", "StepOptions", "StepRunner"]


class _Evaluation(NamedTuple):
    """The result of a batch at the present weights."""

    loss: float
    """Mean loss."""
    weight: float
    """Divisor of the losses."""
    grad_norm: float | None
    """Norm of the gradient before clipping; None without clipping."""
    values: Mapping[str, Average]
    """Means of the further values."""


class StepRunner:
    """Runs the steps of one optimizer."""

    def __init__(
        self,
        run: RunContext,
        *,
        models: Any,
        modules: Mapping[str, nn.Module],
        optimizer: Optimizer,
        engines: EngineFactory | StagedEngineFactory | ShardedEngineFactory,
        buffers: BufferTransaction | StagedBuffers,
        gradients: StepGradients,
        fingerprint: StepFingerprint,
        attributes: AttributeWrites,
        left: LeftGradients,
        autocast: Literal["bf16", "fp16"] | None,
        clip_grad_norm: float | None,
    ) -> None:
        self._run, self._models, self._modules = run, models, modules
        self._shares = gradients
        self._optimizer, self._buffers = optimizer, buffers
        self._needs_closure = needs_closure(optimizer)
        self._actions = LoopActions(parts_of(optimizer), left)
        self._fingerprint, self._attributes = fingerprint, attributes
        self._trained = Trained((), ())
        self._tables: list[Tensor] = []
        """The weights of embedding tables among them."""
        self.connect(engines)
        self._clip_grad_norm = clip_grad_norm
        if autocast == "fp16":
            self.scaler = torch.amp.GradScaler(run.device.type)
            # A rank without a share of some batch scales no loss, but must unscale like the others.
            self.scaler.scale(torch.zeros((), dtype=torch.float32, device=run.device))
        self.weight = 0.0
        """Divisor of the last step's losses: the number of samples, or the weights that the loss function returned."""
        self._seen = -1
        """Version of the models' contents when parameters were last listed."""
        self._restricted = False
        self._looked_in = -1
        """The epoch in which the modes of modules were checked; -1: not yet for these trained parameters."""
        self._warned = False
        self._fails_alike = False
        """True where an error comes on all ranks at the same place."""

    def connect(self, engines: EngineFactory | StagedEngineFactory | ShardedEngineFactory) -> None:
        """Use the engine and the consistency check of the ranks that there are now, from the next step on."""
        self._engine = self._shares.engine = engines.engine(self._optimizer)
        self._actions.hides_gradients = isinstance(self._engine, (ShardedEngine, DividedStagedEngine))
        self._comparison = engines.comparison
        self._weights = self._compared_weights()
        self._run.clock.restart()
        self.transaction = StepTransaction()
        """The step under way. The caller of `run` closes it, once the run's state accounts for the step."""

    def run(self, loss_fn: Loss, batch: Batch, *, call: int, options: StepOptions = PLAIN_STEP) -> StepResult:
        """Perform one step and return its result, equal on all ranks.

        Args:
            loss_fn: The loss function.
            batch: This rank's part of the batch.
            call: The number of steps already taken with this batch.
            options: How the step differs from the plain one.

        Raises:
            NonFiniteLossError, LossError, RankMismatchError: See `Trainer.step`. Weights and buffers are those from
                before the step, unless the loss function wrote to a parameter.
        """
        if options.encode is not None and not batch.is_dealt:
            raise ValueError(
                f"encode=... needs samples that are dealt evenly, and the {batch.size} of this batch are as many in "
                "each share as the function of rollouts made there, or as its shard had left: make equally many for "
                "each virtual rank, or give drop_last=True with shards."
            )
        if options is not PLAIN_STEP and isinstance(self._engine, LocalStepsEngine):
            raise ValueError(
                f"the step has {options.describe().strip(', ')}, which needs the gradient or the outputs of all "
                "workers, and with sync= they meet once in a round only: leave that out, or sync="
            )
        self._find_trained()
        self._actions.begin(self._trained)
        if self._needs_closure:
            options = options._replace(closure=True)
        if self._run.exchange is not None and (options.encode is not None or options.closure):
            what = "encode=..." if options.encode is not None else "closure=True"
            raise ValueError(
                f"the step has {what}, which looks rows of tables up in several passes, and with divided=True rows of "
                "other ranks come in one: leave that out, or divided=True"
            )
        if options.closure:
            check_closure(self._optimizer, self._engine, scaled=self.scaler is not None)
        before = self._buffers.copy() if options.closure and isinstance(self._buffers, BufferTransaction) else None
        found = self._evaluate_with_room(loss_fn, batch, call, options)
        rates = tuple([float(group["lr"]) for group in self._optimizer.param_groups])
        scaler, skipped = self._shares.scaler, False
        with self._actions.updating(), nullcontext() if self._weights is None else self._weights.updating():
            if options.closure:
                self._update_with_closure(loss_fn, batch, call, options, loss=found.loss, buffers=before)
            else:
                self._run.note("update")
                self._engine.update(scaler)
        if self._tables and not options.closure:
            drop(self._tables)  # ranks of one host have gradients of some rows only
        if scaler is not None:
            scale = scaler.get_scale()
            scaler.update()
            skipped = scaler.get_scale() < scale
        self._actions.end()
        self.weight = found.weight
        return StepResult(
            found.loss, learning_rates=rates, grad_norm=found.grad_norm, skipped=skipped, values=found.values
        )

    def _update_with_closure(
        self, loss_fn: Loss, batch: Batch, call: int, options: StepOptions, *, loss: float, buffers: Any
    ) -> None:
        """Let the optimizer evaluate the loss at other weights; if it fails, restore buffers from before the step."""

        def again() -> float:
            self._buffers.find()  # what the loss function has made of the models' contents
            return self._evaluate(loss_fn, batch, call, options, keeps_buffers=False).loss

        try:
            step_with_closure(self._optimizer, self._trained, loss, again, self.transaction)
        except BaseException:
            assert isinstance(self._buffers, BufferTransaction)
            self._buffers.put(buffers)
            raise

    def _evaluate_with_room(self, loss_fn: Loss, batch: Batch, call: int, options: StepOptions) -> _Evaluation:
        """Evaluate; if dynamic tables that grow have no rows for new ids, let them grow and evaluate anew.

        Raises:
            TableFullError: A table has no rows for new ids, and does not grow.
            MemoryError: There is no memory for one that grows.
        """
        while True:
            try:
                return self._evaluate(loss_fn, batch, call, options)
            except TableFullError:
                tables = [part for part in parts_of(self._optimizer) if isinstance(part, TableOptimizer)]
                if not any(part.grow() for part in tables):
                    raise

    def _evaluate(
        self, loss_fn: Loss, batch: Batch, call: int, options: StepOptions, *, keeps_buffers: bool = True
    ) -> _Evaluation:
        """Compute the loss of a batch and its gradient, and what buffers become; weights are left alone.

        Args:
            loss_fn: The loss function.
            batch: This rank's part of the batch.
            call: The number of steps already taken with this batch.
            options: How the step differs from the plain one.
            keeps_buffers: False to leave buffers as they are.
        """
        clock = self._run.clock
        step, leaves = self.transaction, min(self._run.virtual_ranks, batch.size)
        self._fails_alike = False
        if self._run.world.group is not None:
            intent = self._fingerprint.intent(
                self._trained,
                epoch=batch.epoch,
                step=batch.step,
                call=call,
                options=options.describe(),
                written=self._buffers.written_outside(),
                buffers=self._buffers.describe if isinstance(self._buffers, StagedBuffers) else None,
                weights=self._weights,
            )
            # Before ranks wait for what others send.
            if options.encode is not None or not self._run.has_whole_model:
                self._comparison.compare(intent)
            self._comparison.intend(intent)
            if self._run.exchange is not None:
                self._run.exchange.compare_first(self._comparison)
        self._shares.prepare(loss_fn, batch)
        if self._run.is_cut and self._weights is not None and not self._weights.is_known:
            self._weights = self._compared_weights()  # by now, this rank may have those of its stages alone
        self._engine.start(step, self._trained, leaves=leaves)
        if self._run.virtual_ranks > 1:
            self._attributes.begin()
        self._buffers.start(leaves=leaves)  # after the engine, which may move parameters
        try:
            self._shares.compute(loss_fn, batch, self._trained, restricted=self._restricted, call=call, options=options)
            if clock.is_measuring:
                clock.end_compute()
            self._run.note("sum")
            self._engine.flush()
            self._buffers.launch()
            step.deferred = partial(self._run.set_generators, "loop", batch.epoch, batch.step, call + 1)
            totals = self._engine.finish()
            self._buffers.receive(step)
            if self._run.world.group is not None:
                confirm_group()
            self._run.agree(totals.wants)
            check_totals(totals, batch, world=self._run.world, gradients=self._shares)
            values = self._shares.values.means(self._run.world, "trainer.step") if totals.has_values else {}
            if clock.is_due:
                clock.exchange(self._run.world)
            norm = self._finish_gradients(totals, batch, call, options)
            step.writing = True
            if keeps_buffers:
                self._buffers.commit(step, new_buffers=totals.new_buffers)
            else:
                self._buffers.roll_back()
        except BaseException as error:
            # A loss function may be refused on one rank alone, but that is before `finish`.
            is_whole = self._engine.abort(alike=self._fails_alike or isinstance(error, LossError))
            step.writing, step.deferred = not self._buffers.roll_back() or not is_whole, None
            self._run.set_generators("loop", batch.epoch, batch.step, call + 1)
            raise
        return _Evaluation(totals.loss / totals.weight, totals.weight, norm, values)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Scales the loss of a float16 step; None without."""
        return self._shares.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self._shares.scaler = scaler

    def begin_training(self) -> None:
        """Put models with parameters of this optimizer into training mode, if they are not in it."""
        parameters = (p for group in self._optimizer.param_groups for p in group["params"])
        begin_training(self._modules, {id(p) for p in parameters if p.requires_grad})

    def warnings(self, epoch: int) -> Iterator[str]:
        """Yield what the last step gives rise to, each once.

        Whether parameters that it trained have dropout in evaluation mode is checked after the first step of each
        epoch, and after the first one that trains other parameters.
        """
        for watch in (self._attributes, self._actions):
            if (message := watch.warning()) is not None:
                yield message
        if epoch == self._looked_in or self._warned:
            return
        self._looked_in = epoch
        message = idle_dropout(self._modules, {id(p) for p in self._trained.parameters})
        self._warned = message is not None
        if message is not None:
            yield message

    def trains(self, module: nn.Module) -> bool:
        """Return True if the last step trained a parameter of this module."""
        trained = {id(p) for p in self._trained.parameters}
        return any(id(p) in trained for p in module.parameters())

    def _find_trained(self) -> None:
        """List the parameters to train; users may freeze, unfreeze and add parameters between steps."""
        members = [p for group in self._optimizer.param_groups for p in group["params"]]
        parameters = [p for p in members if p.requires_grad]
        if len(parameters) < len(members):
            for p in members:
                if not p.requires_grad:
                    p.grad = None  # that of a step of any optimizer, which this one would take
        before, version = self._trained.parameters, self._buffers.find()
        if version == self._seen and len(parameters) == len(before) and all(map(is_, parameters, before)):
            return
        names = parameter_names(self._modules)
        for p in parameters:
            if id(p) not in names:
                raise foreign_parameter(p)
        if not parameters:
            raise ValueError("the optimizer has no parameter that requires a gradient: there is nothing to train")
        if twice := [name for name, count in Counter(names[id(p)] for p in parameters).items() if count > 1]:
            raise ValueError(
                f"{twice[0]!r} belongs to several optimizers, and a step of all of them would update it once for "
                "each, with one gradient. Step them one after the other, by trainer.step(..., optimizer=NAME), or give "
                "the parameter to one of them."
            )
        self._trained, self._seen = Trained((), ()), version  # if the next line refuses, the next step looks again
        found = Trained(tuple(names[id(p)] for p in parameters), tuple(parameters))
        for part in parts_of(self._optimizer):
            check_trained(trained_by(part, self._shares.present(found)), part, scaled=self.scaler is not None)
        self._trained, self._looked_in = found, -1
        of_tables = [part for part in parts_of(self._optimizer) if isinstance(part, TableOptimizer)]
        self._tables = [p for part in of_tables for p in trained_by(part, found).parameters]
        self._weights = self._compared_weights()
        trained = {id(p) for p in parameters}
        others = [p for m in self._modules.values() for p in m.parameters() if p.requires_grad and id(p) not in trained]
        # Gradients of parameters that this step does not train would only accumulate.
        self._restricted = bool(others)

    def _compared_weights(self) -> WeightComparison | None:
        """Return what finds weights that a loop has written; None where no two ranks have the same ones."""
        if not self._engine.copies_weights:
            return None
        trained = self._shares.present(self._trained)
        return WeightComparison(trained, parts_of(self._optimizer), without=self._tables)

    def _finish_gradients(self, totals: Totals, batch: Batch, call: int, options: StepOptions) -> float | None:
        """Divide gradients by the weight, unscale and clip them: the same on every rank."""
        change = None
        if options.on_gradients is not None:
            change = partial(self._change_gradients, options.on_gradients, batch, call)
        scaler = self._shares.scaler
        norm = self._engine.prepare(Preparation(batch.size / totals.weight, scaler, self._clip_grad_norm, change))
        if norm is not None and scaler is None and not math.isfinite(norm):
            raise NonFiniteLossError(
                f"the norm of the gradient is {norm} at epoch {batch.epoch}, step {batch.step}, though the "
                f"loss, {totals.loss / totals.weight:.6g}, is finite. {STEP_UNDONE} Look for roots or "
                "logarithms of zero, or lower the learning rate."
            )
        return norm

    def _change_gradients(self, function: Callable[[Any], object], batch: Batch, call: int) -> None:
        """Call a user's function that may change p.grad, with equal random numbers on all ranks, and compare."""
        self.transaction.run_deferred()
        self._run.set_generators("gradients", batch.epoch, batch.step, call)
        inside = enter("on_gradients")
        error: Exception | None = None
        try:
            counted = count_collectives()
            with torch.no_grad():
                function(self._models)
            refuse_collectives_since(counted)
        except Exception as raised:  # of the user's function: it is raised once the other ranks know
            error = raised
        finally:
            leave(inside)
        self._run.set_generators("loop", batch.epoch, batch.step, call + 1)
        self._fails_alike = True
        check_gradients(self._run.world, self._trained, error)
        self._fails_alike = False
