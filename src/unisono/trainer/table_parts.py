"""The parts of a checkpoint of tables that are divided over ranks: who writes what, and the values of this rank's part.

Rows are dealt by a hash, and a file has them in order. So each rank that writes gets a span of rows from their owners,
in chunks: in memory if they are few, otherwise in a file without a name. With increments, it gets those that have
changed since the base (`table_changes`). Start reading at `TableContents`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from unisono.collectives.world import World
from unisono.engine.row_transfer import RowTransfer
from unisono.shm.unnamed_file import reserve, unnamed_file
from unisono.state.digest import check_storable, copied_range
from unisono.state.durable_files import remedy
from unisono.state.increments import name_of_rows
from unisono.state.part_plan import Claim, PartPlan, even_claims, plan_parts
from unisono.state.part_writing import PartsError
from unisono.state.safetensors_format import lay_out, tied_names
from unisono.trainer.part_saving import OptimizerStates, PartPlace
from unisono.trainer.snapshot import Subjects, capture_trained, optimizer_state
from unisono.trainer.table_changes import PlannedIncrement, SavedRows, TableChanges, by_rank, spans_of

__all__ = ["TableContents"]

_MOST_NBYTES = 64 << 20
"""More bytes of a rank's rows are in a file without a name until they are written."""
_TOGETHER = 1 << 20
"""Rows of each span that are counted at once."""
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS)
"""The answers of file systems that reserve no room: rows are in memory then."""


