"""The methods of a Trainer that compute without training: evaluations and predictions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from unisono import arguments
from unisono.arguments import flag, text, whole
from unisono.data.loader_settings import Collate
from unisono.data.map_loader import MapLoader
from unisono.embedding.tables import settle
from unisono.job.user_function import refuse_inside
from unisono.parallel.pipeline.cut_model import CutModel
from unisono.parallel.sharding.divided_model import DividedModel
from unisono.trainer.carried import CarriedStates
from unisono.trainer.evaluation import evaluate, tell
from unisono.trainer.loader_cache import Loader, LoaderCache
from unisono.trainer.loop import Loop
from unisono.trainer.modules import evaluating
from unisono.trainer.prediction import Predictor, read_destination
from unisono.trainer.recovery import Recovery
from unisono.trainer.run_context import RunContext
from unisono.trainer.snapshot import Cursor, Subjects
from unisono.trainer.step import Loss
from unisono.trainer.trainer_parts import TrainedModels, TrainerParts
from unisono.watch import EventLog

__all__ = ["Inference"]


class Inference:
    """The methods of a Trainer that run the model on a dataset and change nothing."""

    model: TrainedModels
    _run: RunContext
    _cursor: Cursor
    _modules: Mapping[str, nn.Module]
    _subjects: Subjects
    _carried: CarriedStates
    _parts: TrainerParts
    _cut: CutModel | DividedModel | None
    _loader_cache: LoaderCache
    _log: EventLog
    _loop: Loop
    _recovery: Recovery
    _compare: Callable[[str], None]
    _averaged: Callable[[], Mapping[str, nn.Module]]

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
        """Return the mean of a function's values over all samples of a dataset, each of which counts once.

        Every rank must call it, with an equal dataset. Afterwards the mode of each module is restored. Ranks exchange
        their sums once, at the end.

        Args:
            function: Called as function(model, micro_batch), without gradients and in evaluation mode. It returns one
                value per sample (numbers or truth values), a scalar mean, `unisono.Sum(total, weight)`, or a dict of
                these.
            dataset, micro_batch_size, workers, collate_fn: See `batches`.
            batch_size: See `batches`. None: that of the last training batches, or 32 * virtual_ranks before any.
            ema: Use the averaged weights.
            name: The name of the result in events and on the terminal.

        Returns:
            An `Average`, a float with its sum and count; a dict of them if the function returned a dict.

        Raises:
            RuntimeError: It is called inside a loss function or an evaluated function, or torch's process group failed.
            TypeError: function cannot be called, dataset is neither map-style nor iterable, or an argument has the
                wrong type.
            ValueError: name is empty, a number is out of range, or ema is True and the Trainer has no ema_decay. After
                the evaluation, if it and another one both report the metric of `Checkpoints(best=...)`.
            DataError: The dataset is empty, an iterable dataset yields nothing, or a worker process has died.
            LossError: On this rank, function returned something else; on all ranks, it returned a dict for some
                micro-batches and a single value for others.
            GroupError: On this rank, function called a collective.
            RankMismatchError: On all ranks, if they make different calls or have different data or numbers.
            PeerError: Another rank of the host has died, failed in a step, or does not come in time.
            UnisonoError: Ranks no longer agree on what comes next, after a failure that one of them caught.
        """
        refuse_inside("trainer.evaluate")
        batch_size = _read_arguments("trainer.evaluate", "the evaluated function", function, ema, batch_size)
        name = text("name", name)
        started_s = time.monotonic()
        call = f"trainer.evaluate(name={name!r}, ema={ema})"

        def compute() -> Any:
            self._compare(call)
            self._recovery.note("evaluation")
            settle(self._modules.values())
            loader = self._test_loader(dataset, batch_size, micro_batch_size, workers, collate_fn)
            models = self._averaged_model() if ema else self.model
            try:
                with evaluating(self._subjects.averages if ema else self._modules), self._carried.apart():
                    batches = loader.batches(epoch=0)
                    return evaluate(self._run, self._carried, function, models, batches, cut=self._cut_of(ema))
            finally:
                self._run.set_generators("loop", self._cursor.epoch, self._cursor.step, 0)

        def account(result: Any) -> None:
            self._note_evaluation(name, result)
            self._run.set_generators("loop", self._cursor.epoch, self._cursor.step, 0)

        def finish() -> Any:
            result = compute()
            tell(self._log, result, name=name, cursor=self._cursor, seconds=time.monotonic() - started_s)
            self._note_evaluation(name, result)
            return result

        return self._recovery.call(call, finish, account=account)

    def _note_evaluation(self, name: str, result: Any) -> None:
        self._loop.note_evaluation(name, result if isinstance(result, Mapping) else {name: result})

    def predict(
        self,
        function: Loss,
        dataset: Any,
        *,
        batch_size: int | None = None,
        micro_batch_size: int | None = None,
        workers: int = 0,
        collate_fn: Collate | None = None,
        ema: bool = False,
        to: str | os.PathLike[str] = "main",
    ) -> Any:
        """Return a function's outputs for all samples of a dataset, in its order, the same on any number of ranks.

        Every rank must call it, with an equal dataset. Random numbers and modes are those of `evaluate`. Outputs are
        sent in chunks of about 64 MB.

        Args:
            function: Called as function(model, micro_batch), without gradients and in evaluation mode. It returns a
                tensor whose first dimension is the samples, or a dict or tuple of such tensors; apart from the first
                dimension, shapes and types must be equal for all samples.
            dataset, micro_batch_size, workers, collate_fn: See `batches`.
            batch_size: See `evaluate`.
            ema: Use the averaged weights.
            to: "main" returns the outputs on rank 0 and None elsewhere; "all" returns them on all ranks; the path of a
                .safetensors file writes them there and returns the path, in the memory of a chunk; "iterator" returns
                an iterator over the outputs of each batch, as they are computed. Every rank must take the same number.

        Returns:
            CPU tensors in the form in which function returns them, a path, or an iterator.

        Raises:
            RuntimeError, DataError, GroupError: See `evaluate`; if one rank fails, the others raise PeerError.
            TypeError, ValueError: See `evaluate`, or `to` is none of these.
            LossError: On all ranks, if function returned something else.
            OSError: On rank 0, if the file cannot be written.
        """
        refuse_inside("trainer.predict")
        what = "the function of trainer.predict"
        batch_size = _read_arguments("trainer.predict", what, function, ema, batch_size)
        destination = read_destination(to)
        call = f"trainer.predict(to={os.fspath(destination)!r}, ema={ema})"
        if destination == "iterator":
            self._recovery.refuse("the script reads outputs from an iterator of trainer.predict, which are not kept")

        def compute() -> Any:
            self._compare(call)
            self._recovery.note("evaluation")
            settle(self._modules.values())
            keep = destination != "iterator"  # the loop may read the same dataset between two batches
            loader = self._test_loader(dataset, batch_size, micro_batch_size, workers, collate_fn, keep=keep)
            models = self._averaged_model() if ema else self.model
            modules = self._subjects.averages if ema else self._modules
            cut = self._cut_of(ema)
            predictor = Predictor(self._run, function, models, modules=modules, cursor=self._cursor, cut=cut)
            if destination == "iterator":
                begin = partial(self._compare, "the next batch of trainer.predict")
                return predictor.stream(loader.batches(epoch=0), begin)
            rows = loader.num_samples if isinstance(loader, MapLoader) else None
            return predictor.collect(loader.batches(epoch=0), destination, rows=rows)

        return self._recovery.call(call, compute, keeps=False)

    def _cut_of(self, ema: bool) -> CutModel | DividedModel | None:
        """Return the model that is called, or the averaged one, if it is cut or divided over ranks."""
        average = self._parts.divided_average if ema else None
        return self._cut if average is None else average.model

    def _test_loader(
        self,
        dataset: Any,
        batch_size: int | None,
        micro_batch_size: int | None = None,
        workers: int = 0,
        collate_fn: Collate | None = None,
        *,
        keep: bool = True,
    ) -> Loader:
        return self._loader_cache.loader(
            dataset,
            keep=keep,
            stream="evaluate",
            batch_size=batch_size or self._cursor.batch_size or 32 * self._run.virtual_ranks,
            shuffle=False,
            micro_batch_size=micro_batch_size,
            workers=workers,
            collate_fn=collate_fn,
            drop_last=False,
        )

    def _averaged_model(self) -> Any:
        modules = [*self._averaged().values()]
        return dict(zip(self.model, modules, strict=True)) if isinstance(self.model, Mapping) else modules[0]


def _read_arguments(call: str, what: str, function: Any, ema: Any, batch_size: Any) -> int | None:
    """Return the batch size of a call, after checks of it and of other arguments."""
    meant = f"{call}(function, dataset) takes a function of the model and a micro-batch first"
    arguments.function(what, function, meant=meant)
    flag("ema", ema)
    return None if batch_size is None else whole("batch_size", batch_size, least=1)
