"""The engine of a run with CPU ranks on one host: one copy of weights, gradients and optimizer state in shared memory.

A rank that has its gradients waits for the others, and then sums and updates its own part of all parameters. So nothing
is gathered, and the optimizer's work is divided among the ranks. A step has two barriers: one when all gradients are
there, one when all weights are written. With clipping, loss scaling or hooks of the user there are more between them:
one for the norm and the overflow, and one for hooks. The calls of a step from its first leaf to `prepare` are in
`shared_gradients`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.embedding.tables import lagging, serving_in
from unisono.engine.base import Trained
from unisono.engine.node_sums import drop
from unisono.engine.optimizer_hooks import is_hooked, refuse_changed_gradients, with_hooks
from unisono.engine.shared.engine_parts import check_movable, make_parts
from unisono.engine.shared.gradient_rows import GradientRows
from unisono.engine.shared.optimizer_update import OptimizerUpdate
from unisono.engine.shared.parameter_arena import SharedParameters
from unisono.engine.shared.shared_consistency import SharedConsistencyCheck
from unisono.engine.shared.shared_gradients import SharedGradients
from unisono.engine.shared.shared_runtime import SharedRuntime
from unisono.engine.shared.step_metadata import note
from unisono.engine.shared.table_division import TableDivision
from unisono.engine.shared.table_servers import TableServers
from unisono.engine.shared.update_protection import UpdateProtection
from unisono.engine.sparse_tables import check_optimizers, split_sparse
from unisono.engine.step_transaction import Passed, StepTransaction
from unisono.errors import PeerError, UnisonoError
from unisono.machine import give_memory_back

__all__ = ["SharedEngine"]

_UNSETTLED = 4
"""A column of the runtime's words, after those of the consistency check."""


