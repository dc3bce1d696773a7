"""The Trainer: a training loop that stays the user's, in which each step is a transaction on all ranks or on none.

This file is the public face; the work is done in the files beside it: `loop` (the order of things), `step` (one step),
`evaluation`, `snapshot` (what is saved), `finding` and `keeping` (where and when), `setup` (what is checked before the
first step).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unisono.arguments import flag, text, whole
from unisono.data.batch import Batch
from unisono.data.map_loader import MapLoader
from unisono.data.settings import Collate
from unisono.data.stream_loader import StreamLoader
from unisono.engine import EngineKind
from unisono.job.user_function import refuse_inside
from unisono.parallel.losses import loss_of
from unisono.state.digest import digest
from unisono.state.policy import Checkpoints
from unisono.state.stateful import Stateful
from unisono.trainer.assembly import Models, assemble
from unisono.trainer.epoch import EpochResult
from unisono.trainer.evaluation import evaluate, tell
from unisono.trainer.loader_cache import LoaderCache
from unisono.trainer.loop import Loop
from unisono.trainer.modules import evaluating, lone_samples_warning
from unisono.trainer.resume import Resume
from unisono.trainer.run_log import announce, open_log, warn_of_rank
from unisono.trainer.setup import REQUIRED, check_arguments, check_fit, check_step_options
from unisono.trainer.snapshot import model_tensors, optimizer_state
from unisono.trainer.step import Loss, StepOptions
from unisono.trainer.step_fingerprint import intent_of_call
from unisono.trainer.step_result import StepResult
from unisono.watch import Event

__all__ = ["Trainer"]


class Trainer:
    """Train a model with the same result on any number of ranks.

    Every rank builds the same model and optimizer and makes the same calls. All arguments but the first two are
    keyword-only.
    Args:
        model: a module, or several by name (for GANs); what the loss function gets as its first argument. Not wrapped.
        optimizer: its optimizer, or several by name; then `step` is told which.
        virtual_ranks: fixed shares of every global batch, and the largest number of ranks that can be used. It decides
            the result, so there is no default; 8 is a good choice. It is stored in checkpoints and stays.
        seed: root of all random numbers: order of samples, augmentation, dropout. It does not initialise the model.
        directory: where checkpoints and events.jsonl go. None: nothing is kept.
        resume: "auto" continues where the directory ends, or starts anew; "never" refuses a directory that holds a
            run; "must" refuses one that holds none.
        checkpoints: how often to save, and how many to keep.
        scheduler: learning-rate scheduler, stepped here; with several optimizers, by the same names.
        scheduler_interval: after every "step" or every "epoch".
        clip_grad_norm: largest global norm of the gradient. None: no clipping.
        autocast: compute in "bf16" or "fp16" where torch deems it safe; "fp16" scales the loss.
        ema_decay: keep an average of the weights with this decay, for `evaluate(..., ema=True)`. None: no average.
        stateful: further objects with state_dict and load_state_dict to save and restore, by name.
        device: "auto" is this rank's GPU if there is one, else where the model lies.
        threads: torch threads of this process on a CPU. More than one changes bits, so it is a constant and not the
            number of cores: use more ranks instead.
        overlap: take and send gradients while backward still runs. Changes no bit.
        engine: "shared" keeps one copy of weights, gradients and optimizer state in shared memory, for CPU ranks of one
            host; "collective" keeps a copy for each rank, and sends gradients; "auto" takes "shared" where it can
            serve and all optimizers are torch's. Changes no bit. With "shared", write weights through the optimizer
            only, and see that your own optimizer treats each parameter by itself.
        progress: show progress on the terminal; without it, warnings alone.
        listeners: functions that rank 0 calls with each event of the run, a dict; see docs/events.md. What they raise
            comes out of the call that the event is about.
    Raises: TypeError if virtual_ranks is missing, ValueError for contradicting arguments, RankMismatchError if ranks
        were given different things, CheckpointError if the directory cannot be used or holds another model's run.
    """

    def __init__(
        self,
        model: Models,
        optimizer: Optimizer | Mapping[str, Optimizer],
        *,
        virtual_ranks: int = REQUIRED,
        seed: int = 0,
        directory: str | os.PathLike[str] | None = None,
        resume: Resume = "auto",
        checkpoints: Checkpoints | None = None,
        scheduler: LRScheduler | Mapping[str, LRScheduler] | None = None,
        scheduler_interval: Literal["step", "epoch"] = "step",
        clip_grad_norm: float | None = None,
        autocast: Literal["bf16", "fp16"] | None = None,
        ema_decay: float | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        device: str | torch.device = "auto",
        threads: int = 1,
        overlap: bool = True,
        engine: EngineKind = "auto",
        progress: bool = True,
        listeners: Sequence[Callable[[Event], None]] = (),
    ) -> None:
        check_arguments(
            virtual_ranks=virtual_ranks,
            seed=seed,
            directory=directory,
            checkpoints=checkpoints,
            stateful=stateful,
            overlap=overlap,
            progress=progress,
            resume=resume,
            scheduler_interval=scheduler_interval,
            clip_grad_norm=clip_grad_norm,
            autocast=autocast,
            ema_decay=ema_decay,
            threads=threads,
            engine=engine,
        )
        self.model = model
        self.optimizer = optimizer
        self.directory = None if directory is None else Path(directory)
        parts = assemble(
            model,
            optimizer,
            seed=int(seed),
            virtual_ranks=int(virtual_ranks),
            directory=self.directory,
            resume=resume,
            checkpoints=checkpoints or Checkpoints(),
            scheduler=scheduler,
            scheduler_interval=scheduler_interval,
            clip_grad_norm=clip_grad_norm,
            autocast=autocast,
            ema_decay=ema_decay,
            stateful=stateful or {},
            device=device,
            threads=threads,
            overlap=overlap,
            engine=engine,
        )
        self._run, self._cursor, self._modules = parts.run, parts.cursor, parts.modules
        self._subjects, self._averages = parts.subjects, parts.averages
        self._comparison = parts.comparison
        self._warned = False
        self._run.set_generators("loop", self._cursor.epoch, self._cursor.step, 0)
        self._log = open_log(self.directory, is_main=self.is_main, progress=progress, listeners=listeners)
        self._dealer = LoaderCache(self._run, partial(warn_of_rank, self._log, self._run))
        announce(
            self._log,
            self._run,
            modules=self._modules,
            directory=self.directory,
            source=parts.source,
            warnings=parts.warnings,
            cursor=self._cursor,
        )
        keeps = self.directory is not None
        self._loop = Loop(parts, self._log, scheduler_interval=scheduler_interval, keeps=keeps)

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
        """Whether this is rank 0, which writes files and talks."""
        return self._run.world.rank == 0

    @property
    def virtual_ranks(self) -> int:
        """Fixed shares of every global batch."""
        return self._run.virtual_ranks

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._run.device

    @property
    def epoch(self) -> int:
        """The epoch that is under way or comes next, from 0."""
        return self._cursor.epoch

    @property
    def steps(self) -> int:
        """Steps done since the start of the run, before and after resumes."""
        return self._cursor.total_steps

    def print(self, *values: object) -> None:
        """Print on rank 0."""
        if self.is_main:
            print(*values, flush=True)

    def epochs(self, epochs: int, *, steps: int | None = None) -> Iterator[int]:
        """Yield the epochs that are left of so many, and save at the end.

        After a resume it begins with the epoch that was under way, whose `batches` begin where it stopped.
        When the loop ends, its last checkpoint is on disk, for all ranks.
        Args:
            epochs: how many in all, from the start of the run.
            steps: ends the run after so many steps in all, also in mid-epoch; a later start can go on from there.
        Raises: ValueError if this Trainer has done all of them, or if a loop over epochs is under way; CheckpointError
            at the end, on all ranks, if the last checkpoint cannot be written.
        """
        epochs = whole("epochs", epochs, least=0)
        return self._loop.epochs(epochs, None if steps is None else whole("steps", steps, least=0))

    def batches(
        self,
        dataset: Any,
        *,
        batch_size: int,
        shuffle: bool | None = None,
        micro_batch_size: int | None = None,
        workers: int = 0,
        collate_fn: Collate | None = None,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """Yield the batches that are left of the current epoch, as this rank sees them.

        Every rank must call it with an equal dataset. Every sample occurs once per epoch.
        Args:
            dataset: map-style (with __len__ and __getitem__), or an IterableDataset; `data.stream_loader` says what
                that costs.
            batch_size: samples of the global batch, over all ranks; at least virtual_ranks.
            shuffle: a new order each epoch. None: yes, but not for an iterable dataset, which has its own order.
            micro_batch_size: at most so many samples go through the model at once; a larger share is done in parts
                whose gradients are accumulated. None: whole shares.
            workers: DataLoader processes of this rank; 0 reads in this process. Changes no bit.
            collate_fn: makes a micro-batch of a list of samples. None: torch's default_collate.
            drop_last: leave out the last batch if it is smaller.
        Raises: ValueError, TypeError or DataError for a dataset or numbers that cannot be; RankMismatchError if ranks
            were given different ones.
        """
        refuse_inside("trainer.batches")
        batch_size = whole("batch_size", batch_size, least=1)
        self._compare("trainer.batches()")
        loader = self._dealer.loader(
            dataset,
            stream="train",
            batch_size=batch_size,
            shuffle=shuffle,
            micro_batch_size=micro_batch_size,
            workers=workers,
            collate_fn=collate_fn,
            drop_last=drop_last,
        )
        batches = self._loop.batches(loader, batch_size=batch_size)
        warning = lone_samples_warning(
            self._modules,
            batch_size=batch_size,
            virtual_ranks=self.virtual_ranks,
            micro_batch_size=micro_batch_size,
        )
        if warning and not self._warned:
            self._warned = True
            self._log.emit("warning", message=warning)
        return batches

    def step(
        self,
        loss: Loss,
        batch: Batch,
        *,
        optimizer: str | None = None,
        encode: Loss | None = None,
        recompute: bool = False,
        on_gradients: Callable[[Any], object] | None = None,
    ) -> StepResult:
        """Take one optimizer step on a global batch, on all ranks or on none, and return the batch's mean loss.

        Args:
            loss: called as loss(model, micro_batch) for each micro-batch of this rank. It returns one loss per sample,
                the micro-batch's mean as a scalar, or `unisono.Sum(total, weight)` for a mean over tokens or weighted
                samples; or a dict (also a transformers ModelOutput) with one of these as "loss", whose other values
                are not used.
            batch: from `batches`, the one given last.
            optimizer: which one, if Trainer was given several; a batch may be used for one step of each.
        Raises: NonFiniteLossError if the loss is NaN or infinite: on all ranks, naming virtual rank and samples;
            RankMismatchError if ranks differ, in a learning rate, in what is frozen, in the batch or in what they call;
            LossError if the function returned something else. Weights and buffers are then those from before.
        """
        refuse_inside("trainer.step")
        if not callable(loss):
            raise TypeError(
                f"the loss function is a {type(loss).__name__}, which cannot be called: trainer.step(loss, batch) "
                "takes a function of the model and a micro-batch first, and then the batch"
            )
        options = StepOptions(encode, flag("recompute", recompute), on_gradients)
        check_step_options(options)
        return self._loop.step(loss, batch, optimizer, options)

    def evaluate(
        self,
        function: Loss,
        dataset: Any,
        *,
        batch_size: int | None = None,
        micro_batch_size: int | None = None,
        workers: int = 0,
        collate_fn: Collate | None = None,
        ema: bool = False,
        name: str = "evaluation",
    ) -> Any:
        """Average what a function says of each sample of a dataset, every sample once. Every rank must call it.

        Args:
            function: called as function(model, micro_batch), without gradients and in evaluation mode; returns one
                value per sample (numbers or truth values), a scalar mean, `unisono.Sum(total, weight)`, or a dict of
                such.
            batch_size: as in `batches`. None: that of the last training batches.
            ema: use the averaged weights.
            name: how the result is called in events and on the terminal.
        Returns: a `Metric`, a float that knows its sum and count; a dict of them if the function returned a dict.
        """
        refuse_inside("trainer.evaluate")
        if not callable(function):
            raise TypeError(
                f"the evaluated function is a {type(function).__name__}, which cannot be called: "
                "trainer.evaluate(function, dataset) takes a function of the model and a micro-batch first"
            )
        flag("ema", ema)
        name = text("name", name)
        if batch_size is not None:
            batch_size = whole("batch_size", batch_size, least=1)
        started_s = time.monotonic()
        self._compare(f"trainer.evaluate(name={name!r}, ema={ema})")
        loader = self._test_loader(
            dataset,
            batch_size=batch_size or self._cursor.batch_size or 32 * self.virtual_ranks,
            micro_batch_size=micro_batch_size,
            workers=workers,
            collate_fn=collate_fn,
        )
        models = self._averaged_model() if ema else self.model
        with evaluating(self._subjects.averages if ema else self._modules):
            result = evaluate(self._run, function, models, loader.batches(epoch=0))
        self._run.set_generators("loop", self._cursor.epoch, self._cursor.step, 0)
        tell(self._log, result, name=name, cursor=self._cursor, seconds=time.monotonic() - started_s)
        return result

    def fit(
        self,
        train: Any,
        loss: Loss,
        *,
        batch_size: int,
        epochs: int,
        steps: int | None = None,
        validation: Any = None,
        metrics: Mapping[str, Loss] | None = None,
        **options: Any,
    ) -> list[EpochResult]:
        """Train for some epochs and evaluate after each: the short form of the loop.

        A model that is in evaluation mode as a whole, as from_pretrained returns it, is put into training mode.
        Args:
            validation: a dataset to evaluate on after each epoch. None: no evaluation.
            metrics: functions to evaluate there, by name. None: the loss.
            options: further arguments of `batches`.
        Returns: what each epoch of this call came to; none if the directory's run was over already.
        Raises: as `batches`, `step` and `evaluate`; ValueError if Trainer was given several optimizers.
        """
        refuse_inside("trainer.fit")
        check_fit(loss, metrics, validation=validation, optimizer=self.optimizer)
        batch_size = whole("batch_size", batch_size, least=1)
        shared = {key: options[key] for key in ("micro_batch_size", "workers", "collate_fn") if key in options}

        def loss_alone(model: Any, batch: Any) -> Any:
            return loss_of(loss(model, batch))

        results = []
        left = self.epochs(epochs, steps=steps)
        if validation is not None:
            self._test_loader(validation, batch_size=batch_size, **shared)  # or an error, and not after an epoch
        self._loop.begin_training(None)
        for epoch in left:
            for batch in self.batches(train, batch_size=batch_size, **options):
                self.step(loss, batch)
            values = {}
            if validation is not None:
                for name, function in (metrics or {"validation loss": loss_alone}).items():
                    values[name] = self.evaluate(function, validation, name=name, **shared)
            results.append(EpochResult(epoch=epoch, loss=self._loop.mean_loss, validation=values))
        return results

    def save(self) -> None:
        """Save a checkpoint now, in the background. Call it after the last step of a batch, on every rank.

        What the loop does behind it, before it asks for the next batch, is not in it.
        """
        refuse_inside("trainer.save")
        self._loop.save()

    def digest(self) -> str:
        """Return the SHA-256 of all parameters, buffers and optimizer state, 64 hex digits: the identity of a result.

        Local: equal on all ranks, and any rank may ask alone.
        """
        optimizers = {
            name: optimizer_state(self._modules, optimizer) for name, optimizer in self._subjects.optimizers.items()
        }
        return digest({"model": model_tensors(self._modules), "optimizer": optimizers})

    def _compare(self, call: str) -> None:
        """See that all ranks make the same call at the same place of the run."""
        cursor = self._cursor
        intent = intent_of_call(call, epoch=cursor.epoch, step=cursor.step, total_steps=cursor.total_steps)
        self._comparison.compare(intent)

    def _test_loader(
        self,
        dataset: Any,
        *,
        batch_size: int,
        micro_batch_size: int | None = None,
        workers: int = 0,
        collate_fn: Collate | None = None,
    ) -> MapLoader | StreamLoader:
        return self._dealer.loader(
            dataset,
            stream="evaluate",
            batch_size=batch_size,
            shuffle=False,
            micro_batch_size=micro_batch_size,
            workers=workers,
            collate_fn=collate_fn,
            drop_last=False,
        )

    def _averaged_model(self) -> Any:
        if not self._averages:
            raise ValueError("ema=True needs averaged weights: give Trainer ema_decay, for example 0.999")
        modules = [average.module for average in self._averages.values()]
        return dict(zip(self.model, modules, strict=True)) if isinstance(self.model, Mapping) else modules[0]
