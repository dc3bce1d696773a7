"""Checkpoints of a divided run that all ranks write, each its own part, so that none needs the whole.

At a save, ranks tell each other what they have (`divided_parts`, `stage_parts`) and copy their parts. From then on they
talk by files in the folder of the checkpoint (`state.part_writing`), so threads can write while training uses the
collectives. Rank 0 completes it. Start reading at `PartSaving.prepare`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

from torch import Tensor

from unisono.collectives.world import World
from unisono.errors import CheckpointError
from unisono.state.checkpoint_store import CheckpointInfo, CheckpointStore
from unisono.state.checkpoint_work import CheckpointWork
from unisono.state.codec import Json, to_json
from unisono.state.digest import copy_each
from unisono.state.increments import BaseFile
from unisono.state.manifest import SUFFIX
from unisono.state.part_plan import Claim, PartPlan
from unisono.state.part_writing import FileRange, PartsError, PartWriter, is_begun_by

__all__ = ["OptimizerStates", "OwnPart", "PartContents", "PartPlace", "PartSaving", "completion", "fail"]

OptimizerStates = Mapping[str, dict[str, dict[str, Any]]]
"""The state of optimizers by the name of the optimizer, that of the parameter and key."""


class PartPlace(NamedTuple):
    """A checkpoint that ranks write."""

    folder: Path
    """The folder in which they write."""
    ranks: Sequence[int]
    """Those that write."""
    bases: Mapping[str, BaseFile] | None
    """On rank 0, by group, files that are in the folder, of which changed rows may be stored. None on all ranks: none
    are stored."""


class PartContents(Protocol):
    """The groups of a checkpoint of which ranks have parts."""

    plans: dict[str, PartPlan]
    """By group, who writes what."""
    values: dict[str, dict[Claim, Tensor]]
    """By group, copies of what this rank writes."""

    @property
    def increments(self) -> Mapping[str, dict[str, Json]] | None:
        """See `CheckpointStore.write_parts`."""
        ...

    @property
    def optimizers(self) -> OptimizerStates:
        """The state of the optimizers, with tensors on the meta device for what ranks have parts of."""
        ...


class _Divided(Protocol):
    """A run that is divided."""

    def describe(self) -> Any:
        """Return what this rank has, without values, for the others."""
        ...

    def contents(self, tables: list[Any], place: PartPlace) -> PartContents:
        """Return what is written, from what each rank has described. Every rank must call it.

        Raises:
            PartsError: On all ranks, if that cannot be brought to those that write.
        """
        ...


class OwnPart(NamedTuple):
    """The part of a checkpoint that this rank writes. The values are copies."""

    writer: PartWriter
    plans: dict[str, PartPlan]
    """By group, who writes what."""
    ranges: list[FileRange]
    optimizers: OptimizerStates
    """See `PartContents.optimizers`."""
    ranks: Sequence[int] | None = None
    """Those that write. None: all."""
    increments: Mapping[str, dict[str, Json]] | None = None
    """See `PartContents.increments`."""

    def write(self) -> None:
        """Write it, and leave a report for rank 0."""
        self.writer.write(self.ranges, {group + SUFFIX: plan.layout for group, plan in self.plans.items()})


class PartSaving:
    """Prepares and writes this rank's parts of checkpoints.

    Args:
        world: The ranks.
        divided: Has this rank's part of the run.
        always: True if rank 0 writes alone what the others bring to it, where ranks do not share the folder.
    """

    def __init__(self, world: World, divided: _Divided, *, always: bool = False) -> None:
        self._world, self._divided, self._always = world, divided, always
        self._thread: threading.Thread | None = None

    def prepare(self, folder: Path, bases: Mapping[str, BaseFile] | None = None) -> OwnPart | None:
        """Copy this rank's part of the present state; None if it writes nothing, since not all ranks can.

        Every rank must call it, while the run is divided. Memory: the part. Traffic: descriptions of the tensors.

        Args:
            folder: The folder of the checkpoint, which rank 0 has begun.
            bases: See `PartPlace`.

        Raises:
            CheckpointError: A tensor cannot be stored.
            PartsError: On all ranks, see `contents`.
        """
        world = self._world
        with ExitStack() as undone:
            writer: PartWriter | None = None
            with suppress(OSError):  # this rank has no such folder, or no right to write there
                writer = PartWriter(folder, world.rank)
                undone.callback(writer.close)
            everyone = world.gather((writer is not None, self._divided.describe()), "a checkpoint in parts")
            # A folder of the same name on another host would do, but for the files that rank 0 must find there.
            is_shared = world.broadcast_bytes(lambda: b"1" if is_begun_by(folder, world.size) else b"0") == b"1"
            if not is_shared and not self._always:
                return None
            if not everyone[0][0]:
                raise PartsError(f"rank 0 cannot write to {folder}, which it has made")
            ranks = [*range(world.size)] if is_shared else [0]
            contents = self._divided.contents([table for _, table in everyone], PartPlace(folder, ranks, bases))
            if writer is None or world.rank not in ranks:
                return None
            undone.pop_all()
        ranges: list[FileRange] = []
        for group, plan in contents.plans.items():
            values = contents.values[group]
            if world.rank == 0:
                ranges.append(FileRange(group + SUFFIX, 0, plan.layout.header))
            starts = plan.starts[world.rank]
            ranges += [FileRange(group + SUFFIX, at, values[claim]) for claim, at in starts.items()]
        return OwnPart(writer, contents.plans, ranges, contents.optimizers, ranks, contents.increments)

    @property
    def always(self) -> bool:
        """True if ranks can always save so."""
        return self._always

    def start(self, part: OwnPart) -> None:
        """Write a part in the background. The program's end waits for it."""
        self.join()
        self._thread = threading.Thread(target=part.write, name="part of a checkpoint")
        self._thread.start()

    def join(self) -> None:
        """Wait until this rank writes nothing."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def completion(
    store: CheckpointStore,
    work: CheckpointWork,
    part: OwnPart,
    capture: Callable[[OptimizerStates], tuple[dict[str, dict[str, Tensor]], dict[str, Any]]],
    *,
    then: Callable[[], None] = lambda: None,
    gives_up: Callable[[bool], str] = lambda _is_begun: "",
) -> Callable[[], CheckpointInfo]:
    """Return the function that writes the part of rank 0, waits for the others and completes the checkpoint.

    Args:
        store: The checkpoints of the run.
        work: The one that is written. It is closed if this raises.
        part: What rank 0 writes.
        capture: Returns the state of the run, given that of the optimizers. What is in no part is copied.
        then: Called before this returns.
        gives_up: See `CheckpointStore.write_parts`.
    """
    try:
        groups, document = capture(part.optimizers)
        own = {name: copy_each(group, {}, f"{name}.") for name, group in groups.items() if name not in part.plans}
        plain = json.loads(to_json(document))  # the caller's lists may change while a thread works
        then()
    except BaseException:
        part.writer.close()
        work.close()
        raise
    return partial(
        store.write_parts,
        work,
        part.writer,
        part.ranges,
        plans=part.plans,
        groups=own,
        document=plain,
        ranks=part.ranks,
        gives_up=gives_up,
        increments=part.increments,
    )


def fail(error: CheckpointError) -> NoReturn:
    """Raise the error by which a checkpoint could not be begun, where others are raised: in the writer's thread."""
    raise error
