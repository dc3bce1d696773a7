"""One stage: runs the model's own forward pass, of which it computes its own calls, and the backward pass of these.

Start reading at `Stage.forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode

from unisono.errors import PathChangedError
from unisono.parallel.graph_entry import enter
from unisono.parallel.pipeline.blocks import calls_seen_by, find_blocks
from unisono.parallel.pipeline.forward_program import Call, ObjectRef, ParameterRef, learned_from
from unisono.parallel.pipeline.functions import GETTERS, is_transformed
from unisono.parallel.pipeline.leaves import flatten
from unisono.parallel.pipeline.model_line import model_line
from unisono.parallel.pipeline.placeholder import Placeholder
from unisono.parallel.pipeline.split_backward import SplitBackward
from unisono.parallel.pipeline.stage_plan import PipelinePlan
from unisono.state.random import generator_states, set_generator_states

__all__ = ["Gradients", "Stage", "StagePass"]


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients that one stage passes to earlier ones."""

    values: dict[int, Tensor] = field(default_factory=dict)
    """By value: each goes to `ValueTransfer.gradient_target`. A value without gradient is absent."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """Of parameters that earlier stages use as well, by name: each goes to the stage before in `parameter_stages`."""


@dataclass(slots=True)
class StagePass:
    """One forward pass of a stage, kept for its backward pass."""

    result: Any = None
    """The value that the function returned; on all stages but the last, with placeholders."""
    sent: dict[int, Tensor] = field(default_factory=dict)
    """The values that other stages receive, with their graph."""
    random_state: Tensor | None = None
    """The state of the CPU's generator after the stage's last call."""
    entered: dict[int, Tensor] = field(default_factory=dict)
    """The values that were received, as the roots of the stage's graph."""
    entries: list[Tensor] = field(default_factory=list)
    """The leaves below them."""
    captured: dict[int, Tensor] = field(default_factory=dict)
    """The gradients of the values that were received."""


