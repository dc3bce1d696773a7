"""The methods of a Trainer that save and load: checkpoints, weights alone, and the history of evaluations.

These are methods of `Trainer`; the work is done in `checkpointing`, `weight_loading` and `state.weight_files`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from unisono.arguments import choice, flag, real, text, whole
from unisono.collectives.rank_errors import raised_on_all
from unisono.engine.model_contents import plain_name
from unisono.errors import CheckpointError
from unisono.job.user_function import refuse_inside
from unisono.state.policy import check_tag
from unisono.state.weight_files import SUFFIXES, write_weights
from unisono.text import a_type
from unisono.trainer.divided_tables import DividedTables
from unisono.trainer.evaluation_history import evaluations_since_improvement
from unisono.trainer.loop import Loop
from unisono.trainer.recovery import Recovery
from unisono.trainer.shard_gathering import ShardGathering
from unisono.trainer.snapshot import extra_state, model_tensors
from unisono.trainer.trainer_parts import TrainerParts
from unisono.trainer.weight_loading import LoadedWeights, Source, load_weights, read_source
from unisono.watch import EventLog

__all__ = ["Storage"]

_BEST = "best"
"""The path that stands for the best checkpoint of the run."""


class Storage:
    """The methods of a Trainer that write and read files, and that use the history of evaluations."""

    directory: Path | None
    _parts: TrainerParts
    _loop: Loop
    _recovery: Recovery
    _log: EventLog
    _compare: Callable[[str], None]
    _unknown_metrics: set[str]
    """Metrics of `stalled` that no evaluation had reported, for which a warning was emitted."""

    def save(self, tag: str | None = None) -> None:
        """Save a checkpoint now; without a directory, do nothing.

        Call it on every rank, after the last step of a batch. Changes that the loop makes after it and before the next
        batch are not in the checkpoint. Without a tag it is written in the background: rank 0 waits for an earlier
        write and copies the state to CPU memory, and a write that fails is an event "warning" at the next save; the end
        of a loop over `epochs` tries once more.

        Args:
            tag: A name of up to 100 letters, digits and "_.+=-". The checkpoint is then kept as the folder
                checkpoints/tag-NAME until you delete it, beside those that `Checkpoints` counts; one with the same tag
                is replaced. All ranks return when it is on disk. A run is not resumed from it.

        Raises:
            RuntimeError: It is called inside a loss function or an evaluated function.
            TypeError: tag is not a string.
            ValueError: tag is not such a name. Without a tag, on rank 0: an optimizer has a parameter that belongs to
                no model.
            CheckpointError: An object's state or a tensor cannot be stored, another job or a later Trainer of this
                process uses the directory, or that is gone; with a tag also if the disk fails. With a tag on all ranks,
                otherwise on rank 0.
            RankMismatchError: With a tag, on all ranks, if they make different calls.
        """
        refuse_inside("trainer.save")
        if tag is not None:
            tag = check_tag(tag)
            self._recovery.call(f"trainer.save(tag={tag!r})", partial(self._save_tagged, tag))
        else:
            self._recovery.call("trainer.save()", self._loop.save)

    def _save_tagged(self, tag: str) -> None:
        self._compare(f"trainer.save(tag={tag!r})")
        self._loop.save(tag)

    def load(
        self, path: str | os.PathLike[str], *, strict: bool = True, ema: bool = False, key: str | None = None
    ) -> LoadedWeights:
        """Replace the weights of the models by those in a checkpoint or a file; nothing else of the run changes.

        Every rank must call it, between two steps. Rank 0 reads and sends, so only it needs the file. Everything is
        compared before a weight is changed. Weights are parameters and persistent buffers; values are converted to the
        model's dtype. With ema_decay, the averaged weights become those of the checkpoint, or the loaded weights if
        it has none.

        To start from pretrained weights in a run with a directory, load before the first step only:
        `if not trainer.steps_done: trainer.load(...)`. A resumed run has weights already.

        Args:
            path: "best" is this run's best checkpoint (see `Checkpoints`). Otherwise the directory of a run, whose
                newest good checkpoint is read; one of its checkpoints; a safetensors file; or a file of torch.save with
                a state_dict, which is read without executing code. With several models, names begin with their key, as
                in generator.weight; a file of torch.save may have a dict for each key instead. The prefixes of DDP and
                torch.compile are removed.
            strict: Refuse a file that does not have exactly the names of the models. Shapes must always be equal.
            ema: Load the averaged weights of a checkpoint.
            key: The entry of a torch.save file that has the weights. None: it has nothing else.

        Returns:
            A named tuple of `source`, the path that was read, `missing_keys` and `unexpected_keys`.

        Raises:
            RuntimeError: It is called inside a loss function or an evaluated function.
            TypeError: An argument has the wrong type.
            ValueError: path is empty; or the run was resumed, no loop has continued it yet, and path is not in its
                directory.
            CheckpointError: On all ranks, if there is nothing to read, it is damaged or holds more than weights, or
                names or shapes are not those of the models. Nothing has been changed.
            RankMismatchError: On all ranks, if they make different calls.
            PeerError: Another rank of the host has died, failed in a step, or does not come in time.
        """
        refuse_inside("trainer.load")
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path={path!r} must be the path of a checkpoint or a file, and is {a_type(path)}")
        if not os.fspath(path):
            raise ValueError('path="" must be the path of a checkpoint or a file, or "best"')
        flag("strict", strict)
        flag("ema", ema)
        if key is not None:
            text("key", key)
        where = Path(os.fspath(path))
        self._refuse_to_overwrite(path, where)
        call = f"trainer.load({str(path)!r}, strict={strict}, ema={ema}, key={key!r})"
        parts = self._parts

        gathering, is_divided = parts.gathering, False
        tables = gathering if isinstance(gathering, DividedTables) else None

        def read() -> Source | None:
            parts.keeper.settle()
            if path != _BEST:
                return read_source(where, ema=ema, key=key, one_by_one=is_divided)
            if parts.keeper.best is None:
                raise CheckpointError('load("best") needs a run with a directory and Checkpoints(best=...)')
            if parts.keeper.best.needs_checkpoint(parts.cursor.total_steps) and not ema:
                return None  # the present weights are the best ones, and will be saved
            return read_source(parts.keeper.best.path(), ema=ema, key=key, one_by_one=is_divided)

        def load() -> LoadedWeights:
            nonlocal is_divided
            self._compare(call)
            if (isinstance(gathering, ShardGathering) and gathering.divide_again()) or tables is not None:
                is_divided = True
            elif gathering is not None:
                gathering.gather(everywhere=True)
            loaded = load_weights(
                parts.run.world,
                parts.subjects,
                parts.weights,
                read,
                strict=strict,
                warn=lambda message: self._log.emit("warning", message=message),
                tables=tables,
            )
            if loaded is None:
                return LoadedWeights("the present weights", [], [])
            parts.history.weights_replaced(parts.cursor.total_steps)
            if parts.keeper.best is not None:
                parts.keeper.best.weights_replaced(parts.cursor.total_steps)
            return loaded

        return self._recovery.call(call, load)

    def export(self, path: str | os.PathLike[str], *, ema: bool = False) -> None:
        """Write the weights alone into a file that torch or other libraries read; all ranks return when it is on disk.

        Every rank must call it, between two steps; rank 0 writes. A file of that name is replaced, at once and as a
        whole. Names are those of model.state_dict(); with several models, their key is a prefix. Memory, for
        torch.save: one copy of the weights on rank 0.

        Args:
            path: A name that ends in .safetensors, or in .pt, .pth or .bin for a file of torch.save. A folder that
                does not exist is made.
            ema: Write the averaged weights.

        Raises:
            RuntimeError: It is called inside a loss function or an evaluated function.
            TypeError: An argument has the wrong type.
            ValueError: path has another suffix, or ema is True and the Trainer has no ema_decay.
            CheckpointError: On all ranks, if the file cannot be written.
            RankMismatchError: On all ranks, if they make different calls.
            PeerError: Another rank of the host has died, failed in a step, or does not come in time.
        """
        refuse_inside("trainer.export")
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path={path!r} must be the path of a file, and is {a_type(path)}")
        file = Path(os.fspath(path))
        if file.suffix not in SUFFIXES:
            raise ValueError(
                f"path={str(path)!r} must say by its suffix what to write: .safetensors, or .pt, .pth or .bin for "
                "torch.save"
            )
        flag("ema", ema)
        parts = self._parts
        if isinstance(parts.gathering, DividedTables) and not SUFFIXES[file.suffix]:
            raise ValueError(
                f"path={str(path)!r}: tables are divided over ranks, and a file of torch.save would be made in the "
                "memory of one of them: give a name that ends in .safetensors"
            )
        modules: Mapping[str, Any] = self._averaged() if ema else parts.modules
        call = f"trainer.export({str(path)!r}, ema={ema})"

        def write() -> None:
            self._compare(call)
            if isinstance(parts.gathering, DividedTables):
                parts.gathering.export(file)
                return
            if parts.gathering is not None:
                parts.gathering.gather(everywhere=False)
            with raised_on_all(parts.run.world, "trainer.export"):
                if parts.run.world.rank == 0:
                    others = {
                        prefix + plain_name(f"{place}._extra_state" if place else "_extra_state"): value
                        for prefix, states in extra_state(modules).items()
                        for place, value in states.items()
                    }
                    write_weights(file, model_tensors(modules), others)

        self._recovery.call(call, write)

    def stalled(
        self, metric: str, *, patience: int, mode: Literal["min", "max"] = "min", min_delta: float = 0.0
    ) -> bool:
        """Return True if a metric has not improved in its last `patience` evaluations.

        It depends on the results of `evaluate` since the start of the run. Checkpoints hold them, so all ranks and a
        resumed run decide the same. Several results of one name at one step count once. No communication. To end a run
        early: `if trainer.stalled("loss", patience=3): break`.

        Args:
            metric: A metric as `evaluate` reports it: its `name`, the key of a dict, or "name/key" if several
                evaluations have that key.
            patience: The number of evaluations without improvement after which the result is True.
            mode: "min" if smaller values are better, "max" if larger ones are.
            min_delta: An improvement is a value that is better than the best so far by more than this. NaN is none.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: patience is less than 1, min_delta is negative, mode is none of these, or several evaluations
                have a metric of this name.
        """
        text("metric", metric)
        patience = whole("patience", patience, least=1)
        choice("mode", mode, ("min", "max"))
        if real("min_delta", min_delta) < 0:
            raise ValueError(f"min_delta={min_delta} must not be negative")
        history = self._loop.history
        results = history.of(metric)
        if not results and len(history):
            self._warn_of_unknown(metric)
        values = [each.value for each in results]
        return evaluations_since_improvement(values, mode=mode, min_delta=float(min_delta)) >= patience

    def _averaged(self) -> Mapping[str, Any]:
        """Return the averaged models by prefix."""
        averages = self._parts.subjects.averages
        if not averages:
            raise ValueError("ema=True needs averaged weights: give Trainer ema_decay, for example 0.999")
        return averages

    def _refuse_to_overwrite(self, path: object, where: Path) -> None:
        """Refuse to replace the weights of a resumed run, as a script would that loads weights at each start.

        Raises:
            ValueError: The run was resumed, no loop has continued it yet, and the path is not in its directory.
        """
        if self.directory is None or not self._loop.continues or path == _BEST:
            return
        if self.directory.resolve() in (where.resolve(), *where.resolve().parents):
            return
        steps = self._parts.cursor.total_steps
        raise ValueError(
            f"the run in {self.directory} goes on after step {steps}, and trainer.load({str(path)!r}) would replace "
            "the weights that it has learned. To start from a file, load before the first step only: `if not "
            "trainer.steps_done: trainer.load(...)`. To look at other weights, give Trainer no directory."
        )

    def _warn_of_unknown(self, metric: str) -> None:
        unknown = self._unknown_metrics
        if metric not in unknown:
            unknown.add(metric)
            names = ", ".join(map(repr, self._loop.history.names()))
            self._log.emit(
                "warning",
                message=f"trainer.stalled({metric!r}): no evaluation has reported {metric!r} so far, but {names}. A "
                "metric has the name that evaluate was given, or the key of a dict.",
            )
