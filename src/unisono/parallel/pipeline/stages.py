"""A model that is cut over ranks, for a training loop of one's own. Start reading at `cut`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono.arguments import function as check_function
from unisono.arguments import real, whole
from unisono.collectives.world import World
from unisono.engine.model_contents import plain_name
from unisono.engine.norm import block_norms, blocks_of, clip_factor, dense_strides, global_norm, in_memory_order
from unisono.engine.staged import SharedParameterCopies
from unisono.errors import RankMismatchError
from unisono.parallel.model_handle import ModelHandle
from unisono.parallel.pipeline.blocks import find_blocks
from unisono.parallel.pipeline.cut_model import CutModel
from unisono.parallel.pipeline.leaves import flatten
from unisono.parallel.pipeline.pipeline import Pipeline
from unisono.parallel.pipeline.runner import LossRoot
from unisono.parallel.placed.forward import refuse_placed
from unisono.parallel.remote_module import refuse_remote
from unisono.plan import derive_key
from unisono.state.random import kept_generators, set_generators

__all__ = ["PipelineStages", "cut"]


def cut(model: nn.Module, pipeline: Pipeline) -> PipelineStages:
    """Cut a model over the ranks of the default process group, for a loop of your own. Every rank must call it.

    Begins the process group if there is none, as `unisono.init` does. With one rank, the model stays whole, and all
    methods do the same.

    Args:
        model: The model, equal on all ranks and on the device where this rank computes.
        pipeline: Where stages begin, and the schedule. There is one replica: as many ranks as it needs.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The ranks cannot be divided so, a name is not that of a submodule, `place` has placed the model, or
            it is on several devices or has no values.
    """
    if not isinstance(model, nn.Module) or not isinstance(pipeline, Pipeline):
        raise TypeError(
            "cut(model, pipeline) takes an nn.Module and a unisono.parallel.Pipeline, and got "
            f"{type(model).__name__} and {type(pipeline).__name__}"
        )
    refuse_placed(model, "cut() runs a model with one stage on each rank")
    refuse_remote(model, "cut()", "give cut() the whole model, whose stages are each on one rank")
    if pipeline.zero is not None:
        raise ValueError(
            f"zero={pipeline.zero} divides the optimizer's state over replicas, and cut() makes one: leave it out, or "
            "use unisono.Trainer(parallel=...)"
        )
    find_blocks(model, pipeline.names or ())
    named = [*itertools.chain(model.named_parameters(), model.named_buffers())]
    device = named[0][1].device if named else torch.device("cpu")
    for name, tensor in named:
        if tensor.is_meta:
            raise ValueError(f"{name!r} is on the meta device, without values: give cut() a model that has them")
        if tensor.device != device:
            raise ValueError(
                f"{name!r} is on {tensor.device} and {named[0][0]!r} on {device}, and cut() takes a model on one "
                "device of each rank: move it there by model.to(...)"
            )
    world = World.connect(device)
    size = pipeline.ranks_of_replica(world.size)
    if size != world.size:
        raise ValueError(
            f"{world.size} ranks would make {world.size // size} replicas of the model, and cut() makes one: start "
            f"{size} ranks, or use unisono.Trainer(parallel=...), which divides batches among replicas"
        )
    return PipelineStages(model, pipeline, world)


class PipelineStages(ModelHandle):
    """The stages of a model. `cut` makes it.

    Each rank computes the gradients of its own stages alone. So an optimizer of all parameters, with a copy on each
    rank, updates those and leaves the others, which have none. Gradients, losses and buffers are those of one rank to
    the bit.
    """

    _made_by = "stages = cut(model, pipeline)"

    def __init__(self, model: nn.Module, pipeline: Pipeline, world: World) -> None:
        self._model = model
        self._cut = CutModel(pipeline, model, world) if world.size > 1 else None
        self._shared: SharedParameterCopies | None = None
        self._is_updated = False

    def backward(
        self, function: Callable[[Any, Any], Tensor], micro_batches: Sequence[Any], *, seed: int
    ) -> list[float]:
        """Add the gradients of the losses of some micro-batches to `p.grad`. Every rank must call it.

        Parameters that other stages use as well are sent to them first, after an update by an optimizer.

        Args:
            function: Called as function(model, micro_batch); returns the loss, a scalar. Gradients are those of the sum
                of all losses: divide by the number of micro-batches for their mean.
            micro_batches: The same on all ranks.
            seed: The root of the random numbers of each micro-batch, the same on any number of ranks: give another one
                in each step. Afterwards the generators of all ranks are in the same state, which depends on it.

        Returns:
            The losses, on all ranks.

        Raises:
            TypeError: The function cannot be called, or returns no scalar tensor; or seed is no whole number.
            RankMismatchError: Ranks were given other numbers of micro-batches, or tensors of other shapes.
            CutError: The model cannot be cut so.
        """
        _check(function)
        passes = _CallPasses(self, len(micro_batches), whole("seed", seed))
        try:
            if self._cut is None:
                return _whole_backward(self._model, function, micro_batches, passes)
            return self._backward(self._cut, function, micro_batches, passes)
        finally:
            set_generators(derive_key(seed, "pipeline"))

    def _backward(
        self, cut: CutModel, function: Callable[[Any, Any], Tensor], micro_batches: Sequence[Any], passes: _CallPasses
    ) -> list[float]:
        inputs = [(each,) for each in micro_batches]
        _check_alike(cut, micro_batches)
        self._send_shared()
        first = next(iter(inputs), None)
        cut.divide(function, first, micro_batches=len(inputs), loss_of=_scalar)
        plans = [cut.plan(self._model, function, each) for each in inputs]
        if self._shared is None:
            known = cut.settle(plans[0] if plans else None)
            parameters = {plain_name(name): p for name, p in self._model.named_parameters()}
            self._shared = SharedParameterCopies(cut.ranks, known, parameters)
        cut.release()
        self._is_updated = True
        cut.runner(self._model).run(function, inputs, plans, passes)
        everyone: list[list[float]] = cut.ranks.pipeline.gather(passes.losses, "backward of a pipeline")
        return everyone[cut.ranks.place_of(self.last_stage)]

    def forward(self, function: Callable[[Any, Any], Any], micro_batches: Sequence[Any]) -> list[Any] | None:
        """Return what a function returns for each micro-batch, without gradients. Every rank must call it.

        Generators are left as they are.

        Args:
            function: Called as function(model, micro_batch).
            micro_batches: The same on all ranks.

        Returns:
            The results on the rank of the last stage, None on others.

        Raises:
            TypeError: The function cannot be called.
            RankMismatchError: Ranks were given other numbers of micro-batches, or tensors of other shapes.
            CutError: The model cannot be cut so.
        """
        _check(function)
        with torch.no_grad(), kept_generators():
            if self._cut is None:
                return [function(self._model, each) for each in micro_batches]
            _check_alike(self._cut, micro_batches)
            self._send_shared()
            inputs = [(each,) for each in micro_batches]
            self._cut.divide(function, next(iter(inputs), None), micro_batches=len(inputs), loss_of=None)
            plans = [self._cut.plan(self._model, function, each) for each in inputs]
            passes = _CallPasses(self, len(inputs), None)
            self._cut.runner(self._model).infer(function, inputs, plans, passes)
        return passes.results if self.has_last_stage else None

    @property
    def has_last_stage(self) -> bool:
        """True on the rank that gets results."""
        return self._cut is None or self._cut.ranks.has_last_stage

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale gradients such that the norm of the whole gradient is at most a bound. Every rank must call it.

        Args:
            max_norm: The bound.

        Returns:
            The norm before, the same on any number of ranks.
        """
        bound = real("max_norm", max_norm)
        present = [p for p in self._model.parameters() if p.grad is not None]
        vectors = [in_memory_order(p.grad, dense_strides(p)) for p in present if p.grad is not None]
        norms: list[float] = block_norms([block for vector in vectors for block in blocks_of(vector)]).tolist()
        everyone = [norms] if self._cut is None else self._cut.ranks.pipeline.gather(norms, "clip_grad_norm_")
        norm = global_norm([each for of_rank in everyone for each in of_rank])
        if (factor := clip_factor(norm, bound)) < 1.0 or math.isnan(norm):
            for p in present:
                assert p.grad is not None
                p.grad.mul_(factor)
        return norm

    def gather(self) -> None:
        """Bring the weights and buffers of all stages to all ranks, to save the model. Every rank must call it.

        Memory: the whole model, until the next `backward`. Traffic: each rank sends its part to all others.
        """
        cut = self._cut
        if cut is None or cut.ownership.map is None or cut.ownership.whole == "everywhere":
            return
        self._send_shared()
        cut.restore()
        known, world = cut.ownership.map, cut.ranks.pipeline
        owners: dict[str, tuple[int, Tensor]] = {}
        owners |= {plain_name(name): (known.owner(plain_name(name)), p) for name, p in self._model.named_parameters()}
        owners |= {name: (known.buffers.get(name, 0), b) for name, b in _buffers(self._model)}
        with torch.no_grad():
            for _, (stage, tensor) in sorted(owners.items()):
                source = cut.ranks.place_of(stage)
                sent = tensor.detach().contiguous()
                world.broadcast_tensor(sent, source=source)
                if world.rank != source:
                    tensor.copy_(sent)
        cut.ownership.whole = "everywhere"

    @property
    def last_stage(self) -> int:
        """The number of the last stage."""
        return 0 if self._cut is None else self._cut.ranks.stages - 1

    def _send_shared(self) -> None:
        if self._shared is not None and self._is_updated:
            self._shared.send()
        self._is_updated = False