class SharedEngine(SharedGradients):
    """Sums and applies gradients in shared memory.

    With `protect`, the survivors of a rank's death can put back the state from before the step; see `repair`.
    """

    divides_update, copies_weights, sends_early = True, False, False

    def __init__(
        self,
        optimizer: Optimizer,
        modules: Sequence[nn.Module],
        runtime: SharedRuntime,
        weights: SharedParameters,
        comparison: SharedConsistencyCheck,
        *,
        virtual_ranks: int,
        overlap: bool = True,
        protect: bool = False,
    ) -> None:
        super().__init__(optimizer, modules, runtime, comparison, virtual_ranks=virtual_ranks, overlap=overlap)
        self._weights, self._protects = weights, protect
        self._protection: UpdateProtection | None = None
        """None without `protect`, and before the first step."""
        self._servers: TableServers | None = None
        """None if ranks update all tables themselves, and before the first step."""
        self._addresses: list[int] = []
        # `_build` sets all of these.
        self._row_sets: Sequence[GradientRows[Any]]
        self._gradients: list[list[Tensor]]
        self._division: TableDivision
        self._updates: list[OptimizerUpdate]

    def start(self, step: StepTransaction, trained: Trained, *, leaves: int) -> None:
        """Begin a step; see `Engine`."""
        if self._runtime.loss is not None:
            raise self._runtime.loss
        if (reason := self._runtime.abort_reason) is not None:
            raise UnisonoError(
                f"an earlier step broke off: {reason}. Ranks no longer agree on what comes next: end the "
                "job and start it again; it resumes from the last checkpoint."
            )
        drop(trained.parameters)
        self._arrived = self._released = self._prepared = False
        self._comparison.enter()
        self._weights.check()
        if self._is_new(trained):
            # Ranks that do not come here are at the barrier of a step or of another call, and compare there instead.
            self._comparison.begin(step, anew=True)
            self._comparison.check("waiting for all ranks to begin the step", step)
            self._build(step, trained)
        if self._tables.exist:  # otherwise nothing can have become wrong since `_build`
            check_optimizers(self._optimizer, self._trained, self._tables.tables)
        layout = self._layouts.of(leaves)
        # With two sets of rows, those of the last step are not touched until all ranks have arrived at the end of this.
        turn = self._steps
        if self._protection is not None:
            self._protection.attempt(self._comparison.attempt)
            if self._is_large:
                turn = self._protection.number
        self._rows = self._row_sets[turn % len(self._row_sets)]
        self._rows.start(layout, self._comparison.attempt)
        if self._servers is not None:
            self._servers.begin()
        self._begin(step, layout)

    def update(self, scaler: torch.amp.GradScaler | None) -> None:
        """Update this rank's part, and wait for the others; see `Engine`."""
        try:
            if self._overflowed(scaler):
                if self._protection is not None:
                    self._protection.leave_out()
                self._end_update("leaving out a step whose gradient overflowed")
                if self._protection is not None:
                    self._protection.commit()
                self._show_gradients()
            else:
                run, runs_hooks = self._apply, is_hooked(*self._optimizers)
                for optimizer in reversed(self._optimizers):
                    optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers look for
                    if runs_hooks:
                        run = with_hooks(optimizer, run)
                with refuse_changed_gradients(self._optimizers, self._trained):
                    run()
            self._step.run_deferred()
        except BaseException as error:
            if self._protection is not None:
                self._protection.give_up()
            self._runtime.abort(f"rank {self._runtime.rank} failed while weights were written: {error!r}")
            raise

    def close(self) -> None:
        """Release the parameters, and the servers of tables; see `Engine`."""
        super().close()
        self._leave_servers()

    def abort(self, *, alike: bool) -> bool:
        """Discard the step; see `Engine`. It may wait at a barrier, or make the other ranks raise."""
        self._streaming = False
        if self._protection is not None:
            self._protection.give_up()
        drop(self._given.parameters)
        self._rows.forget()
        if not self._arrived:
            return True
        if alike and not self._is_open:
            with contextlib.suppress(UnisonoError):  # the error under way says more
                self._runtime.barrier("leaving a step that failed", self._step)
            return True
        self._runtime.abort(f"rank {self._runtime.rank} broke off in the middle of a step")
        return False

    def repair(self, dead: Collection[int]) -> bool:
        """Put back weights and optimizer state from before the step that an error has ended, after ranks have died.

        A step is committed once all ranks have ended its update; `update` then returns on all survivors, also where it
        notices a death, and the error comes in the next step. So either all survivors undo a step, or none.

        Every survivor must call this function, after its own step has ended: each puts back its own part, and the
        first of them those of dead ranks, too. Parameters and `optimizer.state` may be read once it has returned on
        all survivors. This engine then makes no further step. If another rank dies before that, the remaining ones
        must call it again.

        Args:
            dead: All ranks that have died.

        Returns:
            True if the state is the one from before the step. The run can go on only if this is so on all survivors;
            otherwise all ranks have to start from a checkpoint. It is False if a rank died in an update that cannot be
            undone: with sparse tables, or with hooks of the user on an optimizer; and always without `protect`.
        """
        if not self._protects:
            return False
        drop(self._given.parameters)
        if self._servers is not None:
            self._servers.settle()
        if self._protection is None:
            return True
        if not self._protection.repair(dead, is_hooked=is_hooked(*self._optimizers)):
            return False
        self._division.take_back()
        return True

    def _is_new(self, trained: Trained) -> bool:
        """Return True if these parameters, or their addresses, are not those of the last `_build`."""
        given = self._given
        if trained is not given:
            # In the meantime a step for other parameters may have been refused because ranks differed.
            if len(trained.parameters) != len(given.parameters) or not all(
                map(is_, trained.parameters, given.parameters)
            ):
                return True
            self._given = trained
        return [p.data_ptr() for p in trained.parameters] != self._addresses

    def _build(self, step: StepTransaction, trained: Trained) -> None:
        """Move the parameters to shared memory if they are not there, and divide the work. Every rank must call it."""
        self._unhook()
        self._leave_servers()
        optimizer, runtime = self._optimizer, self._runtime
        dense, tables = split_sparse(trained, self._modules)
        check_optimizers(optimizer, dense, tables)
        check_movable(runtime, trained, self._modules)
        serving = serving_in(self._modules) if tables.names else None
        runtime.keeps_descriptors = serving is not None
        self._weights.move(step, trained, lagging(self._modules) if tables.names else ())
        self._given, self._addresses = trained, [p.data_ptr() for p in trained.parameters]
        self._trained = dense
        parts = make_parts(
            runtime,
            self._weights,
            optimizer,
            dense=dense,
            tables=tables,
            serving=serving,
            widest=self._layouts.widest,
            protects=self._protects,
        )
        work, self._is_whole, self._table = parts.work, parts.is_whole, parts.metadata
        self._tables, self._division, self._servers = parts.tables, parts.division, parts.servers
        self._updates, self._protection = parts.updates, parts.protection
        self._is_large, self._row_sets, self._gradients = work.is_large, work.row_sets, work.gradients
        self._rows = self._row_sets[0]
        if self._streams and work.is_large:
            self._hook()
        give_memory_back()

    def _overflowed(self, scaler: torch.amp.GradScaler | None) -> bool:
        """Report to the scaler whether gradients overflowed. Return True if the step is skipped because of it."""
        if scaler is None:
            return False
        assert self._found_inf is not None
        note(scaler, self._found_inf)
        return bool(self._found_inf.item()) and not getattr(self._optimizer, "_step_supports_amp_scaling", False)

    def _apply(self) -> None:
        """Perform the `step` of all optimizers, on all ranks together."""
        runtime, used = self._runtime, self._used_by_all
        if not self._prepared:
            self._rows.reduce(used, self._factor)
        gradients: Sequence[Tensor | None] = self._gradients[self._row_sets.index(self._rows)]
        adopted = [update.adopt() for update in self._updates]
        written: Sequence[Tensor | None] = ()
        if self._tables.exist:
            of_tables, written = self._table_gradients()
            gradients = [*gradients, *of_tables]
            used = [*used, *self._tables.used]
        found_inf = self._found_inf if getattr(self._optimizer, "_step_supports_amp_scaling", False) else None
        protection = self._protection
        if protection is not None:
            if written:
                protection.copy_tables(written, self._tables.entries, self._step)
            protection.begin(used, found_inf)
        self._division.write_new_rows(self._updates)
        unsettled = any(adopted)
        for update in self._updates:
            unsettled |= update.perform(gradients, used, found_inf)
        if protection is not None:
            protection.end(unsettled=unsettled)
        runtime.publish(_UNSETTLED, int(unsettled))
        passed = self._end_update("waiting for the weights")
        if passed is not None and any(runtime.published(_UNSETTLED, passed)):
            self._settle_state()
        if protection is not None:
            protection.commit()
        self._division.commit()
        if self._servers is not None:
            self._servers.release(self._step)
        for update in self._updates:
            update.state.show_numbers(update.optimizer)
        self._weights.remember()

    def _leave_servers(self) -> None:
        servers, self._servers = self._servers, None
        if servers is not None:
            servers.close()

    def _table_gradients(self) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
        """Return the gradients of the table rows that this rank updates, and of those that it writes in any way."""
        gradients = self._division.gradients(self._tables, self._updates, self._factor)
        if self._servers is None:
            return gradients, gradients
        return self._servers.stage(gradients, self._tables.used, self._tables.entries)

    def _settle_state(self) -> None:
        """Move new state of the optimizers to shared memory, on all ranks together."""
        for update in self._updates:
            update.state.settle(update.optimizer)
        if self._protection is not None:
            self._protection.settle()
        self._end_update("waiting for the optimizer's state")
        for update in self._updates:
            update.state.keep()

    def _end_update(self, what: str) -> Passed | None:
        """Wait for all ranks at the end of an update. Return the barrier, or None if it broke after all ranks' ends."""
        try:
            return self._runtime.barrier(what, self._step, meanwhile=self._show_gradients)
        except PeerError as error:
            if self._protection is None:
                raise
            with self._runtime.observed():
                is_committed = self._protection.wait_until_committed()
            if not is_committed:
                raise
            self._runtime.loss = error
            return None
