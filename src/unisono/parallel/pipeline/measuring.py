"""How long the parts of a model take, and how much memory, by running them: for an automatic split.

The whole model runs on one micro-batch. The time from the first call of one place to that of the next one belongs to
the first, forward and backward; in the backward pass it is noted when the gradient of a block's inputs is there.
With one thread on a CPU, it is CPU time, which other programs on the machine disturb less.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from unisono.parallel.pipeline.balance import ModelSegment
from unisono.parallel.pipeline.blocks import calls_seen_by
from unisono.parallel.pipeline.candidates import Places
from unisono.parallel.pipeline.traffic import bytes_across
from unisono.state.random import kept_generators

__all__ = ["STATE_COPIES", "measure_segments"]

_WARM_UPS, _REPEATS = 1, 3
STATE_COPIES = 4
"""A parameter, its gradient, and the two averages of Adam."""
_BACKWARD = 2.0
"""The time of a backward pass by that of a forward pass, where only that is measured."""


class _Mark(torch.autograd.Function):
    # Notes when the gradient of a block's inputs has been computed.

    @staticmethod
    def forward(ctx: Any, value: Tensor, note: Callable[[], None]) -> Tensor:
        ctx.note = note
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.note()
        return gradients[0], None


def measure_segments(
    model: nn.Module,
    function: Callable[..., Any],
    inputs: Sequence[Any],
    places: Places,
    *,
    loss_of: Callable[[Any], Tensor] | None,
    clock: Callable[[], float] | None = None,
) -> list[ModelSegment]:
    """Return the parts of a model between the places at which a stage could begin.

    Time: four passes of the micro-batch. Parameters, their gradients, buffers and generators are left as they are.

    Args:
        model: The whole model.
        function: The forward pass with its loss, called with the model and the inputs.
        inputs: Those of a micro-batch.
        places: The places.
        loss_of: Returns the scalar from which backward starts. None: only forward passes are measured.
        clock: Returns a time in seconds that does not differ from pass to pass, such as that of fake tensors: one pass
            is then enough. None: time is measured.
    """
    runs = []
    names = places.names
    warm_ups, repeats = (_WARM_UPS, _REPEATS) if clock is None else (0, 1)
    clock = clock or _clock_for(next(model.parameters()).device)
    # Operators keep transposed weights, which are views of parameters, and the micro-batch itself.
    given = [tensor for tensor in (*model.parameters(), *tree_leaves(inputs)) if isinstance(tensor, Tensor)]
    for number in range(warm_ups + repeats):
        run = _Run(len(names) + 1, clock, given=given)
        with kept_generators(), _kept_gradients(model):
            own = _copied(model)
            blocks = {name: own.get_submodule(name) for name in names}
            with (
                calls_seen_by(blocks, run.call_of(names)),
                torch.autograd.graph.saved_tensors_hooks(run.keep, lambda kept: kept),
            ):
                run.start()
                result = function(own, *inputs)
                loss = None if loss_of is None else loss_of(result)
            run.end_forward()
            if loss is not None:
                run.backward(loss)
        if number >= warm_ups:
            runs.append(run)
    across = bytes_across(places.program)
    states = _state_nbytes(model, places)
    return [
        ModelSegment(
            name="" if not place else names[place - 1],
            forward_s=(forward_s := statistics.median(run.forward_s[place] for run in runs)),
            backward_s=forward_s * _BACKWARD
            if loss_of is None
            else statistics.median(run.backward_s[place] for run in runs),
            state_nbytes=states[place],
            activation_nbytes=runs[-1].kept_nbytes[place],
            entering_nbytes=across[places.calls[place - 1]] if place else 0,
        )
        for place in range(len(names) + 1)
    ]


class _Run:
    """One pass through the model: what each segment takes."""

    def __init__(self, segments: int, clock: Callable[[], float], *, given: Sequence[Tensor]) -> None:
        self._clock = clock
        self.forward_s, self.backward_s = [0.0] * segments, [0.0] * segments
        self.kept_nbytes = [0] * segments
        self._segment, self._since_s = 0, 0.0
        self._inside = False
        self._begun = {0}
        # Not the address of the data, which fake tensors have not.
        self._seen = {tensor.untyped_storage()._cdata for tensor in given}
        self._reached: dict[int, float] = {}

    def start(self) -> None:
        """Note that the first segment begins."""
        self._since_s = self._clock()

    def begin(self, segment: int) -> None:
        """Note that a segment begins."""
        now_s = self._clock()
        self.forward_s[self._segment] += now_s - self._since_s
        self._segment, self._since_s = segment, self._clock()
        self._begun.add(segment)

    def end_forward(self) -> None:
        """Note that the last segment has ended."""
        self.begin(self._segment)

    def keep(self, tensor: Tensor) -> Tensor:
        """Count a tensor that is kept for the backward pass."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.kept_nbytes[self._segment] += storage.nbytes()
        return tensor

    def call_of(self, names: Sequence[str]) -> Callable[..., Any]:
        """Return what is called in place of the blocks."""
        segments = {name: number for number, name in enumerate(names, 1)}

        def call(name: str, own_call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            segment = segments[name]
            if self._inside or segment in self._begun:
                return own_call(*args, **kwargs)
            self.begin(segment)
            if torch.is_grad_enabled():
                args, kwargs = tree_map_only(Tensor, lambda tensor: self._marked(tensor, segment), (args, kwargs))
            self._inside = True
            try:
                return own_call(*args, **kwargs)
            finally:
                self._inside = False

        return call

    def _marked(self, tensor: Tensor, segment: int) -> Tensor:
        if not tensor.requires_grad or tensor.is_leaf:
            return tensor

        def note() -> None:
            self._reached[segment] = self._clock()

        marked: Tensor = _Mark.apply(tensor, note)  # type: ignore[no-untyped-call]
        return marked

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass."""
        since_s = self._clock()
        loss.backward()  # type: ignore[no-untyped-call]
        self._reached[0] = self._clock()
        # A segment whose inputs need no gradient ends with the one before it.
        for segment in sorted(self._begun, reverse=True):
            reached_s = self._reached.get(segment)
            if reached_s is not None and reached_s > since_s:
                self.backward_s[segment], since_s = reached_s - since_s, reached_s


def _clock_for(device: torch.device) -> Callable[[], float]:
    """Return what tells the time of computations on a device, in seconds."""
    if device.type == "cpu":
        return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def after_all_kernels() -> float:
        torch.accelerator.synchronize(device)
        return time.perf_counter()

    return time.perf_counter if device.type == "meta" else after_all_kernels


@contextmanager
def _kept_gradients(model: nn.Module) -> Iterator[None]:
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _copied(model: nn.Module) -> nn.Module:
    """Return the model with the same parameters, and copies of all else that its code may write."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    mode = detect_fake_mode([*model.parameters()])
    if mode is not None:
        # A copy of a fake tensor has a copy of its mode, whose weak references would be freed twice.
        memo |= {id(mode): mode, **{id(buffer): buffer.clone() for buffer in model.buffers()}}
    return copy.deepcopy(model, memo)


def _state_nbytes(model: nn.Module, places: Places) -> list[int]:
    """Return for each segment the memory of the parameters that it is the first to use."""
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    found = [0] * (len(places.names) + 1)
    bounds = (*places.calls, len(places.program.calls))
    segment = 0
    for call in places.program.calls:
        while call.number >= bounds[segment]:
            segment += 1
        for name in call.parameters:
            found[segment] += STATE_COPIES * sizes.pop(name, 0)
    return found
