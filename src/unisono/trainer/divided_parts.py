"""The part of a checkpoint that each rank of a divided run writes: ranges of tensors by name, and their values.

Weights need no exchange, since each rank knows what all of them have. Of the optimizers' state, ranks tell each other
what they have; the numbers that are the same in all pieces, such as the count of steps, come with it. Start reading at
`Contents`; `own_table` and `merged_state` are the description of the optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.engine.model_contents import parameter_names
from unisono.engine.sharded import Division
from unisono.state.codec import decode, encode
from unisono.state.digest import copied_range
from unisono.state.part_plan import Claim, PartPlan, plan_parts
from unisono.state.safetensors_format import tied_names
from unisono.trainer.snapshot import Subjects, model_tensors

__all__ = ["ClaimedTensors", "Contents", "ParameterForm", "PieceState", "Table", "merged_state", "own_table"]


class PieceState(NamedTuple):
    """The state of one piece of a parameter in an optimizer, without its large tensors."""

    name: str
    start: int
    stop: int
    dtypes: dict[str, torch.dtype | None]
    """By key, the dtype of a tensor that has an element for each one of the piece; None for other values."""
    others: dict[str, Any]
    """The other values, with the first piece of a parameter alone: they are the same in all of its pieces."""


Table = Mapping[str, Sequence[PieceState]]
"""The parts of a rank, by the name of the optimizer."""


def own_table(division: Division, optimizers: Mapping[str, Optimizer]) -> dict[str, list[PieceState]]:
    """Return what this rank has of the optimizers' state."""
    return {
        key: [
            PieceState(
                piece.name,
                piece.start,
                piece.stop,
                {
                    each: value.dtype if piece.has_element_of_each(value) else None
                    for each, value in piece.state.items()
                },
                {
                    each: value
                    for each, value in piece.state.items()
                    if not piece.start and not piece.has_element_of_each(value)
                },
            )
            for piece in division.shards_of(optimizer).pieces()
            if piece.state
        ]
        for key, optimizer in optimizers.items()
    }


