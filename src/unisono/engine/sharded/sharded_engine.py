"""The engine of a run whose weights, gradients and optimizer state are divided over ranks.

A rank's gradients of its last leaf are taken while backward runs. Once those of a unit are complete on all ranks, they
are summed in the order of the plan's tree, and each rank keeps its own part (`engine.sharded.exchange`). So if each
rank has one leaf, it holds whole gradients of one unit at a time. With several leaves it holds the sums of the earlier
ones whole until the last: which of them the tree adds lie on the same rank, so parts of them on other ranks would take
as much memory, and more traffic. `divided_sums_engine` deals leaves in another way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.collectives.world import World
from unisono.engine.accumulation import GradientAccumulation
from unisono.engine.base import Preparation, Trained
from unisono.engine.host_tree_all_reduce import GroupAllReduce, group_all_reduce
from unisono.engine.joint_optimizer import parts_of
from unisono.engine.node_sums import Gradients, take
from unisono.engine.norm import block_norms, blocks_of, clip_factor, global_norm
from unisono.engine.optimizer_hooks import is_hooked, refuse_changed_gradients, with_hooks
from unisono.engine.sharded.division import Division
from unisono.engine.sharded.exchange import GradientRow
from unisono.engine.sharded.unit import PieceLayout
from unisono.engine.shared.step_metadata import note, unscale
from unisono.engine.sparse_tables import split_sparse
from unisono.engine.step_transaction import StepTransaction
from unisono.engine.totals import COUNT, Totals, as_tensor, sent_to, totals_of
from unisono.engine.tree_all_reduce import NodeLayouts
from unisono.errors import UnisonoError
from unisono.machine import give_memory_back

__all__ = ["LARGE_NBYTES", "PartOfGradient", "ShardedEngine", "prepare_parts", "update_parts"]

LARGE_NBYTES = 32 << 20
"""Parameters on the CPU from which on free memory is given back before each step: passes over blocks leave holes in the
C library's heap. It took a tenth of the peak, and 0.4 % of a step, of 33.6 million parameters on four ranks."""


class PartOfGradient(NamedTuple):
    """The findings of a rank in its part of a gradient."""

    overflowed: float
    """1 if a value was not finite when it was unscaled, otherwise 0."""
    norms: list[float]
    """The norms of its blocks."""


