"""One step as a transaction: compute this rank's shares, sum over all ranks, check, and only then update.

Until the summed loss is known to be finite, nothing changes that could not be undone: if anything fails, gradients are
discarded and buffers restored, and the weights are written last.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from functools import partial
from operator import is_
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.data.batch import Batch, Share
from unisono.engine import (
    BufferTransaction,
    ConsistencyCheck,
    Engine,
    StepTransaction,
    Totals,
    Trained,
    check_trained,
    parts_of,
    trained_by,
)
from unisono.errors import LossError, NonFiniteLossError
from unisono.job.user_function import count_collectives, enter, leave, refuse_collectives_since
from unisono.parallel.losses import WeightedSum, further_values, loss_of, read_loss
from unisono.text import list_first
from unisono.trainer.backward import Backward
from unisono.trainer.changed_gradients import check_gradients
from unisono.trainer.global_loss import (
    EncodedShare,
    GlobalGradients,
    assemble_batch,
    encode_share,
    gradients_of,
    rows_of,
    run_backward,
)
from unisono.trainer.modes import begin_training, idle_dropout
from unisono.trainer.modules import foreign_parameter, lone_sample, plain_name, to_device
from unisono.trainer.run_context import RunContext
from unisono.trainer.step_fingerprint import StepFingerprint
from unisono.trainer.step_result import StepResult
from unisono.trainer.value_sums import ValueSums

__all__ = ["Loss", "StepOptions", "StepRunner"]

Loss = Callable[[Any, Any], Any]
_SHOWN_SAMPLES = 16


class StepOptions(NamedTuple):
    """How a step differs from the plain one."""

    encode: Loss | None = None
    """Makes encodings of a micro-batch; the loss function then gets those of the whole global batch."""
    recompute: bool = False
    """True to encode again for the backward pass instead of keeping graphs."""
    on_gradients: Callable[[Any], object] | None = None
    """Called with the models once p.grad is the gradient of the global batch, before it is clipped."""

    def describe(self) -> str:
        """Return the options as text that is equal on ranks which take the same step."""
        if self == _PLAIN:
            return ""
        given = {"encode": self.encode, "recompute": self.recompute, "on_gradients": self.on_gradients}
        return "".join(f", {name}=…" for name, value in given.items() if value)


_PLAIN = StepOptions()


class _BadShare(NamedTuple):
    """A virtual rank whose loss was not finite, as ranks send it to each other."""

    virtual_rank: int
    rank: int
    loss: float
    indices: list[int]


class StepRunner:
    """Runs the steps of one optimizer."""

    def __init__(
        self,
        run: RunContext,
        *,
        models: Any,
        modules: Mapping[str, nn.Module],
        optimizer: Optimizer,
        engine: Engine,
        buffers: BufferTransaction,
        comparison: ConsistencyCheck,
        fingerprint: StepFingerprint,
        autocast: Literal["bf16", "fp16"] | None,
        clip_grad_norm: float | None,
    ) -> None:
        self._run, self._models, self._modules = run, models, modules
        self._optimizer, self._engine, self._buffers = optimizer, engine, buffers
        self._comparison, self._fingerprint = comparison, fingerprint
        self._clip_grad_norm = clip_grad_norm
        self._autocast = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}[autocast]
        self.scaler: torch.amp.GradScaler | None = None
        """Scales the loss of a float16 step, so that small gradients do not vanish."""
        if autocast == "fp16":
            self.scaler = torch.amp.GradScaler(run.device.type)
            # A rank without a share of some batch scales no loss, but must unscale like the others.
            self.scaler.scale(torch.zeros((), dtype=torch.float32, device=run.device))
        self.weight = 0.0
        """Divisor of the last step's losses: the number of samples, or the weights that the loss function returned."""
        self._grad_norm: float | None = None
        self.transaction = StepTransaction()
        """The step under way. The caller of `run` closes it, once the run's state accounts for the step."""
        self._trained = Trained((), ())
        self._seen = -1
        """Version of the models' contents when parameters were last listed."""
        self._restricted = False
        self._looked_in = -1
        """The epoch in which the modes of modules were checked; -1: not yet for these trained parameters."""
        self._warned = False
        self._backward = Backward()
        self._losses: list[tuple[Share, Tensor]] = []
        self._values = ValueSums("loss function")
        self._fails_alike = False
        """True where an error comes on all ranks at the same place."""

    def run(self, loss: Loss, batch: Batch, *, call: int, options: StepOptions = _PLAIN) -> StepResult:
        """Perform one step and return its result, equal on all ranks.

        Args:
            loss: The loss function.
            batch: This rank's part of the batch.
            call: The number of steps already taken with this batch.
            options: How the step differs from the plain one.

        Raises:
            NonFiniteLossError, LossError, RankMismatchError: See `Trainer.step`. Weights and buffers are those from
                before the step, unless the loss function wrote to a parameter.
        """
        step, leaves = self.transaction, min(self._run.virtual_ranks, batch.size)
        self._find_trained()
        self._losses, self._fails_alike = [], False
        self._values.clear()
        if self._run.world.group is not None:
            intent = self._fingerprint.intent(
                self._trained, epoch=batch.epoch, step=batch.step, call=call, options=options.describe()
            )
            if options.encode is not None:  # before encodings travel, or a rank that does something else is waited for
                self._comparison.compare(intent)
            self._comparison.intend(intent)
        self._engine.start(step, self._trained, leaves=leaves)
        self._buffers.start(leaves=leaves)  # after the engine, which may move parameters
        inside = enter("the loss function")
        try:
            try:
                if options.encode is not None:
                    self._compute_globally(loss, batch, call, options)
                else:
                    for share in batch.shares:
                        self._run.set_generators("model", batch.epoch, batch.step, call, share.virtual_rank)
                        self._compute(loss, share, batch)
            finally:
                leave(inside)
            self._engine.flush()
            self._buffers.launch()
            step.deferred = partial(self._run.set_generators, "loop", batch.epoch, batch.step, call + 1)
            totals = self._engine.finish()
            self._buffers.receive(step)
            self._check(totals, batch)
            values = self._values.means(self._run.world, "trainer.step") if totals.has_values else {}
            self._finish_gradients(totals, batch, call, options)
            step.writing = True
            self._buffers.commit(step, new_buffers=totals.new_buffers)
        except BaseException as error:
            # A loss function may be refused on one rank alone, but that is before `finish`.
            is_whole = self._engine.abort(alike=self._fails_alike or isinstance(error, LossError))
            step.writing, step.deferred = not self._buffers.roll_back() or not is_whole, None
            self._run.set_generators("loop", batch.epoch, batch.step, call + 1)
            raise
        rates = tuple(float(group["lr"]) for group in self._optimizer.param_groups)
        skipped = False
        self._engine.update(self.scaler)
        if self.scaler is not None:
            scale = self.scaler.get_scale()
            self.scaler.update()
            skipped = self.scaler.get_scale() < scale
        self.weight = totals.weight
        return StepResult(
            totals.loss / totals.weight,
            learning_rates=rates,
            grad_norm=self._grad_norm,
            skipped=skipped,
            values=values,
        )

    def begin_training(self) -> None:
        """Put models with parameters of this optimizer into training mode, if they are not in it."""
        parameters = (p for group in self._optimizer.param_groups for p in group["params"])
        begin_training(self._modules, {id(p) for p in parameters if p.requires_grad})

    def mode_warning(self, epoch: int) -> str | None:
        """Return a warning, once, if the parameters that the last step trained have dropout in evaluation mode.

        This is checked after the first step of each epoch, and after the first one that trains other parameters.
        """
        if epoch == self._looked_in or self._warned:
            return None
        self._looked_in = epoch
        message = idle_dropout(self._modules, {id(p) for p in self._trained.parameters})
        self._warned = message is not None
        return message

    def trains(self, module: nn.Module) -> bool:
        """Return True if the last step trained a parameter of this module."""
        trained = {id(p) for p in self._trained.parameters}
        return any(id(p) in trained for p in module.parameters())

    def _compute(self, loss: Loss, share: Share, batch: Batch) -> None:
        """Compute the gradient of one virtual rank's share, divided by the size of the global batch."""
        share_loss, share_weight = None, 0.0
        for micro_batch in share.micro_batches:
            samples = len(micro_batch.indices)
            items = to_device(micro_batch.items, self._run.device)
            counted = count_collectives()
            with self._forward_context(samples):
                result = loss(self._models, items)
            refuse_collectives_since(counted)
            value, weight = self._read(result, samples=samples)
            if further := further_values(result):
                self._values.add(share.virtual_rank, further, samples=samples)
            total = value.total.detach()
            if total.dtype != torch.float32:
                total = total.float()
            share_loss = total if share_loss is None else share_loss + total
            share_weight += weight
            if micro_batch is share.micro_batches[-1]:
                self._losses.append((share, share_loss))
                self._engine.close_forward(
                    share.virtual_rank,
                    share_loss,
                    share_weight,
                    new_buffers=self._buffers.new_buffers(),
                    has_values=bool(self._values),
                )
            inputs = self._trained.parameters if self._restricted else None
            if self.scaler is None:
                self._backward.run(value.total, samples=batch.size, inputs=inputs)
            else:
                self.scaler.scale(value.total / batch.size).backward(inputs=inputs)  # type: ignore[no-untyped-call]
        self._engine.close_leaf(share.virtual_rank)
        self._buffers.close_leaf(share.virtual_rank)

    def _read(self, result: Any, *, samples: int) -> tuple[WeightedSum, float]:
        """Read what the loss function returned. Raises LossError for a loss that cannot be trained on."""
        value = read_loss(loss_of(result), samples=samples)
        weight = value.weight_number()
        if value.total.device != self._run.device:
            raise LossError(
                f"the loss lies on {value.total.device} and this rank computes on {self._run.device}: return it on "
                "the device of the model's output."
            )
        if not value.total.requires_grad:
            raise LossError(
                "the loss has no gradient: it was detached (by .item(), .detach(), torch.no_grad() or argmax), or "
                "depends on no parameter that requires one. Return the loss as the tensor that the model's output "
                "led to."
            )
        return value, weight

    def _compute_globally(self, loss: Loss, batch: Batch, call: int, options: StepOptions) -> None:
        """Compute the gradients of this rank's shares for a loss over the whole global batch; see `global_loss`."""
        run = self._run
        own: dict[int, EncodedShare] = {}
        failure: Exception | None = None
        try:
            for share in batch.shares:
                with torch.set_grad_enabled(not options.recompute):
                    own[share.virtual_rank] = self._encode(share, batch, call, options)
                if options.recompute:
                    self._buffers.roll_back()
                else:
                    self._buffers.close_leaf(share.virtual_rank)
        except Exception as error:  # of the user's function: it is raised once the other ranks know
            failure = error
        whole = assemble_batch(
            run.world, own, failure, size=batch.size, virtual_ranks=run.virtual_ranks, device=run.device
        )
        run.set_generators("model/loss", batch.epoch, batch.step, call)
        counted = count_collectives()
        with self._forward_context(batch.size):
            result = loss(self._models, whole.value)
        refuse_collectives_since(counted)
        value, weight = self._read(result, samples=batch.size)
        root = value.total / batch.size
        if self.scaler is not None:
            root = self.scaler.scale(root)
        has_first = any(share.virtual_rank == 0 for share in batch.shares)
        found = gradients_of(root, whole, self._trained.parameters if has_first else ())
        for share in batch.shares:
            encoded = own[share.virtual_rank]
            if options.recompute:
                encoded = self._encode(share, batch, call, options)
            total, share_weight = torch.zeros((), device=run.device), 0.0
            if share.virtual_rank == 0:  # which the loss counts as, since one must
                total, share_weight = value.total.detach().float(), weight
                self._losses.append((share, total))
                if further := further_values(result):
                    self._values.add(0, further, samples=batch.size)
            self._hand_down(share, encoded, found, total, share_weight)
            if options.recompute:
                self._buffers.close_leaf(share.virtual_rank)

    def _encode(self, share: Share, batch: Batch, call: int, options: StepOptions) -> EncodedShare:
        """Encode the samples of a share."""
        self._run.set_generators("model", batch.epoch, batch.step, call, share.virtual_rank)

        def encode(items: Any) -> Any:
            assert options.encode is not None
            if not options.recompute:
                self._buffers.stand_in()
            counted = count_collectives()
            result = options.encode(self._models, to_device(items, self._run.device))
            refuse_collectives_since(counted)
            return result

        skeleton, parts = encode_share(share, encode, self._forward_context)
        return EncodedShare(skeleton, parts, self._buffers.new_buffers())

    def _hand_down(
        self, share: Share, encoded: EncodedShare, found: GlobalGradients, total: Tensor, weight: float
    ) -> None:
        """Run backward from the encodings of a share."""
        inputs = self._trained.parameters if self._restricted else None
        counts = [len(micro_batch.indices) for micro_batch in share.micro_batches]
        rows = [*rows_of(share.virtual_rank, counts, virtual_ranks=self._run.virtual_ranks)]
        for parts, where in zip(encoded.parts, rows, strict=True):
            is_last = where is rows[-1]
            if is_last:
                self._engine.close_forward(
                    share.virtual_rank,
                    total,
                    weight,
                    new_buffers=encoded.new_buffers,
                    has_values=share.virtual_rank == 0 and bool(self._values),
                )
            direct = found.direct if share.virtual_rank == 0 and is_last else ()
            run_backward(parts, [None if g is None else g[where] for g in found.of_tensors], direct, inputs)
        self._engine.close_leaf(share.virtual_rank)

    def _forward_context(self, samples: int) -> contextlib.AbstractContextManager[Any]:
        if self._autocast is None and samples > 1:
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        if self._autocast is not None:
            stack.enter_context(torch.autocast(self._run.device.type, dtype=self._autocast))
        if samples == 1:
            stack.enter_context(lone_sample(self._modules))
        return stack

    def _find_trained(self) -> None:
        """List the parameters to train; users may freeze, unfreeze and add parameters between steps."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]
        before, version = self._trained.parameters, self._buffers.contents.version()
        if version == self._seen and len(parameters) == len(before) and all(map(is_, parameters, before)):
            return
        names = {
            id(p): prefix + plain_name(name)
            for prefix, module in self._modules.items()
            for name, p in module.named_parameters()
        }
        for p in parameters:
            if id(p) not in names:
                raise foreign_parameter(p)
        if not parameters:
            raise ValueError("the optimizer has no parameter that requires a gradient: there is nothing to train")
        for p in self._trained.parameters:
            p.grad = None  # otherwise the optimizer would find a gradient of those that are frozen from now on
        self._trained, self._seen = Trained((), ()), version  # if the next line refuses, the next step looks again
        found = Trained(tuple(names[id(p)] for p in parameters), tuple(parameters))
        for part in parts_of(self._optimizer):
            check_trained(trained_by(part, found), part, scaled=self.scaler is not None)
        self._trained, self._looked_in = found, -1
        trained = {id(p) for p in parameters}
        others = [p for m in self._modules.values() for p in m.parameters() if p.requires_grad and id(p) not in trained]
        # Gradients of parameters that this step does not train would only accumulate.
        self._restricted = bool(others)

    def _check(self, totals: Totals, batch: Batch) -> None:
        """Raise, on all ranks, if the loss is NaN or infinite (NonFiniteLossError) or all weights are 0 (LossError)."""
        where = f"epoch {batch.epoch}, step {batch.step}"
        if not math.isfinite(totals.loss):
            bad = [
                _BadShare(
                    share.virtual_rank,
                    self._run.world.rank,
                    value.item(),
                    [i for micro_batch in share.micro_batches for i in micro_batch.indices],
                )
                for share, value in self._losses
                if not math.isfinite(value.item())
            ]
            found = [share for shares in self._run.world.gather(bad, "trainer.step") for share in shares]
            raise NonFiniteLossError(_describe_bad(totals.loss, where, found))
        if totals.weight == 0:
            raise LossError(
                f"the weights of all {batch.size} samples of {where} add up to 0, so the loss has no mean: give at "
                "least one token or sample a weight above zero."
            )

    def _finish_gradients(self, totals: Totals, batch: Batch, call: int, options: StepOptions) -> None:
        """Divide gradients by the weight, unscale and clip them: the same on every rank."""
        change = None
        if options.on_gradients is not None:
            change = partial(self._change_gradients, options.on_gradients, batch, call)
        norm = self._engine.prepare(
            factor=batch.size / totals.weight, scaler=self.scaler, clip=self._clip_grad_norm, change=change
        )
        self._grad_norm = norm
        if norm is not None and self.scaler is None and not math.isfinite(norm):
            raise NonFiniteLossError(
                f"the norm of the gradient is {norm} at epoch {batch.epoch}, step {batch.step}, though the "
                f"loss, {totals.loss / totals.weight:.6g}, is finite. The step did not happen: weights and buffers "
                "keep their values from before it. Look for roots or logarithms of zero, or lower the learning rate."
            )

    def _change_gradients(self, function: Callable[[Any], object], batch: Batch, call: int) -> None:
        """Let a user's function change p.grad, with random numbers that are equal on all ranks; and compare."""
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


def _describe_bad(loss: float, where: str, bad: list[_BadShare]) -> str:
    culprits = "".join(
        f"\n  virtual rank {share.virtual_rank} (rank {share.rank}): loss {share.loss}, "
        f"samples {list_first(share.indices, _SHOWN_SAMPLES)}"
        for share in bad
    )
    culprits = culprits or "\n  each virtual rank's own loss is finite; their sum is not"
    return (
        f"the loss is {loss} at {where}. The step did not happen: weights and buffers keep their values from before it."
        f"{culprits}\nLook at those samples, or lower the learning rate."
    )
