"""The methods of a Trainer that report on its run: this rank, the progress of the run, and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from unisono.job.user_function import refuse_inside
from unisono.rank_zero.image_folder import ImageFolder
from unisono.rank_zero.logged_values import Loggable, check_values, read_values
from unisono.trainer.divided_tables import DividedTables
from unisono.trainer.evaluation import tell_values
from unisono.trainer.recovery import Recovery
from unisono.trainer.run_context import RunContext
from unisono.trainer.shard_gathering import ShardGathering
from unisono.trainer.snapshot import Cursor, Subjects
from unisono.trainer.stage_gathering import StageGathering
from unisono.trainer.state_digests import digest_of
from unisono.trainer.worker_gathering import WorkerGathering
from unisono.watch import EventLog

__all__ = ["RunStatus"]


class RunStatus:
    """The methods of a Trainer that report on the run, and print and log."""

    _run: RunContext
    _cursor: Cursor
    _gathering: StageGathering | ShardGathering | WorkerGathering | DividedTables | None
    _compare: Callable[[str], None]
    _modules: Mapping[str, nn.Module]
    _subjects: Subjects
    _log: EventLog
    _images: ImageFolder
    _recovery: Recovery

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self._run.world.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._run.world.size

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes files and prints."""
        return self._run.world.rank == 0

    @property
    def virtual_ranks(self) -> int:
        """Number of fixed shares of every global batch."""
        return self._run.virtual_ranks

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return self._run.device

    @property
    def epoch(self) -> int:
        """The current epoch, or the next one between two epochs, from 0."""
        return self._cursor.epoch

    @property
    def steps_done(self) -> int:
        """Number of steps done since the start of the run, also those before a resume."""
        return self._cursor.total_steps

    @property
    def recovered(self) -> bool:
        """True if this process has taken the place of a rank that died, or has come later by `unisono scale`.

        The state of the run is as on the other ranks. What the script keeps elsewhere began anew in this process.
        """
        return self._recovery.position is not None

    def print(self, *values: object) -> None:
        """Print on rank 0, and do nothing on the others."""
        if self.is_main:
            print(*values, flush=True)

    def log(self, **values: Loggable) -> None:
        """Log numbers, texts and images of the loop as an event, at the current place in the run.

        They go to events.jsonl and to listeners, and numbers to the terminal. Every rank may call it, in the loop: only
        the values of rank 0 are logged, and other ranks check theirs. Rank 0 waits for a tensor on a GPU, and writes an
        image into the run's directory, as a PNG file of at most 1024 pixels on its longer side.

        Args:
            values: Numbers, tensors with one element, texts, or images as `unisono.Image(pixels)`, by name:
                trainer.log(temperature=0.5), or trainer.log(**{"encoder/norm": norm}). Of a text, 10,000 characters
                are kept.

        Raises:
            RuntimeError: It is called inside a loss function or an evaluated function.
            TypeError: No value is given, or one is neither a real number, a text nor an image.
            ValueError: A name is empty, too long or not printable, a tensor has several elements, or there is an image
                in a run without a directory.
        """
        refuse_inside("trainer.log")
        check_values("trainer.log", values, self._images)
        if self.is_main and self._log.hears("log"):
            fields = read_values(values, self._images, step=self._cursor.total_steps)
            if fields is not None:
                tell_values(self._log, fields, cursor=self._cursor)

    def _digest_divided(self, tables: DividedTables) -> str:
        self._compare("trainer.digest()")
        return tables.digest()

    def digest(self) -> str:
        """Return the SHA-256 of all parameters, buffers and optimizer state as 64 hex digits: the identity of a result.

        It is equal on all ranks, and any rank may call it alone. With `parallel`, call it after the loop over epochs,
        or before the first step; with shards, not before the loop of a run that goes on, whose ranks have parts alone.
        A model that was made by `unisono.parallel.build` stays in parts: compare the files of `export` instead. Where
        tables are divided over ranks (`Tables(..., divided=True)`), every rank must call it.

        Raises:
            UnisonoError: With `parallel`: this rank has the values of its own part alone.
            CheckpointError: A tensor has no plain memory, such as a sparse or quantized one.
            TypeError: The optimizer's state has a value other than a tensor, number, string or a container of these.
            ValueError: The optimizer has state for a parameter that belongs to no model.
        """
        if isinstance(self._gathering, DividedTables):
            refuse_inside("trainer.digest")
            return self._recovery.call("trainer.digest()", partial(self._digest_divided, self._gathering))
        if self._gathering is not None:
            self._gathering.check_whole("trainer.digest")
        return digest_of(self._modules, self._subjects.optimizers)
