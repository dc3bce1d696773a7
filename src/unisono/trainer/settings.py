"""The keyword arguments of a Trainer as one value, and their checks before anything is started."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler

from unisono.arguments import choice, flag, real, whole
from unisono.engine import EngineKind
from unisono.engine.local_steps import LocalSGD
from unisono.parallel.pipeline import Pipeline
from unisono.parallel.sharding import Shard
from unisono.state.policy import Checkpoints
from unisono.state.stateful import Stateful
from unisono.text import a_type
from unisono.trainer.carried import Carried
from unisono.trainer.drilled import own_drill
from unisono.trainer.resume import Resume
from unisono.watch import Event

__all__ = ["REQUIRED", "TrainerSettings"]


class _Required:
    """The default of an argument that must be given: our error explains its purpose, which Python's does not."""

    def __repr__(self) -> str:
        return "<required>"


REQUIRED: Any = _Required()


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """The arguments of a Trainer beside its models and optimizers, which describes them."""

    virtual_ranks: int
    seed: int
    directory: Path | None
    resume: Resume
    checkpoints: Checkpoints
    scheduler: LRScheduler | Mapping[str, LRScheduler] | None
    scheduler_interval: Literal["step", "epoch"]
    clip_grad_norm: float | None
    autocast: Literal["bf16", "fp16"] | None
    ema_decay: float | None
    stateful: Mapping[str, Stateful]
    device: str | torch.device
    threads: int
    overlap: bool
    engine: EngineKind
    parallel: Pipeline | Shard | None
    progress: bool
    listeners: Sequence[Callable[[Event], None]]
    sync: LocalSGD | None
    digest_every: int | None
    drill: Path | None = None
    """The folder of the run of `unisono drill` that this is; None: it is none."""

    @classmethod
    def checked(cls, *, directory: Any, checkpoints: Any, stateful: Any, **arguments: Any) -> TrainerSettings:
        """Return the settings that a user has given.

        Raises:
            TypeError: virtual_ranks is missing, or an argument has the wrong type.
            ValueError: An argument is out of range or none of the allowed values.
        """
        given = cls(directory=directory, checkpoints=checkpoints, stateful=stateful, **arguments)
        given._check()
        drill = own_drill()
        if drill is not None and directory is not None:  # never the user's: its run must stay as it is
            directory = drill / "directories" / Path(directory).resolve().name
        return replace(
            given,
            virtual_ranks=int(given.virtual_ranks),
            seed=int(given.seed),
            directory=None if directory is None else Path(directory),
            checkpoints=checkpoints or Checkpoints(),
            stateful=stateful or {},
            # There is nothing to resume in a drill.
            resume="auto" if drill is not None and given.resume == "must" else given.resume,
            drill=drill,
        )

    @property
    def events(self) -> Path | None:
        """The file to which the events of the run are written; None for none."""
        folder = self.directory if self.drill is None else self.drill
        return None if folder is None else folder / "events.jsonl"

    def _check(self) -> None:  # noqa: PLR0912  one thing after the other
        if self.virtual_ranks is REQUIRED or self.virtual_ranks is None:
            raise TypeError(
                "virtual_ranks is missing: the number of fixed shares of every global batch, which decides the result "
                "and so must not depend on the number of ranks. Give virtual_ranks=8, and the same from then on: any "
                "number of ranks up to 8 then gives the same bits, and 1, 2, 4 or 8 share the work evenly."
            )
        whole("virtual_ranks", self.virtual_ranks, least=1, meant="a whole number, such as 8")
        whole("seed", self.seed)
        whole("threads", self.threads, least=1)
        choice("resume", self.resume, ("auto", "never", "must"))
        choice("scheduler_interval", self.scheduler_interval, ("step", "epoch"))
        choice("engine", self.engine, ("auto", "shared", "collective"))
        choice("autocast", self.autocast, ("bf16", "fp16", None))
        flag("overlap", self.overlap)
        flag("progress", self.progress)
        if self.digest_every is not None:
            whole("digest_every", self.digest_every, least=1, meant="a whole number of steps, or None")
        if self.parallel is not None:
            self._check_parallel()
        if self.sync is not None:
            self._check_sync()
        if self.clip_grad_norm is not None and not real("clip_grad_norm", self.clip_grad_norm) > 0:
            raise ValueError(f"clip_grad_norm={self.clip_grad_norm} must be positive; None does not clip")
        if self.ema_decay is not None and not 0 <= real("ema_decay", self.ema_decay) < 1:
            raise ValueError(f"ema_decay={self.ema_decay} must be at least 0 and below 1; 0.999 is common")
        directory: Any = self.directory
        if directory is not None and (not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory)):
            raise TypeError(f"directory={directory!r} must be the path of a folder, or None to keep nothing")
        checkpoints: Any = self.checkpoints
        if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
            raise TypeError(
                f"checkpoints={checkpoints!r} is {a_type(checkpoints)}; give "
                "unisono.Checkpoints(every_steps=100), for example"
            )
        stateful: Any = self.stateful
        if not isinstance(stateful, Mapping | None):
            raise TypeError(f'stateful is {a_type(stateful)}; give the objects by name, as {{"name": object}}')
        for name, each in (stateful or {}).items():
            if not hasattr(each, "state_dict") or not hasattr(each, "load_state_dict"):
                raise TypeError(f"stateful[{name!r}] is {a_type(each)}, which has no state_dict and load_state_dict")
        listeners: Any = self.listeners
        if not isinstance(listeners, Sequence):
            raise TypeError(f"listeners is {a_type(listeners)}; give a list of functions, each called with events")
        for i, each in enumerate(listeners):
            if not callable(each):
                raise TypeError(f"listeners[{i}] is {a_type(each)}, which cannot be called with an event")

    def _check_sync(self) -> None:
        """Refuse what cannot be together with workers that train on their own."""
        sync: Any = self.sync
        if not isinstance(sync, LocalSGD):
            raise TypeError(
                f"sync={sync!r} is {a_type(sync)}; give unisono.DiLoCo(every=50) or unisono.LocalSGD(every=50)"
            )
        count = sync.workers or self.virtual_ranks
        each = f"{count} workers that train on their own (sync={type(sync).__name__}(every={sync.every}))"
        for name, is_given, why in (
            ("parallel", self.parallel is not None, "would each need a model that is cut or divided"),
            ('engine="shared"', self.engine == "shared", "have weights of their own, and it keeps one copy for all"),
            ('autocast="fp16"', self.autocast == "fp16", 'would need a loss scale each; autocast="bf16" needs none'),
            ("ema_decay", self.ema_decay is not None, f"meet once in {sync.every} steps, and it averages after each"),
        ):
            if is_given:
                raise ValueError(f"{name} cannot be together with {each}: these {why}. Leave out one of the two")

    @property
    def recovery_obstacle(self) -> str | None:
        """Why a rank of this run cannot be replaced alone; None if the settings allow it."""
        if any(isinstance(each, Carried) for each in self.stateful.values()):
            return "the state that virtual ranks carry dies with the rank that computes them"
        if isinstance(self.parallel, Shard):
            return "a model that is divided over ranks dies with the rank that has a part of it"
        if self.sync is not None:
            return "the weights of a worker (sync=) die with the rank that trains it"
        return None

    def _check_parallel(self) -> None:
        """Refuse what cannot be together with a model that is cut or divided over ranks."""
        parallel: Any = self.parallel
        if isinstance(parallel, Sequence) and any(isinstance(each, Pipeline | Shard) for each in parallel):
            raise ValueError(
                f"parallel={parallel!r} has several: stages that are divided over ranks in their turn are not there "
                "yet. Give Pipeline(...) or Shard(...) alone"
            )
        if not isinstance(parallel, Pipeline | Shard):
            raise TypeError(
                f"parallel={parallel!r} is {a_type(parallel)}; give unisono.parallel.Pipeline(stages=[...]) or "
                "unisono.parallel.Shard(), for example"
            )
        if self.engine == "shared":
            raise ValueError(
                'engine="shared" keeps one copy of the weights for all ranks, and parallel= divides them: leave '
                'engine="auto"'
            )
        if self.digest_every is not None:
            raise ValueError(
                f"digest_every={self.digest_every} needs all weights on rank 0, and with parallel= each rank has a "
                "part of them: leave it out. `unisono compare` compares losses, and the digest at the end, without it"
            )
        if isinstance(self.stateful, Mapping):
            for name, each in self.stateful.items():
                if isinstance(each, Carried) and isinstance(parallel, Shard):
                    raise ValueError(  # noqa: TRY004  the type is right elsewhere
                        f"stateful[{name!r}] is carried by virtual ranks, which parallel=Shard(...) does not know yet: "
                        "leave out one of the two"
                    )
                if isinstance(each, Carried):
                    raise ValueError(  # noqa: TRY004  the type is right elsewhere
                        f"stateful[{name!r}] is carried by virtual ranks, whose forward pass is on several ranks with "
                        "parallel=: leave out one of the two"
                    )
