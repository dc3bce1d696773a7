"""Builds a model of which no rank ever has the memory of the whole, with the values that one process would draw.

Every rank runs the user's constructor as it is, and so draws all random numbers. `_Parking` sees the operations of
torch: when parameters have grown by more than a little, it parks those that were used least recently, so each rank
keeps a slice of them (`ParkedMemory`). An operation that writes all of a parameter gives it fresh memory; any other
brings its values together first. Afterwards, each rank gets the parts that it keeps in training, a parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from unisono.arguments import function
from unisono.collectives.world import World
from unisono.engine.model_contents import plain_name
from unisono.engine.norm import in_memory_order
from unisono.engine.sharded import ShardedUnit
from unisono.engine.shared.partition import Piece
from unisono.engine.trainable import is_dense
from unisono.errors import RankMismatchError
from unisono.job.placement import own_placement
from unisono.job.user_function import refuse_inside
from unisono.machine import give_memory_back
from unisono.parallel.device_names import choose_device
from unisono.parallel.sharding.built_parts import BuiltParts, built_parts
from unisono.parallel.sharding.parked_memory import NamedTensor, ParkedMemory, memory_of
from unisono.parallel.sharding.shard import Shard
from unisono.parallel.sharding.units import check_replicas, grid_of, units_of
from unisono.text import a_type

__all__ = ["build"]

_BUDGET_NBYTES = 8 << 20
"""Memory of parameters that stays whole while others are made, and after whose growth room is made."""
_aten = torch.ops.aten
_READS_NOTHING = {
    _aten.detach, _aten.alias, _aten.view, _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like,
    _aten.rand_like, _aten.randn_like, _aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full,
    _aten.new_empty_strided,
}  # fmt: skip
"""Operations that make views within any memory, or read no more than shapes and types."""
_OVERWRITES = {
    _aten.zero_, _aten.fill_, _aten.copy_, _aten.normal_, _aten.uniform_, _aten.random_, _aten.bernoulli_,
    _aten.exponential_, _aten.log_normal_, _aten.cauchy_, _aten.geometric_,
}  # fmt: skip
"""Operations that write their first argument without reading it."""
_SHOWS_MEMORY = frozenset(
    {
        "__array__", "__dlpack__", "__reduce_ex__", "_typed_storage", "data_ptr", "numpy", "share_memory_", "storage",
        "tolist", "untyped_storage",
    }
)  # fmt: skip
"""Methods of tensors that show memory to code that torch does not see."""


def build(make_model: Callable[[], nn.Module], *, parallel: Shard, device: str | torch.device = "auto") -> nn.Module:
    """Build a model of which each rank keeps a part, for `Trainer(parallel=...)`, without memory for the whole.

    Every rank must call it; it begins the job, as a Trainer does. The function runs as it is, on each rank, with the
    values that one process would draw: `torch.nn.init`, methods such as reset_parameters, tied weights, buffers,
    load_state_dict and models of transformers need no care. Afterwards each rank has its own part alone, so the
    parameters are NaN and cannot be written to until a Trainer is made, of the same `Shard`. With one rank, or where
    each rank keeps all weights, the model is whole.

    The function builds on the CPU. Where ranks compute on GPUs, a rank's part goes there, parameter by parameter, or
    stays in memory of the CPU with `Shard(offload=True)`; and no GPU ever has the whole.

    Memory of a rank: its part, the largest parameter, and some 50 MB; buffers are whole. Time: that of the function;
    all parameters are hashed on each rank, and sent once. A parameter that is read, or changed in part, some time after
    it was made is sent again. What `numpy` or `data_ptr` has seen stays whole until the end. The function must not use
    torch in other threads.

    Args:
        make_model: Returns the model; it takes no arguments.
        parallel: How the Trainer is to divide the model.
        device: Where the model is to compute; see `Trainer`.

    Returns:
        The model that the function returned.

    Raises:
        TypeError: An argument has the wrong type, or the function does not return a module.
        ValueError: The model cannot be divided so: see `Trainer`. Or there is no such device.
        RankMismatchError: On all ranks, if ranks build different models.
        PeerError: Another rank has died or does not come in time.
    """
    refuse_inside("unisono.parallel.build")
    if isinstance(make_model, nn.Module):
        raise TypeError(
            f"make_model is {a_type(make_model)}, which each rank has built as a whole: give build the function that "
            "makes it, such as lambda: Model(...)"
        )
    function("make_model", make_model)
    if not isinstance(parallel, Shard):
        raise TypeError(f"parallel is {a_type(parallel)}; expected unisono.parallel.Shard(...)")
    chosen = choose_device(device, (), local_rank=own_placement().local_rank)
    world = World.connect(chosen)
    check_replicas(parallel, world.size)
    grid = grid_of(parallel, chosen, rank=world.rank, ranks=world.size)
    if grid.keeps_weights:
        return _checked(make_model()).to(chosen)
    parking = _Parking(world)
    with parking.watching() if world.size > 1 else nullcontext():
        model = _checked(make_model())
    _check_memory(model)
    on_cpu = parallel.offloads(chosen)
    units = [
        ShardedUnit(name, {plain_name(each): p for each, p in own.items()}, grid, device=chosen, on_cpu=on_cpu)
        for name, own in units_of(parallel, model).members.items()
    ]
    _compare(world, model, parking.memory)
    with torch.no_grad():
        for unit in units:
            _fill(unit, parking.memory)
            give_memory_back()
        for module in model.modules():
            module._buffers.update({name: b.to(chosen) for name, b in module._buffers.items() if b is not None})
    model.register_forward_pre_hook(BuiltParts(parallel, grid, units, chosen))
    return model


class _Parking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Parks the memory of parameters that are made within it, and brings it back for operations that read it."""

    def __init__(self, world: World) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = ParkedMemory(world, budget_nbytes=_BUDGET_NBYTES)
        self._modules: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
        self._grown = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See operations, modules and methods that show memory, for the length of a `with` block."""
        hook = register_module_parameter_registration_hook(self._note_module)
        try:
            with self, _Shown(self.show):
                yield
        finally:
            hook.remove()

    def _note_module(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        self._modules[module] = None

    def parameters(self) -> Iterator[NamedTensor]:
        """Yield the parameters of the modules that there are."""
        for module in list(self._modules):
            for name, p in module._parameters.items():
                if p is not None and not nn.parameter.is_lazy(p):
                    yield NamedTensor(f"{type(module).__name__}.{name}", p)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call an operation of torch with its inputs in memory."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            inputs = _memories((args, kwargs))
            if func.overloadpacket not in _READS_NOTHING:
                for memory in inputs:
                    self.memory.note_use(memory)
                    if self.memory.is_parked(memory):
                        if inputs.count(memory) == 1 and self._overwrites(func, args, memory):
                            self._grown += self.memory.overwrite(memory)
                        else:
                            self._grown += self.memory.bring(memory)
            result = func(*args, **kwargs)
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and (made := memory_of(tensor)) is not None and made not in inputs:
                    self._grown += tensor.untyped_storage().nbytes()
            if self._grown > _BUDGET_NBYTES:
                self._grown = 0
                self.memory.make_room(self.parameters, {*inputs, *_memories(result)})
            return result

    def _overwrites(self, func: Any, args: Sequence[Any], memory: int) -> bool:
        """Return True if an operation writes all of some parked memory without reading it."""
        return (
            func.overloadpacket in _OVERWRITES
            and memory_of(args[0]) == memory
            and is_dense(args[0])
            and self.memory.is_all(args[0])
        )

    def show(self, tensor: Tensor) -> None:
        """Bring a tensor's memory together, and keep it there: code that torch does not see may use it from now on."""
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            memory = memory_of(tensor)
            if memory is not None:
                if self.memory.is_parked(memory):
                    self.memory.bring(memory)
                self.memory.pin(tensor)


