"""The state of a user's loop in parts: what each rank has of it, and its restoration on any number of ranks.

A part is made of dicts, lists, numbers, strings and tensors, so `torch.load` reads it without running code from the
file. It has pieces of parameters as they lie in memory, by name, with the optimizer's state of these pieces; that of
rank 0 also has the buffers and hyperparameters. Start reading at `own_part`; `PartLoading` is the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.engine.model_contents import member_name, plain_name
from unisono.engine.norm import dense_strides, in_memory_order
from unisono.engine.optimizer_placement import placed
from unisono.engine.sharded import Division
from unisono.errors import CheckpointError
from unisono.parallel.state_parts import PartHeads

__all__ = ["PartLoading", "own_part"]

_FORM = "unisono part"
_VERSION = 1


class _DividedParameter(NamedTuple):
    """A parameter as it is in a part."""

    shape: list[int]
    strides: list[int]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape} with strides {self.strides}"


class _Place(NamedTuple):
    """Where a range of a parameter's elements is on this rank."""

    start: int
    stop: int
    vector: Tensor


class _StateOfPiece(NamedTuple):
    """The optimizer's state of a range of a parameter's elements on this rank."""

    start: int
    stop: int
    state: dict[str, Any]
    allocate: Callable[[torch.dtype], tuple[Tensor, Tensor]]
    """Makes a tensor with an element for each one of the range, and returns it also as a vector."""