def merged_state(tables: Sequence[Table], shapes: Mapping[str, torch.Size]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the state of whole optimizers, as `snapshot.optimizer_state` does; large tensors are without values.

    Args:
        tables: What each rank has.
        shapes: The shape of each parameter by name.

    >>> piece = PieceState("w", 0, 2, {"step": None, "sum": torch.float32}, {"step": 3})
    >>> rest = PieceState("w", 2, 4, {"step": None, "sum": torch.float32}, {})
    >>> state = merged_state([{"": [piece]}, {"": [rest]}], {"w": torch.Size([4])})
    >>> state[""]["w"]["step"], state[""]["w"]["sum"].shape
    (3, torch.Size([4]))
    """
    merged: dict[str, dict[str, dict[str, Any]]] = {}
    for key in tables[0]:
        firsts = {piece.name: piece for table in tables for piece in table[key] if not piece.start}
        merged[key] = {
            name: {
                each: piece.others[each] if dtype is None else torch.empty(shapes[name], dtype=dtype, device="meta")
                for each, dtype in piece.dtypes.items()
            }
            for name, piece in sorted(firsts.items())
        }
    return merged


class ParameterForm(NamedTuple):
    """What is to be known of a parameter of which ranks have parts."""

    shape: torch.Size
    strides: tuple[int, ...]
    is_row_major: bool
    """True if its elements lie in memory in the order of their indices."""


class ClaimedTensors:
    """The tensors of one group of a checkpoint: who writes which elements, and copies of those of this rank.

    A tensor that is cut, and whose elements do not lie in memory in the order of their indices, is assembled on the
    first rank that has some.

    Args:
        group: The group.
        rank: This rank.
        ranks: The number of ranks.
        forms: Those of divided parameters, by name.
        assemble: Called with the name of a parameter, the elements of it or of its state that this rank has, their
            number on each rank that has some, and the rank that gets all of them; returns them there, else None.
    """

    def __init__(
        self,
        group: str,
        rank: int,
        ranks: int,
        forms: Mapping[str, ParameterForm],
        assemble: Callable[[str, Tensor, Mapping[int, int], int], Tensor | None],
    ) -> None:
        self._group, self._rank, self._forms, self._assemble = group, rank, forms, assemble
        self.claims: list[list[Claim]] = [[] for _ in range(ranks)]
        """What each rank writes."""
        self.values: dict[Claim, Tensor] = {}
        """What this rank writes."""

    def claim(self, name: str, parameter: str, spans: Mapping[int, tuple[int, int]], own: Tensor) -> None:
        """Note who writes a tensor of which ranks have parts, and copy this rank's part.

        Args:
            name: The name of the tensor.
            parameter: The name of the parameter that it belongs to.
            spans: By rank, the elements that each has, in the order of memory.
            own: Those that this rank has.
        """
        shape, strides, is_row_major = self._forms[parameter]
        if is_row_major:
            for rank, (start, stop) in spans.items():
                self.claims[rank].append(Claim(name, start, stop))
            if self._rank in spans:
                self.values[Claim(name, *spans[self._rank])] = own.detach().clone()
            return
        owner = next(iter(spans))
        self.claims[owner].append(claim := Claim(name, 0, shape.numel()))
        numels = {rank: stop - start for rank, (start, stop) in spans.items()}
        whole = self._assemble(parameter, own.detach(), numels, owner)
        if whole is not None:
            self.values[claim] = whole.as_strided(shape, strides).contiguous().view(-1)

    def claim_rest(self, tensors: Mapping[str, Tensor]) -> None:
        """Let rank 0 write what no rank has a part of, since it is the same on all."""
        claimed = {claim.name for own in self.claims for claim in own}
        for name, tensor in tensors.items():
            if name not in claimed:
                self.claims[0].append(claim := Claim(name, 0, tensor.numel()))
                self.keep({name: tensor}, [claim] if self._rank == 0 else [])

    def keep(self, tensors: Mapping[str, Tensor], claims: Sequence[Claim]) -> None:
        """Copy elements of whole tensors that this rank writes."""
        for name, start, stop in claims:
            self.values[Claim(name, start, stop)] = copied_range(tensors[name], start, stop, f"{self._group}.{name}")

    def claim_optimizers(
        self,
        optimizers: Mapping[str, dict[str, dict[str, Any]]],
        tables: Sequence[Table],
        own: Mapping[str, Mapping[str, Mapping[str, Any]]],
    ) -> PartPlan:
        """Plan the file of the optimizers' state.

        Args:
            optimizers: The whole state, from `merged_state`.
            tables: What each rank has.
            own: By optimizer and parameter, the state of the pieces of this rank.
        """
        single = [*optimizers] == [""]
        document, tensors = encode(optimizers[""] if single else optimizers)
        found = decode(document, tensors)
        names = {id(tensor): name for name, tensor in tensors.items()}
        for key in optimizers:
            spans: dict[str, dict[int, tuple[int, int]]] = {}
            for rank, table in enumerate(tables):
                for piece in table[key]:
                    spans.setdefault(piece.name, {})[rank] = (piece.start, piece.stop)
            for parameter, state in (found if single else found[key]).items():
                for each, form in state.items():
                    if isinstance(form, Tensor) and form.is_meta:
                        vector = own[key].get(parameter, {}).get(each, torch.empty(0, dtype=form.dtype))
                        self.claim(names[id(form)], parameter, spans[parameter], vector)
        self.claim_rest(tensors)
        return plan_parts(self._group, tensors, {}, self.claims)


class Contents:
    """The groups "model", "ema" and "optimizer" of a checkpoint: who writes what, and copies of what this rank writes.

    Every rank must make it. What no rank has a part of, such as buffers, rank 0 writes.

    Memory: this rank's part, and what it assembles. Traffic: that of what is assembled (`ClaimedTensors`).

    Args:
        rank: This rank.
        division: Its part of the run.
        subjects: The objects of the run.
        tables: What each rank has of the optimizers' state.

    Raises:
        CheckpointError: A tensor cannot be stored, or ranks do not have all of one.
    """

    increments = None
    """Files are written as a whole."""

    def __init__(self, rank: int, division: Division, subjects: Subjects, tables: Sequence[Table]) -> None:
        self._division = division
        names = parameter_names(subjects.modules)
        forms = {
            names[id(p)]: ParameterForm(p.shape, unit.strides[i], unit.is_row_major(i))
            for unit in division.units
            for i, p in enumerate(unit.parameters)
        }
        self.optimizers = merged_state(tables, {name: form.shape for name, form in forms.items()})
        """The state of the optimizers, with tensors on the meta device for what is divided."""
        of_weights = subjects.weights
        claimed = {
            group: ClaimedTensors(group, rank, len(tables), forms, self._assemble)
            for group in (*of_weights, "optimizer")
        }
        self.values = {group: each.values for group, each in claimed.items()}
        """The part of each group that this rank writes."""
        self.plans = {
            group: self._plan_weights(group, modules, claimed[group]) for group, modules in of_weights.items()
        }
        own = {
            key: {piece.name: piece.state for piece in division.shards_of(optimizer).pieces()}
            for key, optimizer in subjects.optimizers.items()
        }
        self.plans["optimizer"] = claimed["optimizer"].claim_optimizers(self.optimizers, tables, own)

    def _plan_weights(self, group: str, modules: Mapping[str, nn.Module], claimed: ClaimedTensors) -> PartPlan:
        names, tensors = parameter_names(modules), model_tensors(modules)
        aliases = tied_names(tensors)
        of_average = next(iter(self._division.beside), None)  # None: each rank keeps the average whole
        division = self._division if group == "model" else of_average
        for unit in () if division is None else division.units:
            own = {piece.parameter: vector for piece, vector in unit.updated_values()}
            for i, p in enumerate(unit.parameters):
                spans = {
                    rank: (piece.start, piece.stop)
                    for rank, layout in enumerate(unit.layouts)
                    for piece in layout.pieces
                    if piece.parameter == i
                }
                claimed.claim(names[id(p)], names[id(p)], spans, own.get(i, p.new_empty(0)))
        claimed.claim_rest({name: each for name, each in tensors.items() if name not in aliases})
        return plan_parts(group, tensors, aliases, claimed.claims)

    def _assemble(self, _parameter: str, own: Tensor, numels: Mapping[int, int], owner: int) -> Tensor | None:
        return self._division.exchange.assemble(own, numels, owner=owner)