class _CallPasses:
    """The passes of a call; see `runner.Passes`."""

    def __init__(self, stages: PipelineStages, count: int, seed: int | None) -> None:
        self._last_stage, self._seed = stages.last_stage, seed
        self.results: list[Any] = [None] * count
        self.losses: list[float] = [math.nan] * count

    def turn_to(self, stage: int, *, backward: bool) -> None:
        """Nothing comes together: this rank has the weights of its stages."""

    def begin_forward(self, stage: int, micro_batch: int) -> None:
        if not stage and self._seed is not None:
            set_generators(derive_key(self._seed, "pipeline", micro_batch))

    def end_forward(self, stage: int, micro_batch: int, result: Any) -> None:
        if stage == self._last_stage:
            self.results[micro_batch] = result

    def begin_backward(self, stage: int, micro_batch: int) -> Sequence[LossRoot]:
        if stage != self._last_stage:
            return ()
        loss = _scalar(self.results[micro_batch])
        self.results[micro_batch] = None
        self.losses[micro_batch] = float(loss.detach())
        return [(loss, None)]

    def begin_adding(self, stage: int, micro_batch: int) -> None:
        """Nothing is to be prepared."""

    def end_backward(self, stage: int, micro_batch: int) -> None:
        """Nothing is left to do."""


