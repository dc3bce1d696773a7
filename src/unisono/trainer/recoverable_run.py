"""The run of a Trainer as its recovery uses it: its place, its state, and the process group that it depends on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from typing import Any, TypeVar

import torch

from unisono.collectives.world import World
from unisono.engine.consistency import NoConsistencyCheck
from unisono.job.current import active_job
from unisono.recovery_link import Membership
from unisono.state.tensor_groups import TensorGroups, broadcast_groups
from unisono.trainer.call_log import CallLog
from unisono.trainer.evaluation_history import EvaluationHistory
from unisono.trainer.event_log import announce_to_listeners
from unisono.trainer.hyperparameters import Hyperparameters, SettingsReader, put_settings
from unisono.trainer.loader_cache import LoaderCache
from unisono.trainer.loop import Loop
from unisono.trainer.rank_positions import Position
from unisono.trainer.snapshot import Cursor, facts_of
from unisono.trainer.table_optimizers import tensors_in_files
from unisono.trainer.trainer_parts import TrainerParts
from unisono.watch import EventLog

__all__ = ["RecoverableRun"]

T = TypeVar("T")

_FIXED_SIZE = (
    "a model is cut over its ranks, and their number decides which one has what: start the job again from a checkpoint "
    "with another number"
)
_FIXED_ROWS = (
    "an embedding table is divided over its ranks, and their number decides which one has which rows: start the job "
    "again from a checkpoint with another number"
)


class RecoverableRun:
    """See `recoverable.Recoverable`.

    Args:
        parts: The parts of the Trainer.
        loop: Its loop.
        loaders: Its loaders.
        log: Gets an event for each recovery.
    """

    def __init__(self, parts: TrainerParts, loop: Loop, loaders: LoaderCache, log: EventLog) -> None:
        self._parts, self._loop, self._loaders, self._log = parts, loop, loaders, log
        self.cursor = parts.cursor
        """The progress of the run."""
        self._reader = SettingsReader(parts.subjects.optimizers, parts.subjects.others)
        self._settings: Hyperparameters | None = None
        """When the latest call ended."""

    @property
    def world(self) -> World:
        """The ranks."""
        return self._parts.run.world

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return self._parts.run.device

    @property
    def virtual_ranks(self) -> int:
        """The largest number of ranks."""
        return self._parts.run.virtual_ranks

    @property
    def gpus(self) -> int:
        """The number of GPUs if each rank needs one, as with NCCL; otherwise 0."""
        if self.device.type != "cuda":
            return 0
        active, seen = active_job(), torch.cuda.device_count()
        if active is not None and "nccl" not in active.job.backend:
            return 0
        return seen if seen >= self.world.size else 0  # otherwise each rank sees some of them alone

    @property
    def fixed_size(self) -> str:
        """Why the number of ranks cannot change; "" if it can."""
        if self._parts.run.exchange is not None:
            return _FIXED_ROWS
        return "" if self._parts.settings.parallel is None else _FIXED_SIZE

    def position(self, log: CallLog, name: str, *, resizes: bool) -> Position:
        """Return the place of this rank, in the call of this name."""
        loop, parts = self._loop, self._parts
        cursor, evaluations = (parts.cursor, len(loop.history)) if log.is_outside else loop.asked
        return Position(
            log=log,
            name=name,
            cursor=cursor,
            evaluations=loop.history.state(evaluations),
            settings=self._settings,
            began=loop.began,
            saved=parts.keeper.last,
            told=self._log.recent,
            resizes=resizes,
            divides=parts.run.exchange is not None,
            shift=0 if parts.run.exchange is None else parts.run.exchange.shift,
        )

    def undo(self) -> str | None:
        """Restore the state from before the call under way; return why that is not possible, if it is not."""
        steps = self._loop.steps
        if steps.batch is not None and steps.batch.versions() != steps.versions:
            return "the loss function writes to the tensors of its batch, so the step cannot be computed again"
        return self._parts.state.obstacle()

    def repair(self, dead: Collection[int]) -> str | None:
        """Put back what dead ranks were writing; return why that is not possible, if it is not."""
        return self._parts.state.repair(dead)

    def disconnect(self) -> None:
        """Release the process group."""
        self._parts.state.disconnect()

    def alone(self, call: Callable[[], T]) -> T:
        """Return the result of a call that this rank makes for itself; see `recoverable.Recoverable`."""
        self._parts.state.engines.comparison = NoConsistencyCheck()  # until `connect` makes other engines
        return call()

    def connect(self) -> None:
        """Make engines for the process group that there is now. Every rank must call it."""
        self._parts.state.connect(World.connect(self._parts.run.device))
        self._parts.keeper.meet()
        self._loaders.forget()

    def note_call(self) -> None:
        """Note the numbers that control the run. About 1 µs, and 3 µs for each scheduler."""
        self._settings = self._reader.read()

    def send_state(self, source: int, position: Position, *, wanted: bool, is_late: bool) -> None:
        """Send the state of one rank to those that want it; see `recoverable.Recoverable`."""
        subjects = self._parts.subjects
        apart = tensors_in_files(subjects.modules, subjects.optimizers)
        document, groups = broadcast_groups(self.world, self._capture, source=source, wanted=wanted, apart=apart)
        self._parts.state.heed(document["state"])
        if wanted:
            self._take(document, groups, source, position, is_late=is_late)
        else:
            self._loop.go_on()
        self._parts.state.complete()

    def _take(
        self, document: Mapping[str, Any], groups: TensorGroups, source: int, position: Position, *, is_late: bool
    ) -> None:
        """Take over the state of another rank."""
        subjects = self._parts.subjects
        own = {
            name: (each, deepcopy(each.state_dict()))
            for name, each in subjects.others.items()
            if is_late and name.startswith("stateful/")
        }
        self._parts.state.restore(groups, document["state"], source=f"the state of rank {source}")
        self._restore_modes(document["modes"], document["trained"])
        if is_late:
            for each, state in own.values():
                each.load_state_dict(state)
            assert position.settings is not None, "it has made the call"
            put_settings(position.settings, subjects.optimizers, subjects.others)
            self._loop.optimizers.forget()
            self._loop.go_on()
        else:
            facts = document["state"]["facts"]
            self._loop.history.become(EvaluationHistory.restored(facts["evaluations"]))
            self._loop.go_on(cursor=Cursor(**facts["cursor"]), calls=document["calls"])

    def has_joined(
        self, membership: Membership, before: int, seconds: float, position: Position, *, took: bool
    ) -> None:
        """Go on after a recovery; see `recoverable.Recoverable`."""
        cursor, log = self._parts.cursor, self._log
        if log.is_muted:
            log.is_muted = False
            announce_to_listeners(log, self._parts)
        if took:
            log.go_on(position.told)
        number, ranks, size = membership[:3]
        place = {"epoch": cursor.epoch, "step": cursor.step, "total_steps": cursor.total_steps}
        if size != before:
            log.emit("resize", number=number, ranks=size, before=before, **place, seconds=round(seconds, 3))
        if replaced := [rank for rank in ranks if rank < before]:
            log.emit("recovery", number=number, ranks=replaced, **place, seconds=round(seconds, 3), call=position.name)

    def raise_pending(self) -> None:
        """Raise the exception of a signal that was put off."""
        self._loop.raise_pending()

    def _capture(self) -> tuple[dict[str, Any], TensorGroups]:
        parts, loop = self._parts, self._loop
        constants = {"seed": parts.run.seed, "virtual_ranks": parts.run.virtual_ranks}
        facts = {**facts_of(constants, parts.cursor), "evaluations": loop.history.state()}
        groups, state = parts.state.capture(facts)
        modes = {prefix: [m.training for m in root.modules()] for prefix, root in parts.modules.items()}
        trained = {prefix: [p.requires_grad for p in root.parameters()] for prefix, root in parts.modules.items()}
        return {"state": state, "modes": modes, "trained": trained, "calls": loop.steps.calls}, groups

    def _restore_modes(self, modes: dict[str, list[bool]], trained: dict[str, list[bool]]) -> None:
        """Set what the loop may have changed on the other ranks: modes of modules, and what is frozen."""
        for prefix, root in self._parts.modules.items():
            for module, training in zip(root.modules(), modes[prefix], strict=True):
                module.training = training
            for p, requires_grad in zip(root.parameters(), trained[prefix], strict=True):
                p.requires_grad_(requires_grad)