class ShardedEngine(GradientAccumulation):
    """Sums gradients into the parts of ranks, and updates them; see `Engine`.

    p.grad is None after a step: no rank has the whole gradient of a parameter.

    Args:
        optimizer: The optimizer, or a joint one.
        modules: The models.
        world: The ranks.
        division: The units of the model, and the state of its optimizers.
        virtual_ranks: Shares of a whole batch.
        overlap: If False, no gradient is added or taken before backward has ended.
        streams: If False, none is taken before that.
        in_turn: True if virtual ranks are dealt to ranks in turn.
    """

    divides_update = True
    sends_early = True

    def __init__(
        self,
        optimizer: Optimizer,
        modules: Sequence[nn.Module],
        world: World,
        division: Division,
        *,
        virtual_ranks: int,
        overlap: bool,
        streams: bool = True,
        in_turn: bool = False,
    ) -> None:
        layouts = NodeLayouts(world.size, virtual_ranks=virtual_ranks, in_turn=in_turn)
        super().__init__(optimizer, modules, layouts, rank=world.rank, overlap=overlap, streams=streams)
        self._world, self._division = world, division
        self.copies_weights = division.keeps_weights
        self._optimizers = parts_of(optimizer)
        self._places: list[tuple[int, int]] = []
        """For each trained parameter, the number of its unit and its number in the unit."""
        self._members: list[dict[int, int]] = []
        """For each unit, the trained parameters by their number in the unit."""
        self._layouts_of: list[list[PieceLayout]] = []
        """For each unit, the trained pieces of each rank."""
        self._is_large = False
        """True if free memory is given back to the system before each step; see `LARGE_NBYTES`."""
        self._missing: list[int] = []
        """For each unit, how many of its trained parameters have no gradient of the last leaf yet."""
        self._rows: list[list[dict[int, Tensor | None]]] = []
        """For each unit and node of this rank, the sums by the number of the parameter in the unit."""
        self._totals_of: list[Tensor] = []
        """For each unit, the sums of this rank's trained pieces, as bytes."""
        self._gradients: dict[tuple[int, int], Tensor] = {}
        """The sums of this rank's pieces, by the number of the unit and of the piece in it."""
        self._used_by_all: set[int] = set()
        self._found_inf: Tensor | None = None
        self._totals_sum: GroupAllReduce

    def start(self, step: StepTransaction, trained: Trained, *, leaves: int) -> None:
        """Begin a step; see `Engine`. The model is divided already."""
        for unit in self._division.units:
            if (name := unit.converted()) is not None:
                raise UnisonoError(
                    f"parameter {name!r} has got another type, other strides or other memory since the model was "
                    "divided over ranks, as by model.to(...), half() or p.data = ...: ranks keep parts of what it was. "
                    "Convert the model before it is divided."
                )
        if trained is not self._given:
            self._build(trained)
        self._begin(step, self._layouts.of(leaves))
        self._missing = [len(members) for members in self._members]
        self._rows = [[{} for _ in self._sums] for _ in self._members]
        self._found_inf = None
        self._totals_sum.start(self._layout)
        if self._is_large:
            give_memory_back()
        take(trained.parameters)
        self._division.exchange.begin(self._reduce)

    def flush(self) -> None:
        """Take part in exchanges until all ranks have done theirs, and send the totals; see `Engine`."""
        self._division.exchange.end()
        for i, used in enumerate(self._used):
            row = self._totals_sum.rows[i]
            row[:COUNT] = as_tensor(self._totals[i].total())
            row[COUNT : COUNT + len(used)] = sent_to(row.device, used, torch.float32)
        self._totals_sum.launch()
        self._totals_sum.advance()

    def finish(self) -> Totals:
        """Complete the totals; see `Engine`."""
        self._step.run_deferred()
        numbers = self._totals_sum.finish(self._step)[: COUNT + len(self._places)].tolist()
        pairs = zip(self._trained.parameters, numbers[COUNT:], strict=True)
        self._used_by_all = {id(p) for p, count in pairs if count}
        return totals_of(numbers[:COUNT])

    def prepare(self, preparation: Preparation) -> float | None:
        """Multiply, unscale and clip the sums; see `Engine`. The norm is that of all ranks' parts."""

        def everyone(found: PartOfGradient) -> list[PartOfGradient]:
            return self._world.gather(found, "trainer.step preparing gradients")

        return prepare_parts([self], preparation, everyone)

    def update(self, scaler: torch.amp.GradScaler | None) -> None:
        """Update this rank's part; see `Engine`."""
        update_parts([self], scaler)

    def close(self) -> None:
        """Release the parameters; see `Engine`."""
        super().close()
        self._rows, self._totals_of, self._gradients = [], [], {}

    def abort(self, *, alike: bool) -> bool:
        """Discard the step; see `Engine`."""
        self._streaming = False
        take(self._given.parameters)
        self._rows = []
        return True

    def _used_gradients(self) -> list[Tensor]:
        """Return the sums of this rank's pieces that some rank has a gradient of, as vectors."""
        units = self._division.units
        return [
            gradient.view(-1)
            for (u, k), gradient in self._gradients.items()
            if id(units[u].parameters[units[u].pieces[k].parameter]) in self._used_by_all
        ]

    @property
    def _scales_itself(self) -> bool:
        return getattr(self._optimizer, "_step_supports_amp_scaling", False)

    def _apply(self) -> None:
        division, found_inf = self._division, self._found_inf if self._scales_itself else None
        trained = [number for number, members in enumerate(self._members) if members]
        for number in trained:
            if division.units[number].keeps_weights:
                division.units[number].keep()
        for optimizer in self._optimizers:
            division.shards_of(optimizer).step(self._gradients, self._used_by_all, found_inf)
        for number in trained:
            division.exchange.spread(number)

    def _build(self, trained: Trained) -> None:
        """Find the places of the parameters in units, and register hooks on them."""
        self._unhook()
        _, tables = split_sparse(trained, self._modules)
        if tables.names:
            raise ValueError(
                f"the gradient of {tables.names[0]!r} is sparse, since its module was made with sparse=True, and "
                "Shard divides dense ones alone: build the module with sparse=False"
            )
        found = {id(p): (u, i) for u, unit in enumerate(self._division.units) for i, p in enumerate(unit.parameters)}
        for name, p in zip(*trained, strict=True):
            if id(p) not in found:
                raise UnisonoError(
                    f"parameter {name!r} was not there when the model was divided: "
                    "make it before, and freeze it by requires_grad_(False) until it is to be trained"
                )
        self._given = self._trained = trained
        on_cpu = sum(p.numel() * p.element_size() for p in trained.parameters if p.device.type == "cpu")
        self._is_large = on_cpu >= LARGE_NBYTES
        self._places = [found[id(p)] for p in trained.parameters]
        self._members = [{} for _ in self._division.units]
        for k, (u, i) in enumerate(self._places):
            self._members[u][i] = k
        self._layouts_of = [
            [
                PieceLayout(
                    [piece for piece in layout.pieces if piece.parameter in members],
                    [p.dtype for p in unit.parameters],
                )
                for layout in unit.layouts
            ]
            for unit, members in zip(self._division.units, self._members, strict=True)
        ]
        self._totals_sum = group_all_reduce(
            self._world,
            None,
            COUNT + len(trained.parameters),
            widest=self._layouts.widest,
            dtype=torch.float32,
            device=self._world.device,
        )
        self._allocate()
        if self._streams:
            self._hook()

    def _allocate(self) -> None:
        """Allocate the sums of this rank's pieces. They stay from step to step: optimizers know their addresses."""
        self._totals_of, self._gradients = [], {}
        for u, (unit, layouts) in enumerate(zip(self._division.units, self._layouts_of, strict=True)):
            own = layouts[self._rank]
            self._totals_of.append(total := unit.kept_bytes(own.nbytes))
            sums = {piece.parameter: vector for piece, vector in zip(own.pieces, own.views(total), strict=True)}
            for k, (piece, place) in enumerate(zip(unit.pieces, unit.places, strict=True)):
                if piece.parameter in sums:
                    self._gradients[u, k] = sums[piece.parameter].view(place.shape)

    def _store_sum(self, index: int, left: Tensor | None, gradient: Tensor | None) -> None:
        """Keep the sum of one parameter; if it is the last one of its unit, let ranks sum the unit."""
        if left is not None and gradient is not None:
            gradient = left.add_(gradient)
        u, i = self._places[index]
        self._rows[u][-1][i] = gradient
        self._missing[u] -= 1
        if not self._missing[u]:
            self._division.exchange.complete(u)

    def _store_node(self, i: int) -> None:
        """Keep the sums of a node that is not the last one."""
        self._keep(i, self._sums[i].total())

    def _keep(self, node: int, sums: Gradients) -> None:
        for (u, i), total in zip(self._places, sums, strict=True):
            self._rows[u][node][i] = total

    def _reduce(self, number: int) -> None:
        """Sum the gradients of a unit over all ranks."""
        members, unit = self._members[number], self._division.units[number]
        if not members:
            return
        rows: list[GradientRow] = [*self._rows[number]]
        self._rows[number] = []
        layouts = self._layouts_of[number]
        self._division.exchange.sum_rows(unit, layouts, rows, self._layout, out=self._totals_of[number])


