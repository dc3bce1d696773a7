"""The restoration of a divided run from a checkpoint of which each rank reads its own part.

Weights are read into the parts that ranks keep, and the state of optimizers into that of their pieces, so the run is
divided from then on. Start reading at `restore_parts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.collectives.rank_errors import raised_on_all
from unisono.collectives.world import World
from unisono.engine.model_contents import parameter_names
from unisono.engine.norm import in_memory_order
from unisono.engine.sharded import Division, ShardedUnit
from unisono.state.open_checkpoint import OpenCheckpoint
from unisono.state.tensor_file import TensorRange, TensorSource
from unisono.trainer.restoration import Comparison
from unisono.trainer.snapshot import Subjects

__all__ = ["read_held", "read_optimizer", "restore_parts"]


def restore_parts(
    world: World, subjects: Subjects, division: Division, checkpoint: OpenCheckpoint, document: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Restore the state of a run in the parts of its ranks. Every rank must call it.

    Memory: the part. A parameter whose elements do not lie in memory in the order of their indices is read as a whole.

    Args:
        world: The ranks.
        subjects: The objects of the run.
        division: Its parts. The run is whole before, and divided afterwards.
        checkpoint: The checkpoint, which has been checked.
        document: Its document.

    Returns:
        See `restoration.restore`.

    Raises:
        CheckpointError, ValueError: See there; also if a file has been damaged since it was checked.
    """
    files = {name: checkpoint.group(name) for name in checkpoint.groups}
    groups: dict[str, Mapping[str, Tensor]] = {name: file.forms for name, file in files.items()}
    groups["other"] = files["other"].read_all()
    comparison = Comparison(subjects, groups, document, source=str(checkpoint.path))
    with comparison.restoring(), raised_on_all(world, "Trainer reading its part of a checkpoint"), torch.no_grad():
        for name, (module, buffer, device) in comparison.unfilled.items():
            module._buffers[buffer] = files["model"].read_tensor(name).to(device)
        _read_weights(files["model"], comparison.own, division, parameter_names(subjects.modules))
        if comparison.averages:
            of_average = next(iter(division.beside), division)
            _read_weights(files["ema"], comparison.averages, of_average, parameter_names(subjects.averages))
        for key, optimizer in subjects.optimizers.items():
            read_optimizer(files["optimizer"], comparison.states[key], division, optimizer)
        division.begin_divided()
    return comparison.began, comparison.overruled


def _read_weights(
    file: TensorSource, tensors: Mapping[str, Tensor], division: Division, names: Mapping[int, str]
) -> None:
    """Read the weights that this rank keeps, and all buffers."""
    ranges: list[TensorRange] = []
    # By memory, since a tied parameter has several names.
    of_units = {p.untyped_storage()._cdata for unit in division.units for p in unit.parameters}
    parameters = of_units if not division.keeps_weights else set()
    for name, tensor in tensors.items():
        if tensor.untyped_storage()._cdata not in parameters:
            if tensor.is_contiguous():
                ranges.append(TensorRange(name, 0, tensor))
            else:
                tensor.copy_(file.read_tensor(name))
    file.read(ranges)
    if not division.keeps_weights:
        for unit in division.units:
            read_held(file, unit, names)


def read_held(file: TensorSource, unit: ShardedUnit, names: Mapping[int, str]) -> None:
    """Read the weights of a unit that this rank keeps.

    Args:
        file: The weights.
        unit: The unit.
        names: The names of parameters by identity.
    """
    ranges: list[TensorRange] = []
    for piece, place in unit.held_places():
        i = piece.parameter
        name = names[id(unit.parameters[i])]
        if unit.is_row_major(i):
            ranges.append(TensorRange(name, piece.start, place))
        else:
            place.copy_(in_memory_order(file.read_tensor(name), unit.strides[i])[piece.start : piece.stop])
    file.read(ranges)


def read_optimizer(
    file: TensorSource, state: Mapping[str, Mapping[str, Any]], division: Division, optimizer: Optimizer
) -> None:
    """Read the state of this rank's pieces."""
    names = {id(form): name for name, form in file.forms.items()}
    shards = division.shards_of(optimizer)
    ranges: list[TensorRange] = []
    found: list[dict[str, Any]] = []
    for piece in shards.pieces():
        is_row_major = torch.empty_strided(piece.shape, piece.strides, device="meta").is_contiguous()
        own: dict[str, Any] = {}
        for key, form in state.get(piece.name, {}).items():
            if not isinstance(form, Tensor):
                own[key] = form
            elif not form.dim() or form.shape != piece.shape:
                own[key] = torch.empty(form.shape, dtype=form.dtype)
                ranges.append(TensorRange(names[id(form)], 0, own[key]))
            elif is_row_major:
                own[key] = torch.empty(piece.stop - piece.start, dtype=form.dtype)
                ranges.append(TensorRange(names[id(form)], piece.start, own[key]))
            else:
                whole = in_memory_order(file.read_tensor(names[id(form)]), piece.strides)
                own[key] = whole[piece.start : piece.stop].clone()
        found.append(own)
    file.read(ranges)
    shards.load(found)
