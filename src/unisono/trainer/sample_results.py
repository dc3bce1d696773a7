"""The results of a user's function for the micro-batches of a batch, without gradients, wherever they are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from unisono.data.batch import Batch, MicroBatch, Share
from unisono.job.user_function import count_collectives, enter, leave, refuse_collectives_since
from unisono.parallel.pipeline.cut_model import CutModel
from unisono.parallel.pipeline.plan_cache import model_state
from unisono.parallel.pipeline.stage_turns import StageTurns
from unisono.parallel.sharding.divided_model import DividedModel
from unisono.trainer.buffer_writes import BufferWrites
from unisono.trainer.carried import CarriedStates
from unisono.trainer.modules import to_device
from unisono.trainer.run_context import RunContext

__all__ = ["SampleResults"]


class SampleResults:
    """Calls a function for each micro-batch of this rank's shares.

    Args:
        run: The constants of the run.
        function: Called as function(models, micro_batch).
        models: Its first argument.
        what: The function, for messages.
        carried: The state of virtual ranks; None leaves it alone.
        cut: The model, if it is cut or divided over ranks. In one that is cut, writes to buffers are not looked for.
    """

    def __init__(
        self,
        run: RunContext,
        function: Callable[[Any, Any], Any],
        models: Any,
        *,
        what: str,
        carried: CarriedStates | None,
        cut: CutModel | DividedModel | None,
    ) -> None:
        self._run, self._function, self._models = run, function, models
        self._what, self._carried, self._cut = what, carried, cut
        self._writes = BufferWrites(None if isinstance(cut, CutModel) else models)

    def of(self, batch: Batch) -> Iterator[tuple[Share, MicroBatch, Any]]:
        """Yield the result for each micro-batch of a batch; where a model is cut, on the ranks of the last stage."""
        if isinstance(self._cut, DividedModel):
            return iter(self._of_divided(self._cut, batch))
        return self._of_whole(batch) if self._cut is None else iter(self._of_stages(self._cut, batch))

    def _seed(self, batch: Batch, share: Share, part: int) -> None:
        # The same for all functions: the same one draws the same numbers wherever it is called.
        self._run.set_generators("evaluate/model", batch.step, share.virtual_rank, part)

    def _of_whole(self, batch: Batch) -> Iterator[tuple[Share, MicroBatch, Any]]:
        for share in batch.shares:
            for part, micro_batch in enumerate(share.micro_batches):
                self._seed(batch, share, part)
                items = to_device(micro_batch.items, self._run.device)
                counted = count_collectives()
                inside = enter(self._what)
                try:
                    if self._carried is not None:
                        self._carried.begin(share.virtual_rank, micro_batches=len(share.micro_batches))
                    result = self._function(self._models, items)
                    refuse_collectives_since(counted)
                    self._writes.refuse(self._what)
                    if self._carried is not None:
                        self._carried.end()
                finally:
                    leave(inside)
                yield share, micro_batch, result

    def _of_divided(self, divided: DividedModel, batch: Batch) -> list[tuple[Share, MicroBatch, Any]]:
        if divided.division.whole == "everywhere" or divided.division.keeps_weights:
            return list(self._of_whole(batch))
        # All results first: until the exchange has ended, other ranks wait for this one's part of the model.
        divided.division.exchange.begin()
        with divided.computing():
            results = list(self._of_whole(batch))
        divided.division.exchange.end()
        return results

    def _of_stages(self, cut: CutModel, batch: Batch) -> list[tuple[Share, MicroBatch, Any]]:
        cut.refuse_writes(self._models)
        turns = cut.turns(self._models, backward=False)
        passes = _BatchPasses(batch, self._seed, turns, last_stage=cut.ranks.stages - 1)
        inputs = [(to_device(micro_batch.items, self._run.device),) for _, _, micro_batch in passes.parts]
        inside = enter(self._what)
        try:
            first = next(iter(inputs), None)
            cut.divide(self._function, first, micro_batches=len(inputs), loss_of=None)
            state = model_state(self._models)
            plans = [cut.plan(self._models, self._function, each, state) for each in inputs]
            with turns:
                cut.runner(self._models).infer(self._function, inputs, plans, passes)
                turns.finish()
        finally:
            leave(inside)
        return passes.results


class _BatchPasses:
    """Forward passes of a batch; see `runner.Passes`."""

    def __init__(
        self, batch: Batch, seed: Callable[[Batch, Share, int], None], turns: StageTurns, *, last_stage: int
    ) -> None:
        self._batch, self._seed, self._last_stage = batch, seed, last_stage
        self.turn_to = turns.turn_to
        self.parts = [(share, part, one) for share in batch.shares for part, one in enumerate(share.micro_batches)]
        self.results: list[tuple[Share, MicroBatch, Any]] = []

    def begin_forward(self, stage: int, micro_batch: int) -> None:
        if not stage:
            share, part, _ = self.parts[micro_batch]
            self._seed(self._batch, share, part)

    def end_forward(self, stage: int, micro_batch: int, result: Any) -> None:
        if stage == self._last_stage:
            share, _, one = self.parts[micro_batch]
            self.results.append((share, one, result))

    def begin_backward(self, stage: int, micro_batch: int) -> tuple[()]:
        raise NotImplementedError

    def begin_adding(self, stage: int, micro_batch: int) -> None:
        raise NotImplementedError

    def end_backward(self, stage: int, micro_batch: int) -> None:
        raise NotImplementedError