class _Shown(TorchFunctionMode):
    """Sees methods that show the memory of a tensor.

    Args:
        show: Called with the tensor before.
    """

    def __init__(self, show: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._show = show

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        if getattr(func, "__name__", "") in _SHOWS_MEMORY:
            for each in args:
                if isinstance(each, Tensor):
                    self._show(each)
        return func(*args, **(kwargs or {}))


def _memories(values: Any) -> list[int]:
    """Return the memory of the tensors in some values."""
    found = (memory_of(each) for each in tree_leaves(values) if isinstance(each, Tensor))
    return [memory for memory in found if memory is not None]


def _checked(model: Any) -> nn.Module:
    """Return what the user's function has returned, if it is a model.

    Raises:
        TypeError: It is not.
        ValueError: A part of it was built by `build`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"make_model returned {a_type(model)}; expected a torch.nn.Module")
    if any(built_parts(module) is not None for module in model.modules()):
        raise ValueError(
            "a part of the model was built by unisono.parallel.build itself: call it once, for the whole model"
        )
    return model


def _check_memory(model: nn.Module) -> None:
    """Refuse parameters whose memory cannot come and go; see `divided_model.check_memory`.

    Raises:
        ValueError: There is one.
    """
    named = dict(model.named_parameters())
    lazy = next((name for name, p in named.items() if nn.parameter.is_lazy(p)), None)
    if lazy is not None:
        raise ValueError(
            f"parameter {lazy!r} has no size yet: run the model on one batch in the function that makes it"
        )
    of_memory: dict[int, str] = {}
    for name, tensor in [*named.items(), *model.named_buffers()]:
        memory = memory_of(tensor)
        if memory is None or not tensor.numel():
            if name in named and tensor.device.type != "cpu":
                raise ValueError(
                    f"the function that is given to unisono.parallel.build has made {name!r} on {tensor.device}: build "
                    "the model on the CPU, from where each rank's part of it goes to its device"
                )
            continue
        if name in named and not is_dense(tensor):
            raise ValueError(
                f"Shard gives back the memory of parameters, and {name!r} is not dense in memory (shape "
                f"{list(tensor.shape)}, strides {list(tensor.stride())}). Give it memory of its own: "
                "p.data = p.data.contiguous().clone()"
            )
        other = of_memory.setdefault(memory, name)
        if other != name and (name in named or other in named):
            raise ValueError(
                f"Shard gives back the memory of parameters, and {other!r} shares its memory with "
                f"{name!r}. Give it memory of its own: p.data = p.data.contiguous().clone()"
            )


def _compare(world: World, model: nn.Module, memory: ParkedMemory) -> None:
    """Compare the values of all ranks by hashes, before parts of several ranks are put together.

    Raises:
        RankMismatchError: On all ranks, naming a tensor that differs.
    """
    own = {name: (tuple(p.shape), str(p.dtype), *memory.describe(p)) for name, p in model.named_parameters()}
    everyone = world.gather(own, "unisono.parallel.build comparing models")
    for rank, theirs in enumerate(everyone):
        differing = [name for name in {**everyone[0], **theirs} if everyone[0].get(name) != theirs.get(name)]
        if differing:
            raise RankMismatchError(
                f"the model differs between ranks: {differing[0]!r} of rank {rank} is not that of rank 0 "
                f"({len(differing)} of {len(everyone[0])} parameters differ). Every rank must build the same model: "
                "call torch.manual_seed with the same number on every rank before building it, and give every "
                "parameter values."
            )


def _fill(unit: ShardedUnit, memory: ParkedMemory) -> None:
    """Keep this rank's part of a unit, a parameter at a time. Every rank must call it."""
    places: list[list[tuple[Piece, Tensor]]] = [[] for _ in unit.parameters]
    for piece, place in unit.held_places():
        places[piece.parameter].append((piece, place))
    for p, strides, own in zip(unit.parameters, unit.strides, places, strict=True):
        key = memory_of(p)
        if key is not None and memory.is_parked(key):
            memory.join(key)
        values = in_memory_order(p.data, strides)
        for piece, place in own:
            place.copy_(values[piece.start : piece.stop])
        del values
        memory.release(p)
    unit.divide()
