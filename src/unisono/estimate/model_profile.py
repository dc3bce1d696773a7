"""The costs of one micro-batch and one update of a model: memory by kind, and time. Start reading at `profile_model`.

The model, its gradients and its activations are fake tensors, which have layouts and no memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils.hooks import RemovableHandle

from unisono.engine.shared import is_divisible, is_elementwise
from unisono.errors import CutError, EstimateError, UnisonoError
from unisono.estimate.live_memory import LiveMemory, ParameterEvent, PassEvent, peak_nbytes, storage_key
from unisono.estimate.operator_times import OperatorClock, OperatorTimes
from unisono.estimate.user_build import Subject, UserCodeError, batch_of, build_subject, tensors_in
from unisono.parallel.losses import loss_of, read_loss
from unisono.parallel.pipeline.balance import ModelSegment
from unisono.parallel.pipeline.candidates import find_places
from unisono.parallel.pipeline.measuring import measure_segments
from unisono.parallel.pipeline.model_line import model_line_of
from unisono.parallel.sharding.shard import Shard
from unisono.parallel.sharding.units import REST, units_of

__all__ = ["ModelProfile", "ParameterSize", "Segments", "StepRecord", "profile_model"]

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
_REPEATS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """The parts of a model for pipelines, or why it cannot be cut."""

    found: tuple[ModelSegment, ...] = ()
    obstacle: str | None = None


class ParameterSize(NamedTuple):
    """A parameter."""

    name: str
    numel: int
    nbytes: int
    gradient: int | None
    """The number of its gradient's storage in the passes; None if it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """The memory that a micro-batch and an update take and give back, event by event."""

    parameters: tuple[ParameterSize, ...] = ()
    passes: tuple[PassEvent, ...] = ()
    """The forward and backward pass of a micro-batch."""
    num_forward: int = 0
    """The number of events of the forward pass."""
    update: tuple[PassEvent, ...] = ()
    """The first update, which makes the state of the optimizer."""
    units: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """By what units are made of, "block" or "size", the numbers of the parameters of each. With "block", the first are
    those of no block, which may be none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProfile:
    """The costs of a model, in bytes and seconds."""

    model: str
    """The name of its class."""
    optimizer: str
    """The name of its class."""
    num_parameters: int
    micro_batch: int
    """The number of samples of a micro-batch."""
    parameters_nbytes: int
    buffers_nbytes: int
    gradients_nbytes: int
    largest_gradient_nbytes: int
    optimizer_nbytes: int
    """The optimizer's state."""
    inputs_nbytes: int
    """A micro-batch."""
    kept_nbytes: int
    """Bytes that are kept when the forward pass of a micro-batch has ended."""
    peak_nbytes: int
    """The most that passes of a micro-batch take, with the gradients that they have made."""
    activations_nbytes: int
    """The most that they take without these."""
    update_nbytes: int
    """The most that an update takes, for a moment, beside its state."""
    forward_s: float
    backward_s: float
    update_s: float
    shares_update: bool = True
    """True if ranks can share the optimizer's work, as those of torch.optim."""
    is_elementwise: bool = True
    """True if the optimizer treats each element alone, so that parameters may be divided."""
    segments: dict[int, Segments] = field(default_factory=dict)
    """By number of stages."""
    record: StepRecord = field(default_factory=StepRecord)
    """The events of which the sizes above are sums."""

    def units_nbytes(self, by: str) -> list[int]:
        """Return the sizes of the units of `Shard`; with "block", the first is that of what belongs to no block."""
        sizes = [parameter.nbytes for parameter in self.record.parameters]
        return [sum(sizes[i] for i in unit) for unit in self.record.units[by]]


def profile_model(
    build: Callable[[], Any],
    *,
    micro_batch: int,
    stages: Sequence[int],
    times: OperatorTimes | None,
) -> ModelProfile:
    """Return what a model takes.

    Args:
        build: Returns model, optimizer, loss function and data.
        micro_batch: The number of samples of a micro-batch.
        stages: The numbers of stages for which the model is to be divided.
        times: Says how long operators take. None: the model is built and run for real on this machine, which takes its
            memory, and is measured.

    Raises:
        EstimateError: The model's code needs numbers that fake tensors have not, or returns no loss.
        UserCodeError: The user's code failed.
    """
    if times is None:
        return _profile(build_subject(build), micro_batch, stages, None)
    # The dataset may be real: its samples become fake where an operator reads them.
    with FakeTensorMode(allow_non_fake_inputs=True), torch.compiler.set_stance("force_eager"):
        try:
            return _profile(build_subject(build), micro_batch, stages, times)
        except UserCodeError as error:
            if isinstance(error.__cause__, _NEEDS_VALUES):
                raise _needs_values(error.__cause__) from error.__cause__
            raise