@torch.no_grad()
def own_part(
    model: nn.Module,
    optimizers: Mapping[str, Optimizer],
    division: Division | None,
    *,
    rank: int,
    ranks: int,
    steps: int,
) -> dict[str, Any]:
    """Return this rank's part of the state. Local. Memory: a copy of the part.

    Args:
        model: The model.
        optimizers: Its optimizers by name, without a parameter in common.
        division: Its parts; None with one rank, which has all of it.
        rank: This rank.
        ranks: The number of ranks.
        steps: The number of steps made.
    """
    forms = _forms(model, division)
    weights = [
        {"name": name, **forms[name]._asdict(), "start": start, "values": values.detach().clone()}
        for name, start, values in _own_weights(model, division)
    ]
    states = [
        {"name": name, "start": start, "stop": stop, "state": {key: _copied(value) for key, value in state.items()}}
        for name, start, stop, state in _own_states(model, optimizers, division)
    ]
    settings = [
        {
            "name": name,
            "class": type(optimizer).__name__,
            "groups": [
                {key: _copied(value) for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ],
        }
        for name, optimizer in optimizers.items()
    ]
    return {
        **PartHeads.make(_FORM, _VERSION, rank=rank, ranks=ranks, steps=steps),
        "weights": weights,
        "optimizer": states,
        "buffers": {name: b.detach().clone() for name, b in _buffers(model).items()} if not rank else {},
        "settings": settings if not rank else [],
    }


class PartLoading:
    """Restores a state from the parts of all ranks, one after the other. Local.

    Memory: this rank's part, and one other.

    Args:
        model: The model.
        optimizers: Its optimizers by name.
        division: Its parts, which are apart; None with one rank.
    """

    def __init__(self, model: nn.Module, optimizers: Mapping[str, Optimizer], division: Division | None) -> None:
        self._model, self._optimizers, self._division = model, optimizers, division
        self._forms = _forms(model, division)
        self._places = _places(model, division)
        self._states = _state_places(model, optimizers, division)
        self._loaded: dict[tuple[str, int], int] = {}
        """How many elements were loaded of each place, by the parameter and its first element."""

    @torch.no_grad()
    def load(self, parts: Iterable[Any]) -> int:
        """Load all parts, and return the number of steps that had been made.

        Raises:
            CheckpointError: They are no parts, not all parts of one state, or those of another model or optimizer.
        """
        self._replace_state()  # so that there is no memory for two of them
        heads = PartHeads(_FORM, _VERSION, otherwise="save it in sharded.whole()")
        for part in parts:
            heads.add(part)
            for each in part["weights"]:
                self._load_weight(each)
            for each in part["optimizer"]:
                self._load_state(each)
            if not part["rank"]:
                self._load_rest(part)
        steps = heads.complete()
        self._check_complete()
        self._replace_state()
        return steps

    def _load_weight(self, each: Mapping[str, Any]) -> None:
        name = each["name"]
        found = _DividedParameter(list(each["shape"]), list(each["strides"]), each["dtype"])
        own = self._forms.get(name)
        if found != own:
            raise CheckpointError(
                f"parameter {name!r} is {found} in the parts, and {own or 'missing'} in the model: load parts of the "
                "same model"
            )
        start, stop = each["start"], each["start"] + each["values"].numel()
        for place in self._places.get(name, ()):
            first, last = max(start, place.start), min(stop, place.stop)
            if first < last:
                place.vector[first - place.start : last - place.start].copy_(
                    each["values"][first - start : last - start]
                )
                key = name, place.start
                self._loaded[key] = self._loaded.get(key, 0) + last - first

    def _load_state(self, each: Mapping[str, Any]) -> None:
        start, stop = each["start"], each["stop"]
        for own in self._states.get(each["name"], ()):
            first, last = max(start, own.start), min(stop, own.stop)
            if first >= last:
                continue
            for key, value in each["state"].items():
                if not isinstance(value, Tensor) or list(value.shape) != [stop - start]:
                    own.state[key] = _copied(value)
                    continue
                if key not in own.state:
                    own.state[key], vector = own.allocate(value.dtype)
                else:
                    vector = _vector(own.state[key])
                vector[first - own.start : last - own.start].copy_(value[first - start : last - start])

    def _load_rest(self, part: Mapping[str, Any]) -> None:
        """Load the buffers and hyperparameters, which rank 0 has."""
        own = _buffers(self._model)
        for name in own.keys() ^ part["buffers"].keys():
            where = "the model" if name in own else "the parts"
            raise CheckpointError(f"buffer {name!r} is in {where} alone: load parts of the same model")
        for name, buffer in own.items():
            saved = part["buffers"][name]
            if saved.shape != buffer.shape:
                raise CheckpointError(
                    f"buffer {name!r} has shape {list(saved.shape)} in the parts, and {list(buffer.shape)} in the "
                    "model: load parts of the same model"
                )
            buffer.copy_(saved)
        found = {
            n: (type(optimizer).__name__, len(optimizer.param_groups)) for n, optimizer in self._optimizers.items()
        }
        saved = {each["name"]: (each["class"], len(each["groups"])) for each in part["settings"]}
        if found != saved:
            raise CheckpointError(
                f"the parts are of {_tell_optimizers(saved)}, and the loop has {_tell_optimizers(found)}: load parts "
                "of the same optimizers"
            )
        for settings in part["settings"]:
            optimizer = self._optimizers[settings["name"]]
            for group, values in zip(optimizer.param_groups, settings["groups"], strict=True):
                for key, value in values.items():
                    if isinstance(group.get(key), Tensor):
                        group[key].copy_(torch.as_tensor(value))
                    else:
                        group[key] = _copied(value)

    def _check_complete(self) -> None:
        for name, places in self._places.items():
            for place in places:
                count = self._loaded.get((name, place.start), 0)
                if count != place.stop - place.start:
                    raise CheckpointError(
                        f"the parts have {count} of {place.stop - place.start} elements of parameter {name!r} that "
                        "this rank keeps: load parts of the same model"
                    )

    def _replace_state(self) -> None:
        """Replace the optimizers' state by what has been loaded."""
        if self._division is not None:
            by_piece = {(name, own.start): own.state for name, all_own in self._states.items() for own in all_own}
            for optimizer in self._optimizers.values():
                shards = self._division.shards_of(optimizer)
                shards.load([by_piece[piece.name, piece.start] for piece in shards.pieces()])
            return
        parameters = _named(self._model)
        for optimizer in self._optimizers.values():
            optimizer.state.clear()
            groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
            for name, (own,) in self._states.items():
                p = parameters[name]
                if own.state and id(p) in groups:
                    optimizer.state[p] = {
                        key: placed(key, value, p, groups[id(p)]) if isinstance(value, Tensor) else value
                        for key, value in own.state.items()
                    }


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {plain_name(name): p for name, p in model.named_parameters()}


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a state_dict has."""
    return {
        member_name(path, name): buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def _forms(model: nn.Module, division: Division | None) -> dict[str, _DividedParameter]:
    if division is None:
        known = ((name, p, dense_strides(p)) for name, p in _named(model).items())
    else:
        known = (
            known for unit in division.units for known in zip(unit.names, unit.parameters, unit.strides, strict=True)
        )
    return {
        name: _DividedParameter(list(p.shape), list(strides), str(p.dtype).removeprefix("torch."))
        for name, p, strides in known
    }


def _places(model: nn.Module, division: Division | None) -> dict[str, list[_Place]]:
    """Return where this rank keeps weights, by parameter."""
    if division is None:
        whole = [(name, p, dense_strides(p)) for name, p in _named(model).items()]
    elif division.keeps_weights:
        whole = [
            found for unit in division.units for found in zip(unit.names, unit.parameters, unit.strides, strict=True)
        ]
    else:
        places: dict[str, list[_Place]] = {}
        for unit in division.units:
            for piece, vector in unit.held_places():
                places.setdefault(unit.names[piece.parameter], []).append(_Place(piece.start, piece.stop, vector))
        return places
    return {name: [_Place(0, p.numel(), in_memory_order(p.detach(), strides))] for name, p, strides in whole}


def _own_weights(model: nn.Module, division: Division | None) -> list[tuple[str, int, Tensor]]:
    """Return the pieces that this rank saves: those that it updates."""
    if division is None:
        return [(name, 0, in_memory_order(p.detach(), dense_strides(p))) for name, p in _named(model).items()]
    return [
        (unit.names[piece.parameter], piece.start, vector)
        for unit in division.units
        for piece, vector in unit.updated_values()
    ]


def _own_states(
    model: nn.Module, optimizers: Mapping[str, Optimizer], division: Division | None
) -> list[tuple[str, int, int, Mapping[str, Any]]]:
    """Return the optimizers' state of the pieces that this rank updates; what has an element of each is a vector."""
    if division is not None:
        pieces = [piece for optimizer in optimizers.values() for piece in division.shards_of(optimizer).pieces()]
        return [(piece.name, piece.start, piece.stop, piece.state) for piece in pieces if piece.state]
    found: list[tuple[str, int, int, Mapping[str, Any]]] = []
    for name, p in _named(model).items():
        if state := next((optimizer.state[p] for optimizer in optimizers.values() if optimizer.state.get(p)), None):
            flat = {
                key: in_memory_order(value, dense_strides(p))
                if isinstance(value, Tensor) and value.dim() and value.shape == p.shape
                else value
                for key, value in state.items()
            }
            found.append((name, 0, p.numel(), flat))
    return found


def _state_places(
    model: nn.Module, optimizers: Mapping[str, Optimizer], division: Division | None
) -> dict[str, list[_StateOfPiece]]:
    """Return where this rank will keep the optimizers' state, by parameter."""
    places: dict[str, list[_StateOfPiece]] = {}
    if division is not None:
        for piece in (piece for optimizer in optimizers.values() for piece in division.shards_of(optimizer).pieces()):
            numel = piece.stop - piece.start

            def allocate(dtype: torch.dtype, numel: int = numel) -> tuple[Tensor, Tensor]:
                vector = torch.empty(numel, dtype=dtype)
                return vector, vector

            places.setdefault(piece.name, []).append(_StateOfPiece(piece.start, piece.stop, {}, allocate))
        return places
    trained = {id(p) for optimizer in optimizers.values() for group in optimizer.param_groups for p in group["params"]}
    for name, p in _named(model).items():
        if id(p) in trained:

            def allocate_whole(dtype: torch.dtype, p: Tensor = p) -> tuple[Tensor, Tensor]:
                whole = torch.empty_strided(p.shape, dense_strides(p), dtype=dtype, device=p.device)
                return whole, _vector(whole)

            places[name] = [_StateOfPiece(0, p.numel(), {}, allocate_whole)]
    return places


def _tell_optimizers(found: Mapping[str, tuple[str, int]]) -> str:
    return " and ".join(
        f"{kind} {f'{name!r} ' if name else ''}with {groups} parameter {'group' if groups == 1 else 'groups'}"
        for name, (kind, groups) in found.items()
    )


def _vector(dense: Tensor) -> Tensor:
    return dense.as_strided((dense.numel(),), (1,))


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
