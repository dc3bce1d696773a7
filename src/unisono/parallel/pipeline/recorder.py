"""Record the calls of one forward pass on fake tensors, without touching parameters, buffers or random generators.

The model is copied with fake parameters, so nothing that its code assigns or counts reaches the original. Values that
depend on inputs alone are computed for real, since the model's code may read numbers from them: does a mask hide any?
"""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from unisono.errors import CutError
from unisono.parallel.pipeline.blocks import calls_seen_by, find_blocks
from unisono.parallel.pipeline.forward_program import (
    Call,
    ForwardProgram,
    ObjectRef,
    ParameterRef,
    TensorObject,
    Value,
    learned_from,
)
from unisono.parallel.pipeline.functions import GETTERS, HOOKS, READERS, REFUSED, is_transformed
from unisono.parallel.pipeline.leaves import flatten
from unisono.parallel.pipeline.model_line import model_line, model_line_of
from unisono.parallel.pipeline.operator_observer import OperatorObserver
from unisono.parallel.pipeline.placeholder import Placeholder, TensorLayout
from unisono.state.random import kept_generators

__all__ = ["record"]

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


def _python_generators() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    name, keys, *rest = numpy.random.get_state()
    return random.getstate(), name, keys.tobytes(), *rest


def record(
    model: nn.Module,
    function: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    starts: Sequence[str],
    layouts: Mapping[str, TensorLayout] = MappingProxyType({}),
) -> ForwardProgram:
    """Return the program of `function(model, *inputs)`.

    Args:
        model: The whole model. The memory of parameters is not read, so it may be freed.
        function: The forward pass with its loss.
        inputs: Its further arguments, real; they are copied.
        starts: The submodules whose first call begins a stage, from the second stage on.
        layouts: Those of parameters whose memory has been given back, by name.

    Raises:
        CutError: The model's code between blocks reads numbers that depend on a block.
    """
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    blocks = find_blocks(model, starts)
    copied, leaves, buffers = _copy_with_fakes(model, blocks, fake_mode, layouts)
    recorder = _Recorder(fake_mode, leaves, buffers)
    given, build = flatten(tuple(inputs))
    own = []
    for place, leaf in enumerate(given):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                raise CutError(f"input {place}, of shape {tuple(leaf.shape)}, requires a gradient; detach it first")
            own.append(leaf.detach().clone())
            recorder.program.inputs[place] = recorder.real_object(own[-1]).number
        else:
            own.append(leaf)
    copies = {name: copied.get_submodule(name) for name in blocks}
    with (
        kept_generators(),
        torch.compiler.set_stance("force_eager"),
        calls_seen_by(copies, recorder.call_block),
        recorder,
    ):
        result = function(copied, *build(iter(own)))
    recorder.note_results(result)
    return recorder.program


def _copy_with_fakes(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    fake_mode: FakeTensorMode,
    layouts: Mapping[str, TensorLayout],
) -> tuple[nn.Module, dict[int, tuple[str, Tensor]], dict[int, tuple[str, Tensor]]]:
    leaves: dict[int, tuple[str, Tensor]] = {}
    buffers: dict[int, tuple[str, Tensor]] = {}
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if (layout := layouts.get(name)) is None:
            fake: Tensor = fake_mode.from_tensor(parameter)
        else:
            with fake_mode:
                fake = nn.Parameter(layout.allocate(), requires_grad=parameter.requires_grad)
        memo[id(parameter)] = fake
        leaves[id(fake)] = (name, fake)
    in_blocks = {id(buffer) for block in blocks.values() for buffer in block.buffers()}
    for name, buffer in model.named_buffers():
        if id(buffer) in in_blocks:
            fake = fake_mode.from_tensor(buffer)
            memo[id(buffer)] = fake
            buffers[id(fake)] = (name, fake)
        else:
            memo[id(buffer)] = buffer.detach().clone()
    return copy.deepcopy(model, memo), leaves, buffers