def _needs_values(error: BaseException) -> EstimateError:
    return EstimateError(
        f"{model_line_of(error)} needs the values of a tensor, and here there are none: --measure builds the model and "
        "runs a micro-batch for real. If it is the data, make them outside of the build function"
    )


def _check_dense(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise EstimateError(
                f"{name!r} of the model has sparse gradients, whose memory and time follow from the ids of a batch: "
                "plan knows dense ones alone, so plan the model without it, with a Linear of the same width, say. "
                "docs/embedding.md says what a table takes"
            )


def _profile(subject: Subject, micro_batch: int, stages: Sequence[int], times: OperatorTimes | None) -> ModelProfile:
    model, optimizer = subject.model, subject.optimizer
    _check_dense(model)
    batch = batch_of(subject.sample, micro_batch)
    inputs = tensors_in(batch)

    def scalar(result: Any) -> Tensor:
        loss = result if isinstance(result, Tensor) else loss_of(result)
        return read_loss(loss, samples=micro_batch).total

    parameters = [*model.parameters()]
    known = [*parameters, *model.buffers(), *inputs]
    clock = OperatorClock(times, notes=True)
    memory = LiveMemory(known, parameters=parameters, on_operator=clock.on_operator)
    with memory:
        first = _run(subject, batch, scalar, clock, memory)
    sizes = [p.grad.untyped_storage().nbytes() for p in model.parameters() if p.grad is not None]
    state = _state_nbytes(optimizer)
    update_events = tuple(memory.events[len(first.events) :])
    update = peak_nbytes(update_events)
    optimizer.zero_grad(set_to_none=True)
    forward_s, backward_s, update_s = clock.timed([first.forward_s, first.backward_s, first.update_s])
    timed = [first._replace(forward_s=forward_s, backward_s=backward_s, update_s=update_s)]
    if times is None:  # counting memory takes time, so it is told by further runs
        timed = []
        for _ in range(_REPEATS):
            timed.append(_run(subject, batch, scalar, clock))
            optimizer.zero_grad(set_to_none=True)
    record = StepRecord(
        parameters=tuple(
            ParameterSize(name, p.numel(), p.nbytes, first.gradients[i])
            for i, (name, p) in enumerate(model.named_parameters())
        ),
        passes=tuple(first.events),
        num_forward=first.num_forward,
        update=update_events,
        units={"block": _units(model, Shard()), "size": _units(model, Shard(by="size"))},
    )
    return ModelProfile(
        model=type(model).__name__,
        optimizer=type(optimizer).__name__,
        num_parameters=sum(p.numel() for p in model.parameters()),
        micro_batch=micro_batch,
        parameters_nbytes=sum(p.nbytes for p in model.parameters()),
        buffers_nbytes=sum(b.nbytes for b in model.buffers()),
        gradients_nbytes=sum(sizes),
        largest_gradient_nbytes=max(sizes, default=0),
        optimizer_nbytes=state,
        inputs_nbytes=sum(tensor.nbytes for tensor in inputs),
        kept_nbytes=first.kept_nbytes,
        peak_nbytes=peak_nbytes(first.events),
        activations_nbytes=peak_nbytes(first.events, without=[each for each in first.gradients if each is not None]),
        update_nbytes=max(0, update - state),
        forward_s=min(each.forward_s for each in timed),
        backward_s=min(each.backward_s for each in timed),
        update_s=min(each.update_s for each in timed),
        shares_update=is_divisible(optimizer),
        is_elementwise=is_elementwise(optimizer),
        segments={count: _segments(subject, batch, scalar, count, times) for count in stages},
        record=record,
    )


def _units(model: nn.Module, shard: Shard) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the parameters of each unit of a division, those of no block first."""
    members = units_of(shard, model).members
    numbers = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    found = [tuple(numbers[each] for each in own) for name, own in members.items() if name != REST]
    if shard.by == "block":
        found.insert(0, tuple(numbers[each] for each in members.get(REST, ())))
    return tuple(found)


class _MeasuredStep(NamedTuple):
    """One micro-batch and an update."""

    forward_s: float
    backward_s: float
    update_s: float
    kept_nbytes: int
    """Bytes that are kept when the forward pass has ended."""
    num_forward: int
    """The number of events of the forward pass."""
    gradients: list[int | None]
    """For each parameter, the number of its gradient's storage in the events."""
    events: list[PassEvent]
    """Those before the update."""


def _run(
    subject: Subject,
    batch: Any,
    scalar: Callable[[Any], Tensor],
    clock: OperatorClock,
    memory: LiveMemory | None = None,
) -> _MeasuredStep:
    """Run one micro-batch and an update."""
    model, optimizer, loss_fn, _ = subject
    events = memory.events if memory is not None else []
    since_s = clock()
    try:
        result = loss_fn(model, batch)
    except Exception as error:
        raise UserCodeError from error
    try:
        loss = scalar(result)
    except UnisonoError as error:
        raise EstimateError(str(error)) from None
    del result
    try:
        forward_s = clock() - since_s
        kept = sum(event.nbytes for event in events if not isinstance(event, ParameterEvent))
        num_forward = len(events)
        hooks = [] if memory is None else _note_gradients(model, memory)
        since_s = clock()
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        for hook in hooks:
            hook.remove()
    except Exception as error:
        raise UserCodeError from error
    backward_s = clock() - since_s
    gradients = [None if memory is None or p.grad is None else memory.number_of(p.grad) for p in model.parameters()]
    made = list(events)
    since_s = clock()
    try:
        optimizer.step()
    except Exception as error:
        raise UserCodeError from error
    return _MeasuredStep(forward_s, backward_s, clock() - since_s, kept, num_forward, gradients, made)


def _note_gradients(model: nn.Module, memory: LiveMemory) -> list[RemovableHandle]:
    """Let gradients be noted when they are complete."""
    return [
        p.register_post_accumulate_grad_hook(partial(_note_gradient, memory, number))  # type: ignore[no-untyped-call]
        for number, p in enumerate(model.parameters())
        if p.requires_grad
    ]


def _note_gradient(memory: LiveMemory, number: int, _: Tensor) -> None:
    memory.note_gradient(number)


def _state_nbytes(optimizer: torch.optim.Optimizer) -> int:
    held = {
        storage_key(value): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in tensors_in(state)
    }
    return sum(held.values())


def _segments(
    subject: Subject,
    batch: Any,
    scalar: Callable[[Any], Tensor],
    stages: int,
    times: OperatorTimes | None,
) -> Segments:
    """Return the parts of a model for a number of stages."""
    model, _, loss_fn, sample = subject
    clock = OperatorClock(times)
    try:
        with _outside_of_fakes():
            given = batch_of(_real(sample), len_of(batch))
            places = find_places(_without_memory(model), loss_fn, (given,), stages=stages)
        if len(places.names) + 1 < stages:
            return Segments(obstacle=f"the model has {len(places.names)} places at which a stage could begin")
        if times is None:
            return Segments(found=tuple(measure_segments(model, loss_fn, (batch,), places, loss_of=scalar)))
        with LiveMemory(on_operator=clock.on_operator):
            found = measure_segments(model, loss_fn, (batch,), places, loss_of=scalar, clock=clock)
    except CutError as error:
        return Segments(obstacle=str(error))
    return Segments(found=tuple(found))


def len_of(batch: Any) -> int:
    """Return the number of samples of a micro-batch of tensors."""
    tensors = tensors_in(batch)
    return len(tensors[0]) if tensors and tensors[0].dim() else 1


@contextmanager
def _outside_of_fakes() -> Iterator[None]:
    with torch.utils._python_dispatch._disable_current_modes():
        yield


def _real(sample: Any) -> Any:
    """Return a sample with zeros where a tensor is fake."""
    return torch.utils._pytree.tree_map_only(
        Tensor, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), sample
    )


def _without_memory(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters are real and take the memory of a number each."""
    mode = detect_fake_mode([*model.parameters()])
    memo: dict[int, Any] = {} if mode is None else {id(mode): mode}  # see measuring.py
    for parameter in model.parameters():
        one = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
        memo[id(parameter)] = nn.Parameter(one, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    return copy.deepcopy(model, memo)
