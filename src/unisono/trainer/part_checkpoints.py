"""Checkpoints of which each rank writes its part: they are begun by rank 0, prepared by all, and written in threads.

These are methods of `Checkpointing`; what the ranks of a divided run have is the business of `part_saving`. Start
reading at `PartCheckpoints.save_parts`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from unisono.collectives.rank_errors import raised_on_all
from unisono.collectives.world import World
from unisono.errors import CheckpointError
from unisono.state.checkpoint_store import CheckpointInfo
from unisono.state.checkpoint_work import CheckpointWork
from unisono.state.increments import BaseFile
from unisono.state.part_writing import PartsError
from unisono.state.policy import Checkpoints
from unisono.trainer.checkpoint_events import CheckpointEvents
from unisono.trainer.checkpoint_writer import CheckpointWriter
from unisono.trainer.host_parts import HostParts
from unisono.trainer.part_saving import OptimizerStates, OwnPart, PartSaving, completion, fail
from unisono.trainer.run_directory import RunDirectory
from unisono.trainer.save_rule import Place, SaveRule

__all__ = ["PartCheckpoints"]


class _BegunParts(NamedTuple):
    """A checkpoint that ranks write."""

    folder: Path
    """Where they write."""
    work: CheckpointWork | None
    """The folder, on rank 0."""
    bases: Mapping[str, BaseFile] | None
    """See `PartPlace`."""


class PartCheckpoints(ABC):
    """The methods of `Checkpointing` that write checkpoints in parts."""

    _policy: Checkpoints
    _world: World
    _rule: SaveRule
    _directory: RunDirectory | None
    _writer: CheckpointWriter | None
    _events: CheckpointEvents
    hosts: HostParts

    @abstractmethod
    def hold(self) -> None:
        """Lock the directory again, on the rank that writes."""

    def save_parts(
        self,
        place: Place,
        capture: Callable[[OptimizerStates], tuple[dict[str, dict[str, Tensor]], dict[str, Any]]],
        saving: PartSaving,
        *,
        tag: str | None = None,
    ) -> bool:
        """Let each rank write its part of a checkpoint: in the background or, with a tag, until it is on the disk.

        Every rank must call it. A disk that fails is a warning at the next save, as with `save`.

        Args:
            place: The place of the run.
            capture: Returns the state of the run, given that of the optimizers, on rank 0.
            saving: Has this rank's part.
            tag: See `save_tag`.

        Returns:
            False on all ranks if they do not share the directory: nothing is written then.

        Raises:
            BaseException: On rank 0, see `save`; the others raise PeerError.
            CheckpointError: With a tag, on all ranks, if it cannot be written.
        """
        assert self._directory is not None
        saving.join()
        # Other divided runs write their files whole.
        begun = self._begin_parts(place, tag, has_increments=saving.always and bool(self._policy.incremental))
        if begun is not None:
            part: OwnPart | None = None
            try:
                part = saving.prepare(begun.folder, begun.bases)
            except PartsError as error:
                if tag is not None:
                    raise
                self._fail_to_write(place, error)
            else:
                if part is None and not saving.always:
                    return False
            finally:
                if part is None and begun.work is not None:
                    begun.work.close()
            complete: Callable[[], CheckpointInfo] | None = None
            if part is not None and begun.work is not None:
                assert self._writer is not None
                then = partial(self._writer.best.writing, place[2]) if tag is None else lambda: None
                gives_up = self.hosts.patience()
                complete = completion(self._directory.store, begun.work, part, capture, then=then, gives_up=gives_up)
            if tag is not None:
                self._write_tagged(part, complete)
                return True
            if complete is not None:
                assert self._writer is not None
                self._writer.start(place[2], complete)
            elif part is not None:
                saving.start(part)
        self._rule.begin(place)
        return True

    def _begin_parts(self, place: Place, tag: str | None, *, has_increments: bool) -> _BegunParts | None:
        """Begin a checkpoint that ranks write; None on all of them if that fails, which is told at the next save."""
        assert self._directory is not None
        store = self._directory.store
        work: CheckpointWork | None = None

        def begin() -> bytes:
            nonlocal work
            if tag is None:
                self._events.raise_for_listener()
            self.hold()
            assert self._writer is not None
            if tag is None and (earlier := self._writer.wait()) is not None:
                self._events.warn(f"checkpoint not written: {earlier}")
            self._writer.join()
            try:
                work = store.begin_parts(place[2], tag=tag)
            except CheckpointError as error:
                if tag is not None:
                    raise
                self._fail_to_write(place, error)
                return b""
            return str(work.path.absolute()).encode()

        folder = self._world.broadcast_bytes(begin)
        if not folder:
            return None
        bases: Mapping[str, BaseFile] | None = None
        if tag is None and has_increments:
            bases = {} if work is None else store.link_bases(work)
        return _BegunParts(Path(folder.decode()), work, bases)

    def _write_tagged(self, part: OwnPart | None, complete: Callable[[], CheckpointInfo] | None) -> None:
        """Write this rank's part of a checkpoint with a tag, and wait on all ranks until it is on the disk."""
        with raised_on_all(self._world, "trainer.save(tag=...)"):
            started_s = time.monotonic()
            if complete is not None:
                with self.hosts.awaited():
                    self._events.tell(complete(), time.monotonic() - started_s)
            elif part is not None:
                part.write()

    def _fail_to_write(self, place: Place, error: CheckpointError) -> None:
        """Note on rank 0 that a checkpoint cannot be written."""
        if self._writer is not None:
            self._writer.start(place[2], partial(fail, error))
