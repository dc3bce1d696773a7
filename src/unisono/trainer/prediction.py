"""Prediction: the outputs of a function for every sample of a dataset, in its order, on any number of ranks.

Each rank computes its virtual ranks' shares of every batch, as in training. After a chunk of some batches, one small
exchange tells all ranks whether a rank failed, and if so all of them raise; then the outputs of the chunk are sent. The
memory for this is that of a chunk. Start reading at `Predictor.collect`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from unisono.collectives.rank_errors import RankError, gather_or_raise
from unisono.data.batch import Batch
from unisono.errors import DataError, LossError
from unisono.job.user_function import refuse_inside
from unisono.parallel.pipeline.cut_model import CutModel
from unisono.parallel.sharding.divided_model import DividedModel
from unisono.text import a_type, list_first
from unisono.trainer.modules import evaluating
from unisono.trainer.output_sinks import FileSink, MemorySink, OutputSink
from unisono.trainer.outputs import Layout, Rows, place_rows, read_outputs
from unisono.trainer.run_context import RunContext
from unisono.trainer.sample_results import SampleResults
from unisono.trainer.snapshot import Cursor
from unisono.trainer.step import Loss

__all__ = ["Destination", "Predictor", "read_destination"]

Destination: TypeAlias = Literal["main", "all", "iterator"] | Path
"""The destination of outputs."""

_CALL = "trainer.predict"
_CHUNK_NBYTES = 64 << 20
"""About how many bytes of outputs, over all ranks, are computed before they are sent."""
_SHOWN = 4
_SUFFIX = ".safetensors"


def read_destination(to: Any) -> Destination:
    """Read the argument `to` of `Trainer.predict`.

    Raises:
        TypeError: It is neither a string nor a path.
        ValueError: It is another string, or the path of another kind of file.

    >>> read_destination("all"), read_destination("out/test.safetensors")
    ('all', PosixPath('out/test.safetensors'))
    """
    if isinstance(to, str) and to in ("main", "all", "iterator"):
        return to  # type: ignore[return-value]  # mypy does not narrow by `in`
    if not isinstance(to, str | os.PathLike):
        raise TypeError(f'to={to!r} is {a_type(to)}; give "main", "all", "iterator" or the path of a {_SUFFIX} file')
    path = Path(os.fsdecode(to))
    if path.suffix != _SUFFIX:
        raise ValueError(f'to={os.fspath(to)!r} must be "main", "all", "iterator" or a path that ends in {_SUFFIX}')
    return path


_Example: TypeAlias = tuple[Layout, tuple[int, ...]]
"""A form of outputs, and the samples for which the function returned it."""


class _Report(NamedTuple):
    """The report of one rank to the others about its part of a chunk."""

    sizes: tuple[int, ...]
    """Samples of each batch, over all ranks."""
    ended: bool
    """True if no batch is left."""
    examples: tuple[_Example, ...]
    """The different forms of outputs here; none if this rank had no sample."""


@dataclass(slots=True)
class _Chunk:
    """The part of some batches that one rank computes."""

    failure: Exception | None = None
    sizes: list[int] = field(default_factory=list)
    ended: bool = False
    examples: list[_Example] = field(default_factory=list)
    rows: dict[str, list[Tensor]] = field(default_factory=dict)
    """The rows of this rank's virtual ranks, batch by batch and in their order."""

    def report(self) -> _Report:
        """Return the report for the other ranks."""
        return _Report(tuple(self.sizes), self.ended, tuple(self.examples))