class Stage:
    """A stage of a pipeline.

    Args:
        plan: The plan of all stages.
        number: Which of them this is; None for a pass that computes nothing but what the model's code reads.
        model: The whole model; parameters that the stage does not use are never read.
        starts: The names of the blocks with which stages begin.
    """

    def __init__(self, plan: PipelinePlan, number: int | None, model: nn.Module, *, starts: Sequence[str]) -> None:
        self.plan = plan.path if number is None else plan.stages[number]
        self._pipeline = plan
        self._model = model
        self._blocks = find_blocks(model, starts)
        self._parameters = dict(model.named_parameters())
        self._placeholders: dict[int, Placeholder] = {}
        self._passed_on = [name for name in self.plan.parameters if plan.parameter_stages[name][0] != self.plan.stage]
        """The parameters whose gradients go to an earlier stage."""

    def forward(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Any],
        received: Mapping[int, Tensor],
        *,
        random_state: Tensor | None = None,
        on_end: Callable[[StagePass], None] = lambda _: None,
    ) -> StagePass:
        """Compute the stage's calls of one forward pass.

        Args:
            function: The forward pass with its loss, called with the model and the inputs.
            inputs: Its further arguments, the same on all stages.
            received: A tensor for each value that the stage receives.
            random_state: The states in which the stage before left the generators; None leaves them as they are.
            on_end: Called after its last call, before the rest of the model's code runs: sends.

        Raises:
            PathChangedError: The model's code made other calls than were recorded.
        """
        mode = _StageMode(self, received, random_state, on_end)
        for place, leaf in enumerate(flatten(tuple(inputs))[0]):
            if isinstance(leaf, Tensor):
                mode.objects[self._pipeline.program.inputs[place]] = leaf
        if self.plan.draws_after < 0:
            mode.take_over()
        with calls_seen_by(self._blocks, mode.call_block), mode:
            mode.done.result = function(self._model, *inputs)
        mode.finish()
        return mode.done

    def backward(
        self, done: StagePass, gradients: Gradients, *, losses: Sequence[tuple[Tensor, Tensor | None]] = ()
    ) -> Gradients:
        """Compute the gradients of one forward pass; those of parameters are added to `grad` at their first stage.

        Args:
            done: What `forward` returned.
            gradients: The gradients from later stages: of the values that the stage sent or passes on, and of its
                parameters that later stages use as well.
            losses: On the last stage, the tensors from which to start, each with its gradient or None for 1.

        Returns:
            The gradients that earlier stages need.
        """
        roots = self._roots(done, gradients, losses)
        kept = {name: self._parameters[name].grad for name in self._passed_on}
        for name in kept:
            self._parameters[name].grad = None
        if roots:
            torch.autograd.backward([one for one, _ in roots], [one for _, one in roots])
        parameter_gradients = {}
        for name, gradient in kept.items():
            parameter = self._parameters[name]
            if parameter.grad is not None:
                parameter_gradients[name] = parameter.grad
            parameter.grad = gradient
        return Gradients(done.captured, parameter_gradients)

    def backward_in_parts(
        self, done: StagePass, gradients: Gradients, *, losses: Sequence[tuple[Tensor, Tensor | None]] = ()
    ) -> tuple[Gradients, Callable[[], None]] | None:
        """Compute the gradients that earlier stages need alone, if the backward pass can be divided so; see `backward`.

        Returns:
            These gradients, and what adds those of parameters to `grad` when it is called. None, and nothing is done,
            if the pass is to run as a whole.
        """
        if self.plan.has_hooks:  # activation checkpointing would compute everything again for each part
            return None
        passed_on = {name: self._parameters[name] for name in self._passed_on}
        roots, sent = self._roots(done, gradients, losses), list(passed_on.values())
        parameters = [self._parameters[name] for name in self.plan.parameters]
        parts = SplitBackward.of(roots, done.entries, sent, parameters)
        if parts is None:
            return None
        found = parts.backward_input()
        parameter_gradients = {name: found[id(each)] for name, each in passed_on.items() if id(each) in found}
        return Gradients(done.captured, parameter_gradients), partial(parts.backward_weight, sent)

    def _roots(
        self, done: StagePass, gradients: Gradients, losses: Sequence[tuple[Tensor, Tensor | None]]
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Return the tensors from which a backward pass starts, each with its gradient."""
        roots = list(losses)
        for value, gradient in gradients.values.items():
            roots.append((done.sent[value] if value in done.sent else done.entered[value], gradient))
        for name in self.plan.parameters:
            if name in gradients.parameters:
                roots.append((self._parameters[name], gradients.parameters[name]))
        return [root for root in roots if root[0].requires_grad]

    def results_of(self, call_number: int, objects: Mapping[int, Tensor]) -> Any:
        """Return what stands for the result of a call of another stage.

        Args:
            call_number: The call.
            objects: The tensors that this stage has.
        """
        call = self._pipeline.program.calls[call_number]
        return call.build(self._stand_in(leaf, objects) for leaf in call.results)

    def _stand_in(self, leaf: Any, objects: Mapping[int, Tensor]) -> Any:
        if isinstance(leaf, ParameterRef):
            return self._parameters[leaf.name]
        if not isinstance(leaf, ObjectRef):
            return leaf
        if leaf.number in objects:
            return objects[leaf.number]
        if (known := self._placeholders.get(leaf.number)) is not None:
            return known
        program = self._pipeline.program
        value = program.values[program.objects[leaf.number].values[0]]
        call = None if value.call is None else program.calls[value.call]
        made = Placeholder(value.layout, None, f"{f'made by {call.name}' if call else 'an input'} on another stage")
        if call is None or not call.in_function:  # otherwise each pass has its own: it may be part of that pass's graph
            self._placeholders[leaf.number] = made
        return made


def _in_transform() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


class _StageMode(TorchFunctionMode):
    """Counts the calls of one forward pass and runs those of the stage."""

    def __init__(
        self,
        stage: Stage,
        received: Mapping[int, Tensor],
        random_state: Tensor | None,
        on_end: Callable[[StagePass], None],
    ) -> None:
        super().__init__()
        self.done = StagePass()
        self.objects: dict[int, Tensor] = {}
        self._stage = stage
        self._plan = stage.plan
        self._calls = stage._pipeline.program.calls
        self._random_state = random_state
        self._on_end = on_end
        self._next = 0
        self._passive = False
        self._ended = False
        for transfer in self._plan.received:
            entered = received[transfer.value]
            if transfer.requires_grad:
                entered, leaf = enter(entered, self.done.captured, transfer.value)
                if leaf is not None:
                    self.done.entries.append(leaf)
            self.done.entered[transfer.value] = self.objects[transfer.object] = entered

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._passive or func in GETTERS or (_in_transform() and is_transformed((args, kwargs))):
            return func(*args, **kwargs)
        try:
            return self._call(func, None, func, args, kwargs)
        except BaseException:
            self._passive = True  # what `finally` and `with` call on the way out is not counted
            raise

    def call_block(self, name: str, own_call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block's call or skip it."""
        if self._passive:  # inside another block
            return own_call(*args, **kwargs)
        self._passive = True
        result = self._call(None, name, partial(self._run_unseen, own_call), args, kwargs)
        self._passive = False
        return result

    def _run_unseen(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Off the stack if that is possible, a call in a block costs what it costs without a pipeline.
        if _get_current_function_mode() is not self:  # type: ignore[no-untyped-call]
            return run(*args, **kwargs)
        _pop_mode()  # type: ignore[no-untyped-call]
        try:
            return run(*args, **kwargs)
        finally:
            _push_mode(self)  # type: ignore[no-untyped-call]

    def _call(
        self, func: Any, block: str | None, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        number = self._next
        self._next += 1
        call = self._calls[number] if number < len(self._calls) else None
        if call is None or call.function != func or call.block != block:
            found = block or getattr(func, "__name__", str(func))
            known = f"{call.name} at {call.line}" if call else f"the end after {len(self._calls)} calls"
            raise PathChangedError(
                f"call {number} of the forward pass is {found} at {model_line()}, where {known} was recorded: the "
                "model's code went another way than before. What it decides by must be the same on all stages."
            )
        if number == self._plan.end:
            self.end()
        result = self._result_of(call, run, args, kwargs)
        if number == self._plan.draws_after:
            self.take_over()
        return result

    def _result_of(self, call: Call, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a call if it is the stage's own, or return what stands for its result."""
        number = call.number
        if not self._plan.runs[number]:
            return self._stage.results_of(number, self.objects)
        result = run(*args, **kwargs)
        if call.seen is not None and learned_from(result) != call.seen:
            raise PathChangedError(
                f"{call.line} read other numbers than were recorded ({call.name}), by which its code may decide."
            )
        if any(isinstance(leaf, ObjectRef) and leaf.number in self._plan.kept for leaf in call.results):
            for known_leaf, leaf in zip(call.results, flatten(result)[0], strict=True):
                if isinstance(known_leaf, ObjectRef) and known_leaf.number in self._plan.kept:
                    self.objects[known_leaf.number] = leaf
        return result

    def take_over(self) -> None:
        """Take over the generators from the stage before."""
        if self._random_state is not None:
            set_generator_states(self._random_state)

    def end(self) -> None:
        """Note what is sent and the state of the generator."""
        self._ended = True
        for transfer in self._plan.sent:
            self.done.sent[transfer.value] = self.objects[transfer.object]
        self.done.random_state = generator_states()
        self._run_unseen(self._on_end, self.done)

    def finish(self) -> None:
        """Check that all calls were made, and end the last stage."""
        if self._next != len(self._calls):
            raise PathChangedError(
                f"the forward pass made {self._next} calls, but {len(self._calls)} were recorded: the model's code "
                "went another way than before. What it decides by must be the same on all stages."
            )
        if not self._ended:
            self.end()