def prepare_parts(
    engines: Sequence[ShardedEngine],
    preparation: Preparation,
    everyone: Callable[[PartOfGradient], list[PartOfGradient]],
) -> float | None:
    """Multiply, unscale and clip the sums of one or several engines of a rank, as one gradient; see `Engine.prepare`.

    Args:
        engines: They, of one optimizer and with parameters of their own.
        preparation: What to do.
        everyone: Returns what each rank with a part of the gradient has found in it. Not called without need.
    """
    factor, scaler, clip, change = preparation
    assert change is None
    gradients = [gradient for engine in engines for gradient in engine._used_gradients()]
    if factor != 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)
    overflowed, norms = 0.0, [0.0]
    if scaler is not None:
        overflowed = unscale(gradients, scaler).item()
    if clip is not None:
        norms = block_norms([block for vector in gradients for block in blocks_of(vector)]).tolist()
    if scaler is None and clip is None:
        return None
    found = everyone(PartOfGradient(overflowed, norms))
    if scaler is not None:
        device = gradients[0].device if gradients else None
        found_inf = torch.tensor(float(max(part.overflowed for part in found)), device=device)
        for engine in engines:
            engine._found_inf = found_inf
    if clip is None:
        return None
    norm = global_norm([each for part in found for each in part.norms])
    scale = clip_factor(norm, clip)
    if scale < 1.0 and gradients:
        torch._foreach_mul_(gradients, scale)
    return norm


def update_parts(engines: Sequence[ShardedEngine], scaler: torch.amp.GradScaler | None) -> None:
    """Update the parts of one or several engines of a rank, in one call of the optimizer's hooks; see `Engine.update`.

    Args:
        engines: They, of one optimizer and with parameters of their own.
        scaler: The scaler of a float16 step.
    """
    first, skips = engines[0], False
    if scaler is not None:
        assert first._found_inf is not None
        note(scaler, first._found_inf)
        skips = bool(first._found_inf.item()) and not first._scales_itself
    if skips:
        return

    def apply() -> None:
        for engine in engines:
            engine._apply()

    run: Callable[[], None] = apply
    for optimizer in reversed(first._optimizers):
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers look for
        if is_hooked(optimizer):
            run = with_hooks(optimizer, run)
    with contextlib.ExitStack() as guards:
        for engine in engines:
            guards.enter_context(refuse_changed_gradients(first._optimizers, engine._trained))
        run()
