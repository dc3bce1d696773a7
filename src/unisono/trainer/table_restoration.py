"""The restoration of a run with tables that are divided over ranks: each rank gets its rows from those that read.

All ranks read a share of the checkpoint, or rank 0 all of it, where ranks do not see the same files. Start reading at
`restore_tables`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from unisono.collectives.rank_errors import raised_on_all
from unisono.collectives.world import World
from unisono.errors import CheckpointError
from unisono.state.part_plan import even_claims
from unisono.state.tensor_file import TensorRange, TensorSource
from unisono.state.tensor_groups import exchange_parts
from unisono.trainer.divided_tables import DividedTables
from unisono.trainer.restoration import Comparison, put_optimizer_state
from unisono.trainer.resume import ResumedRun
from unisono.trainer.snapshot import Subjects
from unisono.trainer.table_changes import spans_of

__all__ = ["restore_tables"]


def restore_tables(
    world: World, subjects: Subjects, tables: DividedTables, found: ResumedRun
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Restore the state of a run whose tables are divided. Every rank must call it.

    Everything is compared before anything is changed. Memory: the part, and what ranks have beside the tables once
    more. Traffic: all that is not divided, to all ranks, and to each its rows.

    Args:
        world: The ranks.
        subjects: The objects of the run.
        tables: Its divided tables.
        found: The checkpoint, which has been checked.

    Returns:
        See `restoration.restore`.

    Raises:
        CheckpointError, ValueError: See there; also if a file has been damaged since it was checked.
    """
    assert found.source is not None
    groups = _read_common(world, tables, found)
    of_optimizer = {name: n for name, n in tables.divided("optimizer").items() if name in groups["optimizer"]}
    groups["optimizer"] |= {
        name: tables.tensors.new_state(number, groups["optimizer"][name]) for name, number in of_optimizer.items()
    }
    comparison = Comparison(subjects, groups, found.document, source=found.source)
    for name, number in of_optimizer.items():
        there, here = groups["optimizer"][name], tables.form(number)
        if (there.shape, there.dtype) != (here.shape, here.dtype):
            raise CheckpointError(
                f"{found.source} is a checkpoint of another model: {name}, the state of a table, is "
                f"{there.dtype}{[*there.shape]} there and {here.dtype}{[*here.shape]} here. Build the model as it was, "
                "or start anew in another directory."
            )
    with comparison.restoring(), torch.no_grad():
        divided = tables.divided("model")
        for name, (module, buffer, device) in comparison.unfilled.items():
            module._buffers[buffer] = groups["model"][name].to(device, copy=True)
        for name, tensor in comparison.own.items():
            if name in divided:
                groups["model"][name] = tensor
            elif not groups["model"][name].is_meta:  # it is another name of a divided one
                tensor.copy_(groups["model"][name])
        _distribute(world, tables, found, groups)
        for key, optimizer in subjects.optimizers.items():
            optimizer.state.clear()
            put_optimizer_state(subjects.modules, optimizer, comparison.states[key])
    return comparison.began, comparison.overruled


def _read_common(world: World, tables: DividedTables, found: ResumedRun) -> dict[str, dict[str, Tensor]]:
    """Return all tensors of a checkpoint on every rank; divided ones are without values."""
    groups: dict[str, dict[str, Tensor]] = {}
    parts: list[list[Tensor]] = [[] for _ in range(world.size)]
    with raised_on_all(world, "Trainer resuming"):
        for group, forms in found.forms.items():
            divided = tables.divided(group)
            of_tables = {id(forms[name]) for name in divided if name in forms}  # tied names have one form
            common = {name: form for name, form in forms.items() if id(form) not in of_tables}
            made = {id(form): torch.empty(form.shape, dtype=form.dtype) for form in common.values()}
            groups[group] = {name: made.get(id(form), form) for name, form in forms.items()}
            firsts = {id(form): name for name, form in reversed(common.items())}
            read: list[TensorRange] = []
            distinct = {name: common[name] for name in common if firsts[id(common[name])] == name}
            for rank, claims in zip(found.readers, even_claims(distinct, len(found.readers)), strict=True):
                for claim in claims:
                    own = groups[group][claim.name].view(-1)[claim.start : claim.stop]
                    parts[rank].append(own)
                    if rank == world.rank:
                        read.append(TensorRange(claim.name, claim.start, own))
            if found.checkpoint is not None:
                found.checkpoint.group(group).read(read)
    exchange_parts(world, parts)
    return groups


def _distribute(world: World, tables: DividedTables, found: ResumedRun, groups: dict[str, dict[str, Tensor]]) -> None:
    """Let each rank have its rows."""
    for group in ("model", "optimizer"):
        source = None if found.checkpoint is None else found.checkpoint.group(group)
        for name, number in tables.divided(group).items():
            if name in groups[group]:
                spans = spans_of(len(tables.form(number)), found.readers, world.size)
                tables.distribute(number, groups[group][name], spans, partial(_rows_of, source, name))


def _rows_of(source: TensorSource | None, name: str, start: int, stop: int) -> Tensor:
    """Return rows start <= row < stop of a tensor in a checkpoint."""
    assert source is not None, "this rank reads"
    form = source.forms[name]
    rows = torch.empty((stop - start, *form.shape[1:]), dtype=form.dtype)
    source.read([TensorRange(name, start * form[:1].numel(), rows)])
    return rows
