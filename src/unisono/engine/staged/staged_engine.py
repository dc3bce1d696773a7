"""The engine of a rank in a pipeline: an engine of its own for each of its stages, over the ranks that compute it.

Each stage has the gradients of its parameters alone. What concerns the whole step goes over the ranks of the pipeline:
totals, of which only the last stage knows the loss; the norm for clipping; whether a scaled gradient overflowed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from unisono.collectives.world import World
from unisono.engine.base import Engine, Preparation, Trained
from unisono.engine.norm import block_norms, blocks_of, clip_factor, dense_strides, global_norm, in_memory_order
from unisono.engine.staged.shared_parameters import SharedParameterCopies
from unisono.engine.staged.stage_map import StageMap, StageOwnership
from unisono.engine.staged.stage_ranks import StageRanks
from unisono.engine.step_transaction import StepTransaction
from unisono.engine.totals import NOTHING, Totals, Wants
from unisono.engine.update import update_whole
from unisono.errors import UnisonoError

__all__ = ["StagedEngine"]


class StagedEngine:
    """See `Engine`; leaves are closed stage by stage, in the engines of `stages`.

    Args:
        optimizer: The optimizer, of all parameters of the model.
        ranks: The place of this rank.
        engines: The engine of each stage of this rank.
        ownership: Who has which parameter.
    """

    divides_update, sends_early = False, True

    def __init__(
        self, optimizer: Optimizer, ranks: StageRanks, engines: Mapping[int, Engine], ownership: StageOwnership
    ) -> None:
        self._optimizer, self._ranks, self._ownership = optimizer, ranks, ownership
        self.copies_weights = ranks.replicas > 1
        self.stages = engines
        """The engine of each stage of this rank."""
        self._given = Trained((), ())
        self._own: dict[int, Trained] = {}
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self._forms = {id(p): (p.dtype, p.stride()) for p in parameters}
        """The type and the strides of each parameter, on which the plan of messages depends."""
        self._shared = SharedParameterCopies(ranks, StageMap({}, {}), {})

    def start(self, step: StepTransaction, trained: Trained, *, leaves: int) -> None:
        """Begin a step; see `Engine`."""
        if trained is not self._given:
            self._divide(trained)
        self._refuse_conversions(trained)
        for p in trained.parameters:
            p.grad = None
        for stage, engine in self.stages.items():
            engine.start(step, self._own[stage], leaves=leaves)

    def close_forward(
        self,
        leaf: int,
        loss: Tensor,
        weight: float,
        *,
        new_buffers: bool,
        has_values: bool = False,
        wants: Wants = NOTHING,
    ) -> None:
        """Refuse: leaves are closed in the engines of stages."""
        raise NotImplementedError

    def close_leaf(self, leaf: int) -> None:
        """Refuse: leaves are closed in the engines of stages."""
        raise NotImplementedError

    def flush(self) -> None:
        """Send the remaining sums; see `Engine`."""
        for engine in self.stages.values():
            engine.flush()

    def finish(self) -> Totals:
        """Complete the sums, and exchange totals with the other stages; see `Engine`."""
        found = [engine.finish() for engine in self.stages.values()]
        last = found[-1]
        flags = [any(flags) for flags in zip(*(each.flags for each in found), strict=True)]
        world = self._ranks.pipeline
        if world.group is None:
            return Totals.of(last.loss, last.weight, flags)
        everyone = _all_gather(world, [last.loss, last.weight, *flags])
        loss, weight = everyone[self._ranks.place_of(self._ranks.stages - 1)][:2]
        return Totals.of(loss, weight, (any(flags) for flags in zip(*(each[2:] for each in everyone), strict=True)))

    def prepare(self, preparation: Preparation) -> float | None:
        """Multiply, unscale and clip p.grad; see `Engine`. The norm is that of all stages."""
        factor, scaler, clip, change = preparation
        assert change is None
        parameters = [p for trained in self._own.values() for p in trained.parameters if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)
        if scaler is not None:
            self._unscale(scaler)
        if clip is None:
            return None
        vectors = (in_memory_order(p.grad, dense_strides(p)) for p in parameters if p.grad is not None)
        norms: list[float] = block_norms([block for vector in vectors for block in blocks_of(vector)]).tolist()
        everyone = self._ranks.pipeline.gather(norms, "trainer.step clipping gradients")
        norm = global_norm([*itertools.chain.from_iterable(everyone)])
        scale = clip_factor(norm, clip)
        if scale < 1.0 and gradients:
            torch._foreach_mul_(gradients, scale)
        return norm

    def update(self, scaler: torch.amp.GradScaler | None) -> None:
        """Write the weights of the stages of this rank, and send those that other stages use as well; see `Engine`."""
        self._ownership.whole = "nowhere"
        update_whole(self._optimizer, scaler, self._given)
        self._shared.send()

    def close(self) -> None:
        """Release the parameters; see `Engine`."""
        for engine in self.stages.values():
            engine.close()
        self._given, self._own = Trained((), ()), {}
        self._shared = SharedParameterCopies(self._ranks, StageMap({}, {}), {})

    def abort(self, *, alike: bool) -> bool:
        """Discard the step; see `Engine`."""
        whole = [engine.abort(alike=alike) for engine in self.stages.values()]
        for p in self._given.parameters:
            p.grad = None
        return all(whole)

    def _divide(self, trained: Trained) -> None:
        """List the parameters of each stage of this rank, and those that several stages use."""
        known = self._ownership.map
        assert known is not None
        pairs = [*zip(trained.names, trained.parameters, strict=True)]
        self._own = {}
        for stage in self.stages:
            own = [(name, p) for name, p in pairs if known.owner(name) == stage]
            self._own[stage] = Trained(tuple(name for name, _ in own), tuple(p for _, p in own))
        self._shared = SharedParameterCopies(self._ranks, known, dict(pairs))
        self._given = trained

    def _refuse_conversions(self, trained: Trained) -> None:
        """Refuse parameters of another type or of other strides than they had: on all ranks, whoever has them.

        Those of other stages are apart, with strides of zero.
        """
        for name, p in zip(trained.names, trained.parameters, strict=True):
            strides, (dtype, own) = p.stride(), self._forms.setdefault(id(p), (p.dtype, p.stride()))
            if p.dtype is not dtype or (strides != own and any(strides)):
                raise UnisonoError(
                    f"parameter {name!r} has got another type or other strides since the Trainer was made, as by "
                    "model.to(...): stages have agreed on what they send each other. Convert the model before."
                )

    def _unscale(self, scaler: torch.amp.GradScaler) -> None:
        """Divide by the scale, and note on all stages whether the gradient of any one overflowed."""
        scaler.unscale_(self._optimizer)
        state = scaler._per_optimizer_states[id(self._optimizer)]
        found: Mapping[torch.device, Tensor] = state["found_inf_per_device"]
        overflowed = any(bool(value.item()) for value in found.values())
        world = self._ranks.pipeline
        if world.group is not None:
            overflowed = any(numbers[0] for numbers in _all_gather(world, [overflowed]))
        # A stage without gradients has noted nothing, but must skip and rescale like the others.
        devices = [*found] or [world.device]
        state["found_inf_per_device"] = {
            device: torch.full((), float(overflowed), dtype=torch.float32, device=device) for device in devices
        }


def _all_gather(world: World, numbers: Sequence[float]) -> list[list[float]]:
    """Return some numbers of each rank. Every rank must call it."""
    assert world.group is not None
    own = torch.tensor(numbers, dtype=torch.float64, device=world.device)
    everyone = [torch.empty_like(own) for _ in range(world.size)]
    work = dist.all_gather(everyone, own, group=world.group, async_op=True)
    assert work is not None
    world.waiter.wait(work)
    return [each.tolist() for each in everyone]
