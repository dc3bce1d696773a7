"""The common part of steps of whole models and of those that are cut over ranks. Start at `StepGradients`."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from unisono.data.batch import Batch, Share
from unisono.engine import Trained
from unisono.errors import LossError
from unisono.parallel.losses import WeightedSum, loss_of, read_loss
from unisono.trainer.backward import Backward
from unisono.trainer.modules import lone_sample
from unisono.trainer.run_context import RunContext
from unisono.trainer.value_sums import ValueSums

__all__ = ["PLAIN_STEP", "Loss", "StepGradients", "StepOptions", "gradient_marks", "model_stream"]

Loss = Callable[[Any, Any], Any]
_Mark: TypeAlias = tuple[int, int] | None


class StepOptions(NamedTuple):
    """How a step differs from the plain one."""

    encode: Loss | None = None
    """Makes encodings of a micro-batch; the loss function then gets those of the whole global batch."""
    recompute: bool = False
    """True to encode again for the backward pass instead of keeping graphs."""
    on_gradients: Callable[[Any], object] | None = None
    """Called with the models once p.grad is the gradient of the global batch, before it is clipped."""

    closure: bool = False
    """True if the optimizer gets a closure, by which it computes loss and gradient at other weights."""

    def describe(self) -> str:
        """Return the options as text that is equal on ranks which take the same step."""
        if self is PLAIN_STEP:
            return ""
        return "".join(f", {name}=…" for name, value in self._asdict().items() if value)


PLAIN_STEP = StepOptions()


def model_stream(batch: Batch, call: int, virtual_rank: int, part: int) -> tuple[Any, ...]:
    """Return the stream of random numbers of a micro-batch, and the place in it."""
    place = (batch.epoch, batch.step, call, virtual_rank)
    return ("model", *place, part) if part else ("model", *place)


def gradient_marks(trained: Trained) -> list[_Mark]:
    """Return what tells whether gradients have been changed, of two parameters: what changes some changes all."""
    found = (p.grad for p in trained.parameters[:: max(1, len(trained.parameters) - 1)])
    return [None if gradient is None else (id(gradient), gradient._version) for gradient in found]


class StepGradients(ABC):
    """Computes the gradients of this rank's part of a batch, and hands them to the engine.

    Args:
        run: The constants of the run.
        models: The model or the dict of models, as the loss function gets it.
        modules: The models by the prefix of their names.
        autocast: The type to compute in where torch considers it safe.
    """

    def __init__(
        self,
        run: RunContext,
        *,
        models: Any,
        modules: Mapping[str, nn.Module],
        autocast: Literal["bf16", "fp16"] | None,
    ) -> None:
        self._run, self._models, self._modules = run, models, modules
        self._autocast = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}[autocast]
        self._backward = Backward()
        self.engine: Any
        """Sums the gradients; the owner of this object sets it."""
        self.scaler: torch.amp.GradScaler | None = None
        """Scales the loss of a float16 step, so that small gradients do not vanish."""
        self.losses: list[tuple[Share, Tensor]] = []
        """The sum of the losses of each share of the last step."""
        self.hint = ""
        """A sentence about losses that are NaN, for messages."""
        self.values = ValueSums("loss function")
        """The further values of the last step."""

    def present(self, trained: Trained) -> Trained:
        """Return the parameters that this rank has memory for."""
        return trained

    @abstractmethod
    def prepare(self, loss_fn: Loss, batch: Batch) -> None:
        """Prepare the passes of a batch, before the step begins. Every rank must call it."""

    @abstractmethod
    def compute(
        self, loss_fn: Loss, batch: Batch, trained: Trained, *, restricted: bool, call: int, options: StepOptions
    ) -> None:
        """Run forward and backward for this rank's part of a batch.

        Args:
            loss_fn: The loss function.
            batch: This rank's part of the batch.
            trained: The parameters that the step trains.
            restricted: True if other parameters require gradients, too, which would only pile up.
            call: The number of steps already taken with this batch.
            options: How the step differs from the plain one.

        Raises:
            LossError: The loss function returned something that cannot be trained on.
            GroupError: It called a collective.
        """

    def _read(self, result: Any, *, samples: int, needs_graph: bool = True) -> tuple[WeightedSum, float]:
        """Read what the loss function returned. Raises LossError for a loss that cannot be trained on."""
        loss = result if isinstance(result, Tensor) else loss_of(result)
        value = read_loss(loss, samples=samples, needs_graph=needs_graph)
        weight = value.weight if type(value.weight) is float else value.weight_number()
        root = value.total if value.losses is None else value.losses
        if root.device != self._run.device:
            raise LossError(
                f"the loss lies on {root.device} and this rank computes on {self._run.device}: return it on "
                "the device of the model's output."
            )
        if not root.requires_grad:
            raise LossError(
                "the loss has no gradient: it was detached (by .item(), .detach(), torch.no_grad() or argmax), or "
                "depends on no parameter that requires one. Return the loss as the tensor that the model's output "
                "led to."
            )
        return value, weight

    def _refuse_own_backward(self, trained: Trained) -> None:
        """Refuse a loss function that has called backward, before the first backward pass of a step.

        Raises:
            LossError: A parameter has a gradient already, which that of the step would be added to.
        """
        for p in trained.parameters:
            if p.grad is not None:
                name = next(name for name, each in zip(*trained, strict=True) if each is p)
                raise LossError(
                    f"the loss function has called backward: {name!r} has a gradient, to which that of the step would "
                    "be added. Leave backward() out of the loss function and return the loss; if it needs a gradient "
                    "itself, such as for a penalty, torch.autograd.grad(..., create_graph=True) computes one."
                )

    def _refuse_changed_gradients(self, trained: Trained, before: Sequence[_Mark]) -> None:
        """Refuse a loss function that has changed gradients, which are those of a share's earlier micro-batches.

        Raises:
            LossError: They are not what `gradient_marks` has found before.
        """
        if gradient_marks(trained) != before:
            raise LossError(
                "the loss function has changed gradients, which hold what the share's earlier micro-batches have led "
                "to. Leave zero_grad(), backward() and clipping out of it: the Trainer does all of that, and "
                "Trainer(clip_grad_norm=...) clips."
            )

    def _forward_context(self, samples: int) -> contextlib.AbstractContextManager[Any]:
        stack = contextlib.ExitStack()
        if self._autocast is not None:
            # Without a cache of converted weights, through which the gradients of a weight that is used twice would be
            # added up in low precision, where both uses are on one rank.
            stack.enter_context(torch.autocast(self._run.device.type, dtype=self._autocast, cache_enabled=False))
        if samples == 1:
            stack.enter_context(lone_sample(self._modules))
        return stack
