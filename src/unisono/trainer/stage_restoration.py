"""The restoration of a run whose model is cut, from a checkpoint of which each rank reads what its stages need.

That is known before the first step if the checkpoint was written with the same stages: it says which of them has what.
Start reading at `restore_stages`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unisono.collectives.rank_errors import raised_on_all
from unisono.collectives.world import World
from unisono.engine.model_contents import parameter_names
from unisono.engine.staged import StagedBuffers
from unisono.parallel.pipeline.cut_model import CutModel
from unisono.state.open_checkpoint import OpenCheckpoint
from unisono.state.tensor_file import TensorRange, TensorSource
from unisono.trainer.part_restoration import read_held, read_optimizer
from unisono.trainer.restoration import Comparison, put_optimizer_state, restore
from unisono.trainer.snapshot import Subjects, model_tensors

__all__ = ["restore_stages"]


def restore_stages(
    world: World,
    subjects: Subjects,
    cut: CutModel,
    checkpoint: OpenCheckpoint,
    document: Mapping[str, Any],
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Restore the state of a run whose model is cut. Every rank must call it.

    If the checkpoint was written with the same stages, ranks read what theirs have, and give back the memory of all
    else, as in mid-run. Otherwise each reads all of it, until the first step. Memory: what is read.

    Args:
        world: The ranks.
        subjects: The objects of the run.
        cut: The model.
        checkpoint: The checkpoint, which has been checked.
        document: Its document.

    Returns:
        See `restoration.restore`.

    Raises:
        CheckpointError, ValueError: See there; also if a file has been damaged since it was checked.
    """
    files = {name: checkpoint.group(name) for name in checkpoint.groups}
    stages, source = document["facts"].get("stages"), str(checkpoint.path)
    if stages is None or not cut.has_same_stages(stages):
        with raised_on_all(world, "Trainer reading a checkpoint"):
            groups = {name: file.read_all() for name, file in files.items()}
        return restore(subjects, groups, document, source=source)
    forms: dict[str, Mapping[str, Tensor]] = {name: file.forms for name, file in files.items()}
    forms["other"] = files["other"].read_all()
    comparison = Comparison(subjects, forms, document, source=source)
    states = comparison.states
    with comparison.restoring(), raised_on_all(world, "Trainer reading its stages"), torch.no_grad():
        for name, (module, buffer, device) in comparison.unfilled.items():
            module._buffers[buffer] = files["model"].read_tensor(name).to(device)
        cut.begin_with(stages)
        if isinstance(subjects.buffers, StagedBuffers):
            subjects.buffers.settle()
        cut.drop()
        if cut.divisions is not None:
            cut.divisions.divide()
        for group, modules in (("model", subjects.modules), ("ema", subjects.averages)):
            if modules:
                _read_weights(files[group], cut, model_tensors(modules), modules)
        for key, optimizer in subjects.optimizers.items():
            optimizer.state.clear()
            if cut.divisions is not None:
                for division in cut.divisions.of_stage.values():
                    read_optimizer(files["optimizer"], states[key], division, optimizer)
            else:
                own = {name: state for name, state in states[key].items() if cut.owns(name)}
                put_optimizer_state(subjects.modules, optimizer, _read_state(files["optimizer"], own))
    return comparison.began, comparison.overruled


def _read_weights(file: TensorSource, cut: CutModel, tensors: Mapping[str, Tensor], modules: Mapping[str, Any]) -> None:
    """Read the weights that this rank has, or its parts of them, and all buffers."""
    (model,) = modules.values()
    divisions = [] if cut.divisions is None or not cut.divisions.divides_weights else [cut.divisions.of(model)]
    units = [unit for each in divisions for division in each.of_stage.values() for unit in division.units]
    elsewhere = {p.untyped_storage()._cdata for name, p in model.named_parameters() if name in cut.foreign}
    elsewhere |= {key for unit in units if not unit.keeps_weights for key in unit.placeholders()}
    ranges: list[TensorRange] = []
    for name, tensor in tensors.items():
        if tensor.untyped_storage()._cdata in elsewhere:
            continue
        if tensor.is_contiguous():
            ranges.append(TensorRange(name, 0, tensor))
        else:
            tensor.copy_(file.read_tensor(name))
    file.read(ranges)
    names = parameter_names(modules)
    for unit in units:
        if not unit.keeps_weights:
            read_held(file, unit, names)


def _read_state(file: TensorSource, states: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the state of some parameters with its values."""
    names = {id(form): name for name, form in file.forms.items()}
    made: dict[int, Tensor] = {}
    for state in states.values():
        for form in state.values():
            if isinstance(form, Tensor) and id(form) not in made:
                made[id(form)] = torch.empty(form.shape, dtype=form.dtype)
    file.read([TensorRange(names[key], 0, tensor) for key, tensor in made.items()])
    return {
        name: {key: made[id(form)] if isinstance(form, Tensor) else form for key, form in state.items()}
        for name, state in states.items()
    }
