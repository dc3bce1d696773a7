"""`WandbLogger`: the numbers, texts and images of a run in Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.loggers.logger import Logger, import_library
from unisono.loggers.rows import Row
from unisono.watch.event_kinds import Event

__all__ = ["WandbLogger"]

_FACTS = ("world_size", "virtual_ranks", "seed", "parameters", "device", "threads", "torch", "directory")


class WandbLogger(Logger):
    """Writes a run of Weights & Biases. Needs the package wandb.

    Steps are those of the run, and facts about it (seed, virtual ranks, …) are in the configuration as "unisono". To
    continue the same run of W&B after a resume, pass an `id` and resume="allow"; W&B ignores steps that it already has.

    Args:
        init: The arguments of `wandb.init`, such as project, name, config, id and mode.

    Raises:
        ModuleNotFoundError: wandb is not installed.
    """

    def __init__(self, **init: Any) -> None:
        super().__init__()
        self._wandb = import_library("wandb", package="wandb", logger="WandbLogger")
        self._init = init
        self._run: Any = None

    def begin(self, facts: Event) -> None:
        """See `Logger`."""
        self.finish(failed=False)
        self._run = self._wandb.init(**self._init)
        known = {name: facts[name] for name in _FACTS if name in facts}
        self._run.config.update({"unisono": known}, allow_val_change=True)

    def write(self, rows: Sequence[Row]) -> None:
        """See `Logger`."""
        for row in rows:
            images = {
                name: self._wandb.Image(str(image.path), caption=image.caption) for name, image in row.images.items()
            }
            self._run.log({"epoch": row.epoch, **row.values, **row.texts, **images}, step=row.step)

    def finish(self, *, failed: bool) -> None:
        """See `Logger`."""
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=1 if failed else 0)