class Predictor:
    """Computes the outputs of a function for the batches of a dataset.

    Args:
        run: The constants of the run.
        function: Called as function(models, micro_batch); see `outputs.read_outputs` for what it returns.
        models: Its first argument.
        modules: The modules among them, which are put into evaluation mode.
        cursor: The place in the run, for the random numbers that the loop draws afterwards.
        cut: The model, if it is cut over ranks.
    """

    def __init__(
        self,
        run: RunContext,
        function: Loss,
        models: Any,
        *,
        modules: Mapping[str, nn.Module],
        cursor: Cursor,
        cut: CutModel | DividedModel | None = None,
    ) -> None:
        self._run, self._modules, self._cursor = run, modules, cursor
        self._results = SampleResults(
            run, function, models, what="the function of trainer.predict", carried=None, cut=cut
        )
        self._is_cut = isinstance(cut, CutModel)
        self._blocks = [run.results_of(rank) for rank in range(run.world.size)]

    def collect(self, batches: Iterator[Batch], destination: Literal["main", "all"] | Path, *, rows: int | None) -> Any:
        """Return the outputs of all samples, or write them to a file. Every rank must call it.

        Args:
            batches: This rank's part of the batches of the dataset, in its order.
            destination: "main" returns outputs on rank 0 and None elsewhere, "all" on all ranks; with a path they are
                written there, and the path is returned on all ranks.
            rows: The number of samples, None if it is not known.

        Raises:
            LossError: The function returned outputs that `read_outputs` refuses, or of different forms.
            DataError: Ranks found different numbers of samples.
            OSError: On rank 0, if the file cannot be written.
            PeerError: Another rank failed.
        """
        sink: MemorySink | FileSink | None = None
        opened = _Chunk()
        if isinstance(destination, Path):
            try:
                sink = FileSink(destination, rows=rows) if self._run.world.rank == 0 else None
            except OSError as error:
                opened.failure = error
            self._exchange(opened)
        elif self._run.world.rank == 0 or destination == "all":
            sink = MemorySink(rows)
        try:
            with evaluating(self._modules):
                self._fill(sink, batches, everywhere=destination == "all")
        finally:
            if sink is not None:
                sink.close()
            self._run.set_generators("loop", self._cursor.epoch, self._cursor.step, 0)
        if isinstance(destination, Path):
            return destination
        return sink.outputs() if isinstance(sink, MemorySink) else None

    def stream(self, batches: Iterator[Batch], begin: Callable[[], None]) -> Iterator[Any]:
        """Yield the outputs of each batch, on every rank. Every rank must ask for the same number.

        Between two batches, modules are in their own modes, and gradients are on.

        Args:
            batches: See `collect`.
            begin: Called before each batch, and before the end, to check that all ranks ask for it.

        Raises:
            LossError, DataError, PeerError: See `collect`.
        """
        for number in count():
            refuse_inside("the iterator of trainer.predict")
            begin()
            try:
                with evaluating(self._modules):
                    chunk = self._compute(batches, most=1)
                    layout = self._exchange(chunk)
                    rows = None if layout is None else self._send(chunk, layout, everywhere=True)
            finally:
                # The loop draws different numbers after each batch.
                self._run.set_generators("predict/loop", self._cursor.epoch, self._cursor.step, number)
            if layout is None or rows is None:
                return
            yield layout.rebuild(rows)

    def _fill(self, sink: OutputSink | None, batches: Iterator[Batch], *, everywhere: bool) -> None:
        """Compute all batches, and pass their outputs to this rank's sink."""
        first: _Example | None = None
        failure: Exception | None = None
        most, ended = 1, False
        while not ended:
            chunk = self._compute(batches, most=most, failure=failure)
            layout = self._exchange(chunk, first)
            ended = chunk.ended
            rows = None if layout is None else self._send(chunk, layout, everywhere=everywhere)
            if layout is not None and first is None:
                first = layout, ()
                # Batches but the last have one size, so this number is equal on all ranks.
                most = max(1, _CHUNK_NBYTES // max(1, layout.row_nbytes * chunk.sizes[0]))
            try:
                if sink is not None and layout is not None and rows is not None:
                    sink.take(layout, rows)
                if sink is not None and ended:
                    sink.finish()
            except Exception as error:  # of any class: it is raised once the other ranks know
                failure = error
        self._exchange(_Chunk(failure))

    def _compute(self, batches: Iterator[Batch], *, most: int, failure: Exception | None = None) -> _Chunk:
        """Compute this rank's shares of the next batches, up to the first that fails or has another form.

        Args:
            batches: The batches.
            most: The largest number of them.
            failure: The error of this rank before, after which it computes nothing.
        """
        chunk = _Chunk(failure)
        if self._run.exchange is not None:
            self._run.exchange.begin(is_step=False)
        try:
            while failure is None and len(chunk.sizes) < most and len(chunk.examples) < 2:
                batch = next(batches, None)
                if batch is None:
                    chunk.ended = True
                    break
                self._add(chunk, batch)
        except Exception as error:  # of any class: it is raised once the other ranks know
            if self._is_cut:  # they may wait for this rank's part of the model instead
                raise
            chunk.failure = error
        finally:
            if self._run.exchange is not None:
                self._run.exchange.drain()
        return chunk

    def _add(self, chunk: _Chunk, batch: Batch) -> None:
        chunk.sizes.append(batch.size)
        for _, micro_batch, result in self._results.of(batch):
            layout, rows = read_outputs(result, samples=len(micro_batch.indices))
            if not chunk.examples or layout != chunk.examples[0][0]:
                chunk.examples.append((layout, tuple(micro_batch.indices)))
                if len(chunk.examples) > 1:
                    return
            for name, tensor in rows.items():
                chunk.rows.setdefault(name, []).append(tensor)

    def _exchange(self, chunk: _Chunk, first: _Example | None = None) -> Layout | None:
        """Exchange reports about the chunk, and raise on all ranks if one has failed.

        Args:
            chunk: This rank's part.
            first: The form of outputs in the first chunk.

        Returns:
            The form of the outputs, None if there are none.
        """
        everyone = gather_or_raise(
            self._run.world, chunk.report(), chunk.failure, _CALL, work=_CALL, convert=_as_own_error
        )
        for rank, report in enumerate(everyone):
            for example in report.examples:
                if first is None:
                    first = example
                elif example[0] != first[0]:
                    raise LossError(_describe_difference(first, example))
            if report.sizes != everyone[0].sizes or report.ended != everyone[0].ended:
                raise DataError(
                    f"rank {rank} read {sum(report.sizes)} samples in {len(report.sizes)} batches where rank 0 read "
                    f"{sum(everyone[0].sizes)} in {len(everyone[0].sizes)}: an iterable dataset must yield the same "
                    "samples in the same order on every rank."
                )
        return first[0] if first is not None and chunk.sizes else None

    def _send(self, chunk: _Chunk, layout: Layout, *, everywhere: bool) -> Rows | None:
        """Return the outputs of a chunk in the order of their samples; None on a rank that gets none."""
        own = {
            column.name: torch.cat(chunk.rows[column.name]) if column.name in chunk.rows else column.empty(0)
            for column in layout.columns
        }
        chunk.rows.clear()
        world = self._run.world
        parts = world.gather(own, _CALL) if everywhere else world.gather_to_main(own, _CALL)
        if parts is None:
            return None
        return {
            column.name: place_rows(
                column,
                [part[column.name] for part in parts],
                blocks=self._blocks,
                sizes=chunk.sizes,
                virtual_ranks=self._run.virtual_ranks,
            )
            for column in layout.columns
        }


def _as_own_error(_rank: int, error: RankError) -> Exception | None:
    """Return an error about the outputs or the data as it is: it does not depend on the rank that found it."""
    kind = {"LossError": LossError, "DataError": DataError}.get(error.kind)
    return None if kind is None else kind(error.message)


def _describe_difference(first: _Example, other: _Example) -> str:
    of_first = f" for samples {list_first(first[1], _SHOWN)}" if first[1] else " for earlier samples"
    return (
        f"the function of trainer.predict returned {first[0]}{of_first} and {other[0]} for samples "
        f"{list_first(other[1], _SHOWN)}: outputs become one tensor, so all samples must have the same shape and type. "
        "Pad them to one length, such as with torch.nn.functional.pad."
    )
