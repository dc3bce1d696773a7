"""Protects the weights and the optimizers' state against the death of a rank in the middle of an update.

A rank that dies there leaves a part that is half old, half new. The survivors put back the state from before the step,
bit for bit. So before an update each rank copies what it is about to write to shared memory (`backup.py`): all of its
part if the model is small or the optimizer needs whole parameters, otherwise one portion in turn. Then the gradients of
the last steps are kept too, in rows that take turns, and a portion is restored from its last copy by repeating the
updates since, with the same gradients and hyperparameters, and so with the same bits. Of tables, the rows that a step
writes are copied (`table_backup.py`).

A step is committed once all ranks have ended its update. The words that say so (`update_progress.py`) do not depend on
the barrier that follows, which a rank that dies in it may open for some ranks and not for others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.engine.shared.backup import Backup
from unisono.engine.shared.gradient_rows import GradientRows
from unisono.engine.shared.optimizer_update import OptimizerUpdate
from unisono.engine.shared.partition import Piece
from unisono.engine.shared.sharded_optimizer import ShardedOptimizer
from unisono.engine.shared.shared_runtime import SharedRuntime
from unisono.engine.shared.table_backup import TableBackup
from unisono.engine.shared.update_progress import UpdateProgress
from unisono.engine.step_transaction import StepTransaction

__all__ = ["TURNS", "UpdateProtection"]

TURNS = 8
"""The number of steps in which a rank of a large model copies its part once."""

Groups = list[dict[str, Any]]


class _PastUpdate(NamedTuple):
    """All that it takes to repeat an update, besides the gradients."""

    number: int
    used: list[bool]
    """For each parameter, True if it had a gradient."""
    groups: list[Groups]
    """The hyperparameters, by optimizer and group."""
    found_inf: Tensor | None
    happened: bool
    """False if the update was left out."""


class UpdateProtection:
    """Protects the updates of one engine, from when it has divided the work until it divides it anew.

    The calls of a step are `begin`, `end`, possibly `settle`, and `commit`; or `leave_out` and `commit`.

    Args:
        runtime: Allocates shared memory. Every rank must build this object, and call `settle` together.
        parts: The pieces of each rank.
        updates: The optimizers.
        rows: The gradient rows. With as many as `TURNS`, which take turns, the gradients of so many steps are kept.
        parameters: The parameters.
        vectors: Their weights as vectors.
        tables: The parameters with sparse gradients, which follow the others.
        keeps_copies: False if the updates cannot be undone. Then only deaths outside of them are survived.
        is_whole: True if ranks update whole parameters.
    """

    def __init__(
        self,
        runtime: SharedRuntime,
        parts: Sequence[Sequence[Piece]],
        updates: Sequence[OptimizerUpdate],
        rows: Sequence[GradientRows[Any]],
        *,
        parameters: Sequence[Tensor],
        vectors: Sequence[Tensor],
        tables: Sequence[Tensor],
        keeps_copies: bool,
        is_whole: bool,
    ) -> None:
        self._runtime, self._parameters, self._vectors = runtime, parameters, vectors
        self._parts, self._updates, self._rows, self._is_whole = parts, updates, rows, is_whole
        self._turns = len(rows) if len(rows) == TURNS else 1
        self._keeps_past = self._turns > 1 or is_whole
        """True if updates may have to be repeated, or hyperparameters to be put back."""
        self._progress = UpdateProgress(runtime, self._turns)
        self._backup = self._next_backup = self._make_backup() if keeps_copies else None
        self._tables = TableBackup(runtime, tables, first=len(parameters), updates=updates)
        self._is_stale = True
        """True if all portions have to be copied, since no copy or no gradient is of use."""
        self._past: deque[_PastUpdate] = deque(maxlen=self._turns)
        self._versions: list[int] = []
        """The versions of the kept gradients, which change if the user's loop writes to them."""
        self._committed = 0
        self._attempt = 0

    @property
    def number(self) -> int:
        """The number of the update of the step under way; updates count from 1."""
        return self._committed + 1

    def attempt(self, number: int) -> None:
        """Record the number of the attempt at a step that begins."""
        self._attempt = number

    def copy_tables(self, gradients: Sequence[Tensor | None], entries: Sequence[int], step: StepTransaction) -> None:
        """Copy the rows of tables that this rank is about to write. Every rank must call it, before `begin`.

        Args:
            gradients: The gradient of each table's rows that this rank updates.
            entries: The most rows of each table that one rank may write, equal on all ranks.
            step: The step under way.
        """
        if self._backup is not None:
            self._tables.reserve(entries, step)
            self._tables.copy(gradients)

    def begin(self, used: Sequence[bool], found_inf: Tensor | None) -> None:
        """Copy what this rank is about to write, and note how to repeat the update.

        Args:
            used: For each parameter, True if it has a gradient.
            found_inf: The flag that the optimizers get; see `ShardedOptimizer.step`.
        """
        number = self.number
        if self._backup is not None:
            self._copy(self._backup, number)
            if self._keeps_past:
                self._note(number, used, found_inf, happened=True)
        self._progress.begin(number)

    def end(self, *, unsettled: bool) -> None:
        """Record that this rank's part is written. Call it before the barrier that ends the update.

        Args:
            unsettled: True if there is new state, for which `settle` follows.
        """
        self._progress.end(self.number, unsettled=unsettled)

    def leave_out(self) -> None:
        """Record, instead of `begin` and `end`, that the step changes neither weights nor state."""
        number = self.number
        if self._backup is not None:
            self._copy(self._backup, number)
            if self._keeps_past:
                self._note(number, (), None, happened=False)
        self._progress.end(number, unsettled=False)

    def settle(self) -> None:
        """Make room for copies of new state. Call it before the barrier after which all ranks see that state."""
        if self._backup is not None:
            self._next_backup = self._make_backup()
        self._progress.settle(self.number)

    def commit(self) -> None:
        """Record that all ranks have ended the update."""
        self._committed += 1
        if self._next_backup is not self._backup:
            self._backup, self._is_stale = self._next_backup, True

    def give_up(self) -> None:
        """Record that this rank does not end the step, so that no other rank waits for that."""
        self._progress.give_up(self._attempt)

    def wait_until_committed(self) -> bool:
        """Wait, after the barrier that ends the update has failed, and return True if the step is committed."""
        return self._progress.wait_until_committed(self.number, self._attempt)

    def repair(self, dead: Collection[int], *, is_hooked: bool) -> bool:
        """Put back the state from before the step under way; see `SharedEngine.repair`."""
        committed = self._progress.committed()
        if committed != self._committed:
            return False
        broken = self._progress.writers(after=committed)
        if not broken:
            return True
        if self._backup is None or is_hooked:
            return False
        own = self._runtime.rank
        stands_in = own == min({*range(self._runtime.size)} - {*dead})
        with torch.no_grad():
            for rank in broken:
                if rank == own or (stands_in and rank in dead):
                    if not self._restore(self._backup, rank):
                        return False
                    self._tables.restore(rank)
        for update in self._updates:
            update.state.take_back(update.optimizer)
        if self._is_whole and self._past and self._past[-1].number == self.number:
            for update, groups in zip(self._updates, self._past[-1].groups, strict=True):
                _put_back(update.optimizer.param_groups, groups)
        return True

    def _make_backup(self) -> Backup:
        return Backup(self._runtime, self._parts, self._vectors, self._updates, turns=self._turns)

    def _copy(self, backup: Backup, number: int) -> None:
        if self._turns > 1:
            versions = self._gradient_versions()
            self._is_stale |= versions != self._versions
            self._versions = versions
        for turn in range(self._turns) if self._is_stale else (number % self._turns,):
            backup.copy(turn)
            self._progress.copied(turn, number)
        self._is_stale = False

    def _note(self, number: int, used: Sequence[bool], found_inf: Tensor | None, *, happened: bool) -> None:
        groups = [_copy_of(update.optimizer.param_groups) for update in self._updates]
        flag = None if found_inf is None else found_inf.clone()
        self._past.append(_PastUpdate(number, list(used), groups, flag, happened))

    def _gradient_versions(self) -> list[int]:
        return [gradient._version for rows in self._rows for gradient in rows.gradients]

    def _restore(self, backup: Backup, rank: int) -> bool:
        """Put back a rank's part as it is after the last committed update. Return False if it cannot be done."""
        past = {update.number: update for update in self._past}
        for turn in range(self._turns):
            repeated = [*range(self._progress.base(rank, turn), self.number)]
            if repeated and (
                self._versions != self._gradient_versions() or not all(number in past for number in repeated)
            ):
                return False
            self._repeat(backup, rank, turn, [past[number] for number in repeated])
        return True

    def _repeat(self, backup: Backup, rank: int, turn: int, updates: Sequence[_PastUpdate]) -> None:
        """Restore a portion, and repeat the updates since it was copied."""
        restored = backup.restore(rank, turn)
        if not any(update.happened for update in updates) or not restored:
            return
        shards = [each.portion.shard for each in restored]
        shapes = [
            each.values.shape if self._parameters[each.portion.shard.parameter].dim() else () for each in restored
        ]
        places = [each.values.view(shape) for each, shape in zip(restored, shapes, strict=True)]
        for number, update in enumerate(self._updates):
            own = {id(p) for group in update.optimizer.param_groups for p in group["params"]}
            chosen = [k for k, shard in enumerate(shards) if id(self._parameters[shard.parameter]) in own]
            sharded = ShardedOptimizer(
                update.optimizer, self._parameters, [shards[k] for k in chosen], [places[k] for k in chosen]
            )
            counts: list[tuple[Tensor, Tensor]] = []
            for k in chosen:
                for each in restored[k].state:
                    if each.update != number:
                        continue
                    memory = each.memory if each.is_like else each.copy.clone()
                    sharded.state[places[k]][each.key] = memory.view(shapes[k] if each.is_like else each.shape)
                    if not each.is_like and shards[k].start == 0:
                        counts.append((each.memory, memory))
            for past in updates:
                if past.happened:
                    rows = self._rows[past.number % self._turns]
                    gradients = [rows.vector(0, *shards[k]).view(shapes[k]) for k in chosen]
                    sharded.step(past.groups[number], gradients, past.used, past.found_inf)
            for memory, count in counts:
                memory.copy_(count)


def _copy_of(groups: Sequence[Mapping[str, Any]]) -> Groups:
    """Return the hyperparameters of groups; those that are tensors as copies."""
    return [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
        for group in groups
    ]


def _put_back(groups: Sequence[dict[str, Any]], former: Groups) -> None:
    """Give groups their former hyperparameters, and remove others; tensors keep their identity."""
    for group, values in zip(groups, former, strict=True):
        for key in group.keys() - values.keys() - {"params"}:
            del group[key]
        for key, value in values.items():
            present = group.get(key)
            if isinstance(present, Tensor) and isinstance(value, Tensor) and present.shape == value.shape:
                present.copy_(value)
            else:
                group[key] = value
