"""The Trainer: the training loop stays the user's, and each step is a transaction that happens on all ranks or on none.

This file is the public interface, with `run_status`, `inference`, `short_form`, `by_virtual_rank` and `storage`. The
work is done in the files beside it: `loop` (the order of events), `step` (one step), `evaluation`, `snapshot` (what is
saved), `resume` and `checkpointing` (where and when), `setup` (what is checked before the first step).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unisono.arguments import flag, whole
from unisono.data.batch import Batch
from unisono.data.joined_loader import JoinedLoader, check_joined
from unisono.data.loader_settings import Collate
from unisono.data.sampled_loader import SampledLoader
from unisono.data.sampled_order import check_samplers
from unisono.engine import EngineKind
from unisono.engine.local_steps import LocalSGD
from unisono.engine.step_fingerprint import intent_of_call
from unisono.job.user_function import refuse_inside
from unisono.parallel.pipeline import Pipeline
from unisono.parallel.pipeline.cut_model import CutModel
from unisono.parallel.sharding import Shard
from unisono.rank_zero.image_folder import ImageFolder
from unisono.state.policy import Checkpoints
from unisono.state.stateful import Stateful
from unisono.trainer.assembly import assemble
from unisono.trainer.batches_ahead import BatchesAhead, Lookups
from unisono.trainer.by_virtual_rank import ByVirtualRank
from unisono.trainer.epoch_batches import EpochBatches
from unisono.trainer.event_log import announce, open_log, warn_of_rank
from unisono.trainer.loader_cache import Loader, LoaderCache
from unisono.trainer.loop import Loop
from unisono.trainer.modules import lone_samples_warning
from unisono.trainer.recoverable_run import RecoverableRun
from unisono.trainer.recovery import Recovery
from unisono.trainer.resume import Resume
from unisono.trainer.run_status import RunStatus
from unisono.trainer.settings import REQUIRED, TrainerSettings
from unisono.trainer.setup import check_step_options, no_loss_function
from unisono.trainer.short_form import ShortForm
from unisono.trainer.step import Loss, StepOptions
from unisono.trainer.step_gradients import PLAIN_STEP
from unisono.trainer.step_result import StepResult
from unisono.trainer.storage import Storage
from unisono.trainer.trainer_parts import TrainedModels
from unisono.trainer.virtual_rank_calls import VirtualRankCalls
from unisono.watch import Event
from unisono.watch.event_kinds import PipelineFields

__all__ = ["Trainer"]


class Trainer(RunStatus, ShortForm, ByVirtualRank, Storage):
    """Trains a model with the same result on any number of ranks.

    Every rank must build the same model and optimizer and make the same calls. All arguments but the first two are
    keyword-only.

    Args:
        model: A module, or several by name (for GANs). The loss function gets it as its first argument, not wrapped.
        optimizer: The model's optimizer, or several by name. A `step` then steps the one that it names, or all of them.
        virtual_ranks: The number of fixed shares of every global batch, and the largest number of ranks. It decides the
            result, so there is no default; 8 is a good choice. Checkpoints store it, and a run keeps it.
        seed: The root of all random numbers: order of samples, augmentation, dropout. It does not initialize the model.
        directory: The folder of checkpoints and events.jsonl. None: nothing is saved.
        resume: "auto" continues the run in the directory, or starts one if there is none; "never" refuses a directory
            that holds a run; "must" refuses one that holds none.
        checkpoints: How often to save, and how many checkpoints to keep.
        scheduler: The learning-rate scheduler, which the Trainer steps; with several optimizers, schedulers by the same
            names.
        scheduler_interval: "step" or "epoch": schedulers are stepped after each of these.
        clip_grad_norm: The largest global norm of the gradient. None: no clipping.
        autocast: The type to compute in where torch considers it safe, "bf16" or "fp16"; "fp16" scales the loss.
        ema_decay: The decay of a moving average of the weights, for `evaluate(..., ema=True)`. None: no average.
        stateful: Further objects with state_dict and load_state_dict to save and restore, by name; also `Carried`
            state of virtual ranks.
        device: "auto" is this rank's GPU if there is one, otherwise the device of the model.
        threads: The number of torch threads of this process on a CPU. More than one changes bits, so the default is a
            constant and not the number of cores: use more ranks instead. For models on GPUs it counts for
            `Shard(offload=True)` alone, whose updates by torch's own optimizers have the same bits with any number.
        overlap: Collect and send gradients while backward is still running. Changes no bit.
        engine: "shared" keeps one copy of weights, gradients and optimizer state in shared memory, for CPU ranks of one
            host; "collective" keeps a copy for each rank and sends gradients; "auto" is "shared" where that is possible
            and all optimizers are torch's. Changes no bit. With "shared", write weights through the optimizer only; an
            optimizer that is not torch's must treat each parameter separately.
        parallel: `unisono.parallel.Pipeline(...)` cuts a model that is too large for one rank over several, and
            `unisono.parallel.Shard()` divides weights, gradients and optimizer state over all. Changes no bit. A model
            that no rank has room for is made by `unisono.parallel.build`.
        progress: Show progress on the terminal; otherwise only warnings.
        listeners: Functions that rank 0 calls with each event of the run, a dict; see docs/events.md, and
            docs/logging.md for `unisono.loggers`. Their exceptions propagate out of the method that the event is about;
            for "checkpoint", which is written meanwhile, out of the loop's next call.
        sync: `unisono.DiLoCo(every=50)` or `unisono.LocalSGD(every=50)`: workers take so many steps on their own before
            they bring their weights together. Changes the result. None: every step has the gradient of all.
        digest_every: Record a digest of each parameter and buffer after every so many steps, where the loop asks for
            its next batch, so that `unisono compare` finds the first one that differs. Rank 0 reads all weights for it,
            at 1 to 2 GB/s, while the others wait. None: none. Not with `parallel`.

    Raises:
        TypeError: virtual_ranks is missing, an argument has the wrong type, or the Trainer cannot use a model,
            optimizer or scheduler, such as ReduceLROnPlateau.
        ValueError: An argument is out of range or contradicts another one or the environment. A model is wrapped by
            another library, is sharded, has no values yet, or has SyncBatchNorm or an embedding with max_norm. There
            are more ranks than virtual_ranks. virtual_ranks or seed are not those of the run in the directory. The
            device does not exist, or engine="shared" is not possible.
        RankMismatchError: On all ranks, if their arguments, models or optimizers differ.
        CheckpointError: On all ranks, if the directory cannot be used or another job uses it; if it holds a run and
            resume="never", or none and resume="must"; if all its checkpoints are damaged; if its run is that of another
            model, optimizer or set of objects; or if the model has state that a resume could not restore.
        LaunchError: The ranks cannot meet.
        PeerError: Another rank has died or does not come in time.
        UnisonoError: Ranks of one host cannot share memory, such as those of different users.
        OSError: On rank 0, if events.jsonl cannot be opened.
    """

    def __init__(
        self,
        model: TrainedModels,
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
        parallel: Pipeline | Shard | None = None,
        progress: bool = True,
        listeners: Sequence[Callable[[Event], None]] = (),
        sync: LocalSGD | None = None,
        digest_every: int | None = None,
    ) -> None:
        settings = TrainerSettings.checked(
            virtual_ranks=virtual_ranks,
            seed=seed,
            directory=directory,
            resume=resume,
            checkpoints=checkpoints,
            scheduler=scheduler,
            scheduler_interval=scheduler_interval,
            clip_grad_norm=clip_grad_norm,
            autocast=autocast,
            ema_decay=ema_decay,
            stateful=stateful,
            device=device,
            threads=threads,
            overlap=overlap,
            engine=engine,
            parallel=parallel,
            progress=progress,
            listeners=listeners,
            sync=sync,
            digest_every=digest_every,
        )
        self.model, self.optimizer, self.directory = model, optimizer, settings.directory
        self._recovery = recovery = Recovery(settings.recovery_obstacle)
        parts = assemble(model, optimizer, settings, recovery=recovery)
        self._parts, self._unknown_metrics = parts, set()
        self._run, self._cursor, self._modules = parts.run, parts.cursor, parts.modules
        self._subjects, self._averages = parts.subjects, parts.averages
        self._carried, self._cut, self._gathering = parts.carried, parts.cut, parts.gathering
        self._calls = VirtualRankCalls(
            parts.run,
            carried=parts.carried,
            compare=parts.compare,
            modules=parts.modules,
            models=model,
        )
        self._warned = False
        self._log = open_log(
            settings.events,
            is_main=self.is_main,
            progress=progress,
            listeners=listeners,
            continues=recovery.is_on,
            at_once=settings.drill is not None,
        )
        if isinstance(parts.cut, CutModel):
            parts.cut.tell = self._tell_division
        warn = partial(warn_of_rank, self._log, self._run)
        self._images = ImageFolder(self.directory, warn)
        self._loader_cache = LoaderCache(self._run, warn, self._compare)
        if recovery.is_joined:
            announce(self._log, parts)
        self._log.is_muted = not recovery.is_joined
        keeps = self.directory is not None
        self._loop = Loop(parts, self._log, keeps=keeps)
        recovery.arm(RecoverableRun(parts, self._loop, self._loader_cache, self._log))

    def epochs(self, epochs: int, *, max_steps: int | None = None) -> Iterator[int]:
        """Yield the epochs of the run that are left, and save at the end.

        Every rank must iterate over them. After a resume the first is the epoch that was under way, whose `batches`
        begin where it stopped. When the loop ends on any rank, the last checkpoint is on disk.

        Args:
            epochs: The number of epochs in all, from the start of the run.
            max_steps: The number of steps in all after which the run ends, also in mid-epoch; a later start can go on
                from there. None: no limit.

        Raises:
            TypeError: epochs or max_steps is not a whole number.
            ValueError: epochs or max_steps is negative. From the iterator: another loop over epochs is under way, or
                this Trainer has already done all these epochs or steps.
            CheckpointError: From the iterator, on all ranks, if the directory was released by an earlier loop and
                cannot be used, if another job or a later Trainer of this process uses it, or if the last checkpoint
                cannot be written; on rank 0 alone, if an object's state cannot be stored in mid-run.
            KeyboardInterrupt, SystemExit: From the iterator, if the run has a directory and Ctrl-C or SIGTERM came at a
                place where the state could not be saved: it is saved first.
        """
        epochs = whole("epochs", epochs, least=0)
        return self._loop.epochs(epochs, None if max_steps is None else whole("max_steps", max_steps, least=0))

    def batches(
        self,
        dataset: Any,
        *,
        batch_size: int | Mapping[str, int] | None = None,
        shuffle: bool | None = None,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        micro_batch_size: int | None = None,
        workers: int = 0,
        collate_fn: Collate | None = None,
        drop_last: bool = False,
        sharded: bool = False,
        lookups: Lookups | None = None,
    ) -> EpochBatches:
        """Return an iterator over this rank's part of the batches that are left of the current epoch.

        Every rank must call it with an equal dataset. Every sample occurs once per epoch, unless a sampler says
        otherwise. `len` of the result is the number of batches that are left, where it is known. Ranks compare each
        call, by a few bytes, and each new dataset and each order of a sampler, by 1 KB from each rank.

        The whole sampler is read here, once per epoch, with the generators of torch, Python and NumPy, and its own
        torch.Generator, seeded from (seed, epoch). It takes 8 bytes for each index. A resume in mid-epoch reads it
        again, but no sample.

        Args:
            dataset: A map-style dataset (with __len__ and __getitem__), or an IterableDataset, whose cost is described
                in `data.stream_loader`; or several map-style datasets by name, for steps with samples of each. A
                micro-batch is then a dict of theirs. The first one leads: an epoch is one pass over it, its samples are
                those that count in the size of a batch and in the mean of the loss, and the others go round, in whole
                batches.
            batch_size: The number of samples of a global batch, over all ranks; at least virtual_ranks. Needed unless
                there is a batch sampler. With several datasets, a dict with a number for each.
            shuffle: Use a new order in each epoch. None: True, but False for an iterable dataset, which has its own
                order.
            sampler: Yields the indices of an epoch in order, such as a WeightedRandomSampler; all of them on every
                rank. An index may be missing or occur several times.
            batch_sampler: Yields lists of indices. Each is a global batch, of any size.
            micro_batch_size: The largest number of samples that go through the model at once; a larger share is
                computed in parts whose gradients are accumulated. None: whole shares.
            workers: The number of DataLoader processes of this rank; 0 reads in this process. Changes no bit.
            collate_fn: Makes a micro-batch from a list of samples. None: torch's default_collate.
            drop_last: Leave out the last batch if it is smaller.
            sharded: Read a shard of an iterable dataset for each virtual rank, by its method shard(num_shards, index),
                instead of all of it on each rank. The epoch ends where a shard has no sample left for the next batch.
                Up to 16 batches are read ahead.
            lookups: Called with each micro-batch before its step; returns the ids that the step will look up, by the
                name of the table. Rows of tables with `directory=` are then read while another step computes, and those
                of tables that are divided over ranks come in one exchange. No value depends on it. It is not called if
                there is no such table.

        Raises:
            RuntimeError: It is called inside a loss function or an evaluated function, or torch's process group failed.
            TypeError: dataset is neither map-style nor iterable, or an argument has the wrong type.
            ValueError: A number is out of range; an iterable dataset is to be shuffled; arguments exclude each other;
                the epoch was begun with other data, batch_size, shuffle, drop_last or order of a sampler; or, inside a
                loop over `epochs`, all its batches have been yielded. From the iterator: another loop over `batches`
                has begun.
            DataError: The dataset is empty, or smaller than a batch and drop_last is True; or a sampler yields nothing,
                an index that the dataset does not have, or does not end. From the iterator: an iterable dataset yields
                nothing, or a worker process has died.
            RankMismatchError: On all ranks, if they make different calls or have different data, numbers or orders.
            PeerError: Another rank of the host has died, failed in a step, or does not come in time; or its sampler
                failed.
            UnisonoError: Ranks no longer agree on what comes next, after a failure that one of them caught.
            CheckpointError, KeyboardInterrupt, SystemExit: From the iterator, as described at `epochs`.
        """
        refuse_inside("trainer.batches")
        sizes = None
        if isinstance(batch_size, Mapping):
            single = {"sampler": sampler, "batch_sampler": batch_sampler, "sharded": sharded}
            sizes = check_joined(dataset, batch_size, micro_batch_size=micro_batch_size, **single)
            batch_size = next(iter(sizes.values()))
        else:
            check_samplers(
                sampler, batch_sampler, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, sharded=sharded
            )
        if batch_size is not None:
            batch_size = whole("batch_size", batch_size, least=1)
        is_sampled = sampler is not None or batch_sampler is not None
        kind = " with a sampler" if is_sampled else f" of {', '.join(map(repr, sizes))}" if sizes else ""
        settings: dict[str, Any] = {
            "stream": "train",
            "batch_size": batch_size,
            "micro_batch_size": micro_batch_size,
            "workers": workers,
            "collate_fn": collate_fn,
            "drop_last": drop_last,
        }
        call = f"trainer.batches(){kind}"
        ahead = None if lookups is None else BatchesAhead(lookups, self._modules, exchange=self._run.exchange)

        def begin() -> EpochBatches:
            self._compare(call)
            epoch = self._loop.next_epoch()
            loader: Loader | JoinedLoader | SampledLoader
            if sizes is not None:
                loader = self._loader_cache.joined(dataset, sizes=sizes, shuffle=shuffle, **settings)
            elif is_sampled:
                samplers = sampler, batch_sampler
                loader = self._loader_cache.sampled(dataset, samplers, epoch=epoch, **settings)
            else:
                loader = self._loader_cache.loader(dataset, shuffle=shuffle, sharded=sharded, **settings)
            return self._loop.batches(loader, ahead)

        batches = self._recovery.call(call, begin, again=True)
        warning = batch_size and lone_samples_warning(
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
        loss_fn: Loss,
        batch: Batch,
        *,
        optimizer: str | None = None,
        encode: Loss | None = None,
        recompute: bool = False,
        on_gradients: Callable[[Any], object] | None = None,
        closure: bool = False,
    ) -> StepResult:
        """Perform one optimizer step on a global batch, on all ranks or on none, and return the batch's mean loss.

        Every rank must call it. The collective engine sends the gradients as an all-reduce does; the shared engine
        sends none, since all ranks see them in memory.

        NonFiniteLossError and RankMismatchError are raised on all ranks, so a loop may catch them and continue. After
        them, LossError, GroupError and an exception of the loss function itself, weights and buffers are those from
        before the step, unless the function wrote to a parameter. After an exception inside the optimizer, weights may
        be partly written.

        Args:
            loss_fn: Called as loss_fn(model, micro_batch) for each micro-batch of this rank. It returns one loss per
                sample, the micro-batch's mean as a scalar, or `unisono.Sum(total, weight)` for a mean over tokens or
                weighted samples; or a dict with one of these as "loss" and further values in the same forms, whose
                means over the global batch are in the result. Of another mapping, such as a transformers ModelOutput,
                the loss alone is used.
            batch: The latest batch from `batches`.
            optimizer: The name of the optimizer, if the Trainer has several; a batch may be used for one step of each.
            encode: For a loss over the whole global batch: called as encode(model, micro_batch), it returns a tensor
                with a row for each sample, or a tuple, list or dict of such tensors. loss_fn(model, encodings) is then
                called once, on every rank, with those of all samples in the order of the batch. Memory: the graphs of
                this rank's samples. Traffic: each rank sends its encodings to all others.
            recompute: With `encode`, encode without a graph first, and again for the backward pass: the memory of one
                micro-batch, and a second forward pass. Changes no bit.
            on_gradients: Called as on_gradients(model) on every rank once p.grad is the gradient of the global batch,
                before it is clipped; it may change or replace gradients, in the same way on all ranks. Costs a copy of
                the gradient with the shared engine, a pass over it to compare, and one small exchange.
            closure: True for an optimizer that computes loss and gradient at other weights within its step, such as
                SAM: it gets a closure, as from a loop of plain torch, which computes them for the same batch with the
                same random numbers. LBFGS gets one anyway. Only the first of these passes changes buffers. Not with the
                shared engine.

        Returns:
            The mean loss as a float, with `values`, `grad_norm`, `learning_rates` and `skipped`.

        Raises:
            NonFiniteLossError: On all ranks, if the loss is NaN or infinite, naming virtual ranks and samples; or, with
                clip_grad_norm and without "fp16", if the norm of the gradient is.
            RankMismatchError: On all ranks, if they differ in a hyperparameter such as the learning rate, in what is
                frozen, in a mode, in the batch or in what they call.
            LossError: The function returned anything else, wrote to a parameter, or changed a buffer in a way that
                virtual ranks cannot agree on; a gradient is sparse where none can be; all weights are zero; or a
                dynamic table has no rows for new ids (TableFullError).
            GroupError: The function called a collective.
            RuntimeError: It is called inside a loss function or an evaluated function, or torch's process group failed.
            TypeError: loss_fn, encode or on_gradients cannot be called.
            ValueError: recompute is given without encode, closure cannot be given to the optimizer, batch is not the
                latest one, optimizer names none of the Trainer's, or the optimizer has no parameter to train, one that
                belongs to no model, or one that it cannot update.
            PeerError: Another rank of the host has died, failed in the step, or does not come in time; or encode or
                on_gradients raised an exception on another rank.
            UnisonoError: An earlier step was interrupted, so that ranks no longer agree on the next one. With the
                shared engine also: a parameter was written to between two steps, or the optimizer's state cannot be
                shared.
            KeyboardInterrupt, SystemExit: Ctrl-C came while other ranks relied on this one, and the step has been done;
                or the step failed after a signal that had been deferred.
        """
        refuse_inside("trainer.step")
        if not callable(loss_fn):
            raise TypeError(no_loss_function(loss_fn, call="trainer.step(loss_fn, batch)"))
        options = PLAIN_STEP
        is_plain = encode is None and on_gradients is None and recompute is False and closure is False
        if not is_plain:
            options = StepOptions(encode, flag("recompute", recompute), on_gradients, flag("closure", closure))
            check_step_options(options, has_whole_model=self._run.has_whole_model)
        return self._recovery.call(
            "trainer.step",
            partial(self._loop.steps.step, loss_fn, batch, optimizer, options),
            account=partial(self._loop.steps.account, batch),
        )

    def _tell_division(self, fields: PipelineFields) -> None:
        """Tell how a model has been divided into stages."""
        self._log.emit("pipeline", **fields)

    def _compare(self, call: str) -> None:
        """Check that all ranks make the same call at the same place in the run."""
        cursor = self._cursor
        intent = intent_of_call(call, epoch=cursor.epoch, step=cursor.step, total_steps=cursor.total_steps)
        self._parts.compare(intent)