class TableContents:
    """The groups "model" and "optimizer" of a checkpoint.

    Every rank must make it. Memory: this rank's part, or 64 MiB of rows, and the numbers of the rows that have changed,
    8 bytes each. Disk: this rank's rows, if they take more. Traffic: the rows that are written, once.

    Args:
        world: The ranks.
        subjects: The objects of the run.
        transfer: Brings rows.
        saved: What is divided.
        place: The checkpoint.

    Raises:
        CheckpointError: A tensor cannot be stored.
        PartsError: On all ranks, if there is no room for the rows of one.
    """

    def __init__(
        self, world: World, subjects: Subjects, transfer: RowTransfer, saved: Sequence[SavedRows], place: PartPlace
    ) -> None:
        self._world, self._transfer, self._saved, self._place = world, transfer, saved, place
        self.optimizers: OptimizerStates = {
            key: optimizer_state(subjects.modules, each) for key, each in subjects.optimizers.items()
        }
        self._groups: dict[str, dict[str, Tensor]]
        self._groups, _ = capture_trained(subjects, self.optimizers)
        for group, tensors in self._groups.items():
            for name, tensor in tensors.items():
                check_storable(tensor, f"{group}.{name}")
        self._changes = TableChanges(world, transfer, saved, place, self._groups)
        increments = self._changes.increments
        self.increments = None if place.bases is None else {group: each.notes for group, each in increments.items()}
        """See `CheckpointStore.write_parts`."""
        self.plans = {group: self._plan(group, increments.get(group)) for group in self._groups}
        """By group, who writes what."""
        self.values: dict[str, dict[Claim, Tensor]] = {group: {} for group in self._groups}
        """The part of each group that this rank writes."""
        self._take_common(increments)
        self._take_rows(increments)
        self._changes.keep()

    def _plan(self, group: str, increment: PlannedIncrement | None) -> PartPlan:
        """Return who writes what of a group."""
        tensors, counts = self._groups[group], increment.counts if increment is not None else {}
        forms = tensors if increment is None else increment.forms
        tied = {name: owner for name, owner in tied_names(tensors).items() if name in forms}
        ranks, divided = self._place.ranks, self._divided(group)
        order = lay_out(forms, tied, group).starts
        claims: list[list[Claim]] = [[] for _ in range(self._world.size)]
        common = {name: forms[name] for name in order if name in tensors and name not in divided and name not in counts}
        for rank, own in zip(ranks, even_claims(common, len(ranks)), strict=True):
            claims[rank] += own
        for name, of_ranks in counts.items():
            width, start = tensors[name][:1].numel(), 0
            for rank, count in enumerate(of_ranks):
                stop = start + count
                claims[rank] += [Claim(name, start * width, stop * width), Claim(name_of_rows(name), start, stop)]
                start = stop
        for name in divided:
            if name not in counts:
                width = tensors[name][:1].numel()
                spans = spans_of(len(tensors[name]), ranks, self._world.size)
                for own, span in zip(claims, spans, strict=True):
                    own.append(Claim(name, span.start * width, span.stop * width))
        return plan_parts(group, forms, tied, claims)

    def _divided(self, group: str) -> dict[str, int]:
        return {name: number for each in self._saved if each.group == group for name, number in each.numbers.items()}

    def _take_common(self, increments: Mapping[str, PlannedIncrement]) -> None:
        """Copy this rank's part of the tensors that all ranks have."""
        for group, plan in self.plans.items():
            divided, tensors, values = self._divided(group), self._groups[group], self.values[group]
            compared = {
                name: rows
                for (of, name), rows in self._changes.of_common.items()
                if of == group and group in increments
            }
            numbers = {name_of_rows(name): rows for name, rows in compared.items()}
            for claim in plan.starts[self._world.rank]:
                name = claim.name
                if name in numbers:
                    values[claim] = numbers[name]
                elif name in compared:
                    values[claim] = tensors[name].detach()[compared[name]].view(-1)
                elif name in tensors and name not in divided:
                    values[claim] = copied_range(tensors[name], claim.start, claim.stop, f"{group}.{name}")

    def _take_rows(self, increments: Mapping[str, PlannedIncrement]) -> None:
        """Get the rows that this rank writes."""
        claims = {
            (group, claim.name): claim for group, plan in self.plans.items() for claim in plan.starts[self._world.rank]
        }
        forms = {
            (each.group, name): self._transfer.tensors[number].form
            for each in self._saved
            for name, number in each.numbers.items()
        }
        room = self._make_room(
            {
                key: torch.empty(claim.stop - claim.start, dtype=forms[key].dtype, device="meta")
                for key, claim in claims.items()
                if key in forms
            }
        )
        for place, each in enumerate(self._saved):
            increment = increments.get(each.group)
            spans = spans_of(len(each.table.weight), self._place.ranks, self._world.size)
            chosen = [name for name in each.numbers if increment is not None and name in increment.counts]
            which = torch.empty(0, dtype=torch.int64)
            if chosen:
                sent = by_rank(self._changes.of_tables[place], spans)
                counts = [[int(n) for n in own] for own in self._world.gather_numbers([*map(len, sent)])]
                which = self._transfer.deliver_numbers(sent, counts)
            for name, number in each.numbers.items():
                key = (each.group, name)
                into = room.get(key, torch.empty(0, dtype=forms[key].dtype)).view(-1, *forms[key].shape[1:])
                if key in claims:
                    self.values[each.group][claims[key]] = into.view(-1)
                if name in chosen:
                    self._transfer.deliver(number, sent, counts, partial(_put_among, into, which))
                    if (numbers := claims.get((each.group, name_of_rows(name)))) is not None:
                        self.values[each.group][numbers] = which
                else:
                    self._deliver_all(number, into)

    def _deliver_all(self, number: int, into: Tensor) -> None:
        """Bring all rows of a tensor that are present to the ranks that write them."""
        rowed = self._transfer.tensors[number]
        spans = spans_of(len(rowed.form), self._place.ranks, self._world.size)
        put = partial(_put_from, into, spans[self._world.rank].start)
        for done in range(0, max(map(len, spans)), _TOGETHER):
            parts = [span[done : done + _TOGETHER] for span in spans]
            sent = [
                self._transfer.present(rowed.table, part.start, part.stop).nonzero().view(-1) + part.start
                for part in parts
            ]
            counts = [[int(n) for n in own] for own in self._world.gather_numbers([*map(len, sent)])]
            self._transfer.deliver(number, sent, counts, put)

    def _make_room(self, forms: Mapping[tuple[str, str], Tensor]) -> dict[tuple[str, str], Tensor]:
        """Return memory of zeros for tensors. Every rank must call it.

        Raises:
            PartsError: On all ranks, if there is none on one.
        """
        total = sum(form.nbytes for form in forms.values())
        room: dict[tuple[str, str], Tensor] = {}
        number = 0
        try:
            room = {
                key: _memory_for(form, self._place.folder, is_large=total > _MOST_NBYTES) for key, form in forms.items()
            }
        except OSError as error:
            number = error.errno or errno.EIO
        codes = [int(code) for (code,) in self._world.gather_numbers([number])]
        for rank, code in enumerate(codes):
            if code:
                failure, where = OSError(code, os.strerror(code)), self._place.folder.parent
                raise PartsError(
                    f"the rows of divided tables that rank {rank} writes could not come together in {where}: "
                    f"{failure}. They need room twice while a checkpoint is written. Older checkpoints are untouched. "
                    f"{remedy(failure, where)}",
                    code,
                )
        return room


def _memory_for(form: Tensor, folder: Path, *, is_large: bool) -> Tensor:
    """Return zeros of a form: many in a file without a name, so that they need not fit into memory.

    Raises:
        OSError: There is no room for that file.
    """
    if is_large:
        segment = unnamed_file(folder, form.nbytes)
        try:
            reserve(segment)
            return segment.tensor(0, form.shape, form.dtype)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise
        finally:
            segment.close_descriptor()
    return torch.zeros(form.shape, dtype=form.dtype)


def _put_from(into: Tensor, start: int, which: Tensor, values: Tensor) -> None:
    """Put rows to their places in a tensor that begins with row `start`."""
    into.index_copy_(0, which - start, values)


def _put_among(into: Tensor, chosen: Tensor, which: Tensor, values: Tensor) -> None:
    """Put rows to their places in a tensor that has some rows, ascending."""
    into.index_copy_(0, torch.searchsorted(chosen, which), values)