class _Recorder(TorchFunctionMode):
    """Numbers all calls of torch functions and of blocks, and runs them on fake tensors."""

    def __init__(
        self, fake_mode: FakeTensorMode, leaves: dict[int, tuple[str, Tensor]], buffers: dict[int, tuple[str, Tensor]]
    ) -> None:
        super().__init__()
        self.program = ForwardProgram()
        self._fake_mode = fake_mode
        self._leaves = leaves
        self._buffers = buffers
        self._held: list[Tensor] = []
        """The real tensor or placeholder that the model's code has for each object. It keeps identities unique."""
        self._fakes: list[Tensor] = []
        self._number_of: dict[int, int] = {}
        """The object of a tensor by its id: real tensors, placeholders and fake tensors."""
        self._in_block = False
        self._has_graph = torch.is_grad_enabled()
        self._hooks: list[Any] = []
        """The hooks for saved tensors that calls were made within, in turn."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._in_block or func in GETTERS:
            return func(*args, **kwargs)
        if is_transformed((args, kwargs)):
            return func(*args, **kwargs)
        call = self._new_call(getattr(func, "__name__", str(func)), func, None)
        if func in REFUSED:
            raise CutError(
                f"{call.line} calls {call.name} between blocks, where no stage has the whole graph. Gradients are "
                "computed by the backward pass of the step, after the forward pass."
            )
        if func in HOOKS:
            return self._attach(call, func, args, kwargs)
        if func in READERS:
            return self._read_numbers(call, func, args, kwargs)
        return self._run(call, func, args, kwargs)

    def call_block(self, name: str, own_call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the call of a block."""
        if self._in_block:  # a block that another block holds as well
            return own_call(*args, **kwargs)
        self._in_block = True
        drawn = _python_generators()
        try:
            result = self._run(self._new_call(name, None, name), own_call, args, kwargs)
        finally:
            self._in_block = False
        if _python_generators() != drawn:
            raise CutError(
                f"block {name!r} draws from Python's or NumPy's random numbers, whose state does not travel between "
                "stages: draw from torch's, which does."
            )
        return result

    def note_results(self, result: Any) -> None:
        """Note the values that the function returned."""
        found = [self._number_of.get(id(leaf)) for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
        self.program.results = tuple(self.program.objects[one].values[-1] for one in found if one is not None)

    def real_object(self, tensor: Tensor) -> TensorObject:
        """Return the object of a real tensor, new if it was not seen: an input, a buffer or a constant."""
        if id(tensor) in self._number_of:
            return self.program.objects[self._number_of[id(tensor)]]
        if tensor.requires_grad:
            raise CutError(
                f"a tensor of shape {tuple(tensor.shape)} that requires a gradient is used at {model_line()}, and "
                "it is neither a parameter of the model that the function was called with, nor made from results of "
                "its blocks. Use the model that is given; what a block keeps in an attribute, let it return instead."
            )
        return self._new_object(tensor, self._fake_mode.from_tensor(tensor), None, everywhere=True)

    def _new_call(self, name: str, function: Any, block: str | None) -> Call:
        call = Call(number=len(self.program.calls), name=name, function=function, block=block, line=model_line())
        call.in_function = self._has_graph and not torch.is_grad_enabled()
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None:
            if not self._hooks or self._hooks[-1] is not hooks[0]:
                self._hooks.append(hooks[0])
            call.hooks = len(self._hooks)
        self.program.calls.append(call)
        return call

    def _new_object(self, held: Tensor, fake: Tensor, call: int | None, *, everywhere: bool) -> TensorObject:
        made = TensorObject(len(self.program.objects), call, storage=fake.untyped_storage()._cdata)
        self.program.objects.append(made)
        self._held.append(held)
        self._fakes.append(fake)
        self._number_of[id(held)] = self._number_of[id(fake)] = made.number
        self._new_value(made, call, everywhere=everywhere)
        return made

    def _new_value(self, of: TensorObject, call: int | None, *, everywhere: bool) -> Value:
        value = Value(len(self.program.values), of.number, call, everywhere, TensorLayout.of(self._fakes[of.number]))
        self.program.values.append(value)
        of.values.append(value.number)
        return value

    def _everywhere(self, number: int) -> bool:
        return self.program.values[self.program.objects[number].values[-1]].everywhere

    def _objects_in(self, tree: Any) -> list[int]:
        return [
            self._number_of[id(leaf)] if id(leaf) in self._number_of else self.real_object(leaf).number
            for leaf in tree_leaves(tree)
            if isinstance(leaf, Tensor) and id(leaf) not in self._leaves and id(leaf) not in self._buffers
        ]

    def _check_function(self, tree: Any) -> None:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Placeholder) and leaf.grad_fn is not None:
                raise CutError(
                    f"a torch.autograd.Function ({leaf.grad_fn.name()}) is applied outside of all blocks, and its "
                    f"result used at {model_line()}. Apply it in a block: in the forward of a module with parameters."
                )

    def _has_leaves(self, tree: Any) -> bool:
        return any(id(leaf) in self._leaves or id(leaf) in self._buffers for leaf in tree_leaves(tree))

    def _read_numbers(self, call: Call, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        numbers = self._objects_in((args, kwargs))
        if self._has_leaves((args, kwargs)) or not all(map(self._everywhere, numbers)):
            raise CutError(
                f"{call.line} reads numbers from a tensor that depends on a block or a parameter ({call.name}), "
                "outside of all blocks. Only the stage that has the tensor could go on. Move this code into a block, "
                "or decide by shapes or inputs."
            )
        call.reads = tuple(self.program.objects[one].values[-1] for one in numbers)
        call.everywhere = call.always = self.program.reads_numbers = True
        result = func(*args, **kwargs)
        call.seen = learned_from(result)
        return result

    def _attach(self, call: Call, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        handle = RemovableHandle(OrderedDict()) if func is Tensor.register_hook else None
        call.results = (handle,)
        call.everywhere = call.always = id(args[0]) in self._leaves or self._everywhere(self._objects_in(args[0])[0])
        if not call.everywhere:
            call.on_stage_of = self.program.objects[self._objects_in(args[0])[0]].values[-1]
        return func(*args, **kwargs) if call.everywhere else handle

    def _run(self, call: Call, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self._check_function((args, kwargs))
        given = self._objects_in((args, kwargs))
        fake_args, fake_kwargs = tree_map_only(Tensor, self._fake_of, (tuple(args), kwargs))
        observer = OperatorObserver()
        try:
            with self._fake_mode, observer:
                result = function(*fake_args, **fake_kwargs)
        except _NEEDS_VALUES as error:
            if call.block is None and all(map(self._everywhere, given)) and not self._has_leaves((args, kwargs)):
                self.program.reads_numbers = True
                observer.read = {id(self._fakes[one]): self._fakes[one] for one in given}
                result = self._run_everywhere(call, observer, function, args, kwargs)
                call.always, call.seen = True, learned_from(result)
                return result
            raise CutError(_needs_values(call, error)) from error
        except RuntimeError as error:
            what = f"block {call.block!r}" if call.block else call.name
            raise CutError(
                f"{what} at {call.line} failed on fake tensors, with which the shapes of its results are found, at "
                f"{model_line_of(error)}: {error}"
            ) from error
        self._note_uses(call, observer)
        if self._is_everywhere(call, observer, result):
            return self._run_everywhere(call, observer, function, args, kwargs)
        self._note_writes(call, observer, given, everywhere=False)
        leaves, call.build = flatten(result)
        held = [self._hold(leaf, call) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        call.results = tuple(self._result(leaf) if isinstance(leaf, Tensor) else leaf for leaf in held)
        return call.build(iter(held))

    def _run_everywhere(
        self,
        call: Call,
        observer: OperatorObserver,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        result = function(*args, **kwargs)
        call.everywhere = True
        self._note_uses(call, observer)
        self._note_writes(call, observer, self._objects_in((args, kwargs)), everywhere=True)
        leaves, call.build = flatten(result)
        # A call that makes nothing returns what it was given (`x.to(x.dtype)`) or tells about it (`x.size()`).
        # One that modifies a buffer is done for that.
        written = [self.program.objects[self.program.values[one].object] for one in call.writes]
        call.always = any(one.call is None for one in written) or (
            not written and all(not isinstance(leaf, Tensor) or id(leaf) in self._number_of for leaf in leaves)
        )
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in self._number_of:
                self._new_object(leaf, self._fake_mode.from_tensor(leaf), call.number, everywhere=True)
        call.results = tuple(self._result(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return result

    def _result(self, held: Tensor) -> ObjectRef | ParameterRef:
        if id(held) in self._number_of:
            return ObjectRef(self._number_of[id(held)])
        return ParameterRef((self._leaves.get(id(held)) or self._buffers[id(held)])[0])

    def _is_everywhere(self, call: Call, observer: OperatorObserver, result: Any) -> bool:
        if call.block is not None or call.draws or call.parameters:
            return False
        if any(id(tensor) in self._buffers for tensor in observer.read.values()):
            return False
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(result)):
            return False
        # A result that is one of the arguments (`x.contiguous()`, `x.to(x.dtype)`) is where that is.
        known = [self._number_of[id(leaf)] for leaf in tree_leaves(result) if id(leaf) in self._number_of]
        read = [self.program.values[one].everywhere for one in call.reads]
        return all(read) and all(map(self._everywhere, known))

    def _note_uses(self, call: Call, observer: OperatorObserver) -> None:
        call.draws, call.has_hooks = observer.draws, observer.has_hooks
        numbers = dict.fromkeys(self._number_of[one] for one in observer.read if one in self._number_of)
        call.reads = tuple(self.program.objects[one].values[-1] for one in numbers)
        call.parameters = tuple(self._leaves[one][0] for one in observer.read if one in self._leaves)
        call.read_buffers = tuple(self._buffers[one][0] for one in observer.read if one in self._buffers)
        call.written_buffers = tuple(self._buffers[one][0] for one in observer.written if one in self._buffers)
        written = [self._leaves[one][0] for one in observer.written if one in self._leaves]
        if written:
            raise CutError(f"{call.line} modifies the parameter {written[0]} in the forward pass")

    def _note_writes(self, call: Call, observer: OperatorObserver, given: Sequence[int], *, everywhere: bool) -> None:
        numbers = dict.fromkeys(self._number_of[one] for one in observer.written if one in self._number_of)
        # `x[0] = y` modifies a view of x that only it sees.
        storages = {tensor.untyped_storage()._cdata for tensor in observer.written.values()}
        numbers.update(dict.fromkeys(one for one in given if self.program.objects[one].storage in storages))
        call.writes = tuple(
            self._new_value(self.program.objects[one], call.number, everywhere=everywhere).number for one in numbers
        )

    def _fake_of(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        return self._fakes[self._number_of[id(tensor)]]

    def _hold(self, fake: Tensor, call: Call) -> Tensor:
        # Known: returned as it was given. Parameters are held as they are.
        if id(fake) in self._leaves or id(fake) in self._buffers:
            return fake
        if id(fake) in self._number_of:
            return self._held[self._number_of[id(fake)]]
        where = f"made by {call.name}"
        placeholder = Placeholder(TensorLayout.of(fake), fake, where)
        self._new_object(placeholder, fake, call.number, everywhere=False)
        return placeholder


def _needs_values(call: Call, error: BaseException) -> str:
    what = f"block {call.block!r}" if call.block else f"{call.name}, outside of all blocks,"
    return (
        f"{what} reads numbers from a tensor at {model_line_of(error)}, and the shapes of its results may depend on "
        "them. Stages must know all shapes before they run."
    )