def _whole_backward(
    model: nn.Module, function: Callable[[Any, Any], Tensor], micro_batches: Sequence[Any], passes: _CallPasses
) -> list[float]:
    for number, micro_batch in enumerate(micro_batches):
        passes.begin_forward(0, number)
        passes.end_forward(0, number, function(model, micro_batch))
        ((loss, _),) = passes.begin_backward(0, number)
        loss.backward()  # type: ignore[no-untyped-call]
    return passes.losses


def _scalar(result: Any) -> Tensor:
    if not isinstance(result, Tensor) or result.dim():
        found = f"a tensor of shape {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise TypeError(
            f"the function of backward returned {found}: return the loss of the micro-batch, a scalar tensor"
        )
    return result


def _check(function: Any) -> None:
    check_function("the function of a pipeline", function, meant="give a function of the model and a micro-batch")


def _check_alike(cut: CutModel, micro_batches: Sequence[Any]) -> None:
    """Check that all ranks have micro-batches of the same form: otherwise, one would wait for what nobody sends."""
    own = [
        [(tuple(leaf.shape), str(leaf.dtype)) for leaf in flatten(each)[0] if isinstance(leaf, Tensor)]
        for each in micro_batches
    ]
    first, *others = cut.ranks.pipeline.gather(own, "the micro-batches of a pipeline")
    for rank, other in enumerate(others, 1):
        if len(other) != len(first):
            raise RankMismatchError(
                f"rank {rank} was given {len(other)} micro-batches, and rank 0 {len(first)}: give all ranks the same "
                "ones, also those without the first or the last stage"
            )
        for number, (one, its) in enumerate(zip(first, other, strict=True)):
            if one != its:
                raise RankMismatchError(
                    f"the tensors of micro-batch {number} are {_forms(its)} on rank {rank}, and {_forms(one)} on rank "
                    "0: give all ranks the same micro-batches, in the same order"
                )


def _forms(tensors: Sequence[tuple[tuple[int, ...], str]]) -> str:
    return ", ".join(f"{dtype.removeprefix('torch.')}{list(shape)}" for shape, dtype in tensors) or "none"


def _buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(plain_name(name), buffer) for name, buffer in model.named_buffers()]
