"""The order of events in a run: its epochs and their batches.

`batch_steps` has the steps on the batch in the loop, and `save_points` saves the state of the run when the user's loop
asks for the next batch or epoch. `trainer` has the calls of users and describes their arguments. Start reading at
`Loop.epochs`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import fields

from unisono.data.batch import Batch
from unisono.data.joined_loader import JoinedLoader
from unisono.data.sampled_loader import SampledLoader
from unisono.data.shard_loader import ShardLoader
from unisono.trainer.batch_steps import BatchSteps
from unisono.trainer.batches_ahead import BatchesAhead
from unisono.trainer.epoch import EpochResult
from unisono.trainer.epoch_batches import EpochBatches
from unisono.trainer.failure_record import FailureRecord
from unisono.trainer.loader_cache import Loader
from unisono.trainer.optimizer_steps import OptimizerSteps
from unisono.trainer.rollouts import Rollouts
from unisono.trainer.run_events import RunEvents
from unisono.trainer.save_points import SavePoints
from unisono.trainer.snapshot import Cursor, check_same_data
from unisono.trainer.state_digests import RegularDigests
from unisono.trainer.trainer_parts import TrainerParts
from unisono.watch import EventLog

__all__ = ["Loop"]

_Loader = Loader | SampledLoader | JoinedLoader | Rollouts


class Loop:
    """Executes one run, from the place of its cursor to its end.

    Args:
        parts: The parts of the run.
        log: Gets its events.
        keeps: True if the run has a directory: then it is saved, also when the process is ended from outside.
    """

    def __init__(self, parts: TrainerParts, log: EventLog, *, keeps: bool) -> None:
        self._recovery, self._run, self._cursor = parts.recovery, parts.run, parts.cursor
        self._recovers = parts.recovery.is_linked
        self.history = parts.history
        self.optimizers = OptimizerSteps(parts)
        self._carried = parts.carried
        self._epochs: int | None = None
        self._last_step: int | None = None
        self._turn = 0
        self._exhausted: int | None = None
        """The epoch whose batches have all been asked for."""
        self._cut_off: int | None = None
        """The epoch in which the loop has asked for a batch after the last step of the run."""
        self._is_dealing = False
        position = self._recovery.position
        self.began = self._cursor.place if position is None else position.began
        """The place of the run where the first processes of the job began."""
        # Also on a new rank: what the script draws before its loop is equal on all ranks.
        self._run.set_generators("loop", *self.began[:2], 0)
        self._asked = self._cursor.values(), len(self.history)
        self._run_events = RunEvents(parts, log, keeps=keeps)
        self._clock = parts.run.clock
        self._clock.attach(log)
        self._saves = SavePoints(parts, log, keeps=keeps)
        self.steps = BatchSteps(parts, self.optimizers, log, self._saves)
        """Performs the steps on the batches."""
        self._failures = FailureRecord(log, parts, keeps=keeps)
        self._digests = RegularDigests(parts, log)
        if keeps:
            self._saves.heed_signals(self._can_stop)

    @property
    def results(self) -> list[EpochResult]:
        """The results of the epochs that have been done by `Trainer.fit`, since the start of the run."""
        return [EpochResult.restored(state) for state in self._cursor.results]

    @property
    def asked(self) -> tuple[Cursor, int]:
        """The cursor and the number of evaluations when the loop last asked for a batch or an epoch, for a recovery."""
        values, evaluations = self._asked
        return Cursor.of(values), evaluations

    def add_result(self, result: EpochResult) -> None:
        """Add the result of an epoch to the run's state; one that is done again replaces what there was."""
        before = [state for state in self._cursor.results if state["epoch"] < result.epoch]
        self._cursor.results = [*before, result.state()]

    @property
    def continues(self) -> bool:
        """True if the run was resumed after some steps, and no loop has gone on with it yet."""
        return self.began[2] > 0 and not self._turn

    @property
    def is_epoch_done(self) -> bool:
        """True if all batches of the current epoch have been dealt."""
        return self._exhausted == self._cursor.epoch

    def end_with_epoch(self) -> bool:
        """Let the loop over epochs end after the current one; return False if that has batches left."""
        if self.is_epoch_done:
            self._last_step = self._cursor.total_steps
        return self.is_epoch_done

    def epochs(self, epochs: int, max_steps: int | None) -> Iterator[int]:
        """Yield the epochs that are left; see `Trainer.epochs`."""
        if self._epochs is not None:
            raise ValueError(
                "a loop over trainer.epochs is under way, and a run has one at a time: end that one first. It ends "
                "after its last epoch, by break, or when its iterator is dropped."
            )
        self._run_events.begin()
        cursor = self._cursor
        self._saves.hold("trainer.epochs")
        self._epochs, self._last_step, self._exhausted, self._cut_off = epochs, max_steps, None, None
        self._failures.begin(self)
        try:
            if cursor.epoch >= epochs or self._is_over():
                self._tell_over(epochs, max_steps)
            while cursor.epoch < epochs and not self._is_over():
                self._ask(epoch_ended=True)
                self._saves.is_asking = False
                self._recovery.begin_epoch()
                self._run.set_generators("epoch", cursor.epoch)
                yield cursor.epoch
                if self._is_cut_off():
                    break  # In mid-epoch: the next start continues there. An epoch that the loop has left is over.
                self._end_epoch()
            in_mid_epoch = self._is_over() and cursor.step > 0
            if not in_mid_epoch:
                self._ask(finishing=True)
            self._saves.finish(in_mid_epoch=in_mid_epoch)
            self._run.set_generators("loop", cursor.epoch, cursor.step, 0)
            self._saves.release()
        except GeneratorExit:
            self._failures.leave(inspect.currentframe())
            self._saves.save_left()
            raise
        finally:
            self._epochs = self._last_step = None
            self._recovery.leave_epochs()
        self._failures.end()
        self._run_events.tell_end(is_whole=self._saves.is_whole)
        self._saves.tell_drill()
        self._saves.end_loop()

    def next_epoch(self) -> int:
        """Return the epoch whose batches come next.

        Raises:
            ValueError: All batches of the current epoch have been yielded.
        """
        cursor = self._cursor
        # Without a loop over epochs, which was left after its last batch, the next epoch begins with the first batch.
        is_new = self._exhausted == cursor.epoch
        if is_new and self._epochs is not None:
            raise ValueError(
                f"the batches of epoch {cursor.epoch} have all been dealt: ask for batches once in each round of "
                "trainer.epochs. To train on several datasets, give them to trainer.batches by name, as "
                'trainer.batches({"a": dataset, "b": other}, batch_size={"a": 16, "b": 64}), for samples of each in '
                "every step; or join them by torch.utils.data.ConcatDataset, as one dataset whose samples are mixed."
            )
        return cursor.epoch + is_new

    def batches(self, loader: _Loader, ahead: BatchesAhead | None = None) -> EpochBatches:
        """Return the batches that are left of the current epoch; see `Trainer.batches` and `Trainer.rollouts`.

        Args:
            loader: Has the batches.
            ahead: Reads rows of tables ahead; None: nothing does.

        Raises:
            ValueError: At once, if the epoch was begun with other numbers of samples, or all its batches have been
                yielded.
        """
        cursor = self._cursor
        is_new = self.next_epoch() != cursor.epoch
        if isinstance(loader, Rollouts | ShardLoader):
            self._recovery.refuse("ranks make the batches of an epoch together, and a new rank cannot go on with them")
        elif self._epochs is None and self._turn:
            self._recovery.refuse(
                "a new rank cannot know how far the script has come that loops without trainer.epochs"
            )
        if cursor.step and not is_new:
            check_same_data(cursor, {"order": None, **loader.identity})
        left = None if loader.steps is None else loader.steps - (0 if is_new else cursor.step)
        if left is not None and self._last_step is not None:
            left = max(0, min(left, self._last_step - cursor.total_steps))
        return EpochBatches(self._batches_watched(loader, ahead), left)

    def _batches_watched(self, loader: _Loader, ahead: BatchesAhead | None) -> Generator[Batch, None, None]:
        """Yield the batches that are left. Where there is no loop over epochs, it is this one that may fail."""
        if self._epochs is not None:
            yield from self._batches_left(loader, ahead)
            return
        self._failures.begin(self)
        try:
            yield from self._batches_left(loader, ahead)
        except GeneratorExit:
            self._failures.leave(inspect.currentframe())
            raise
        self._failures.end()

    def _batches_left(self, loader: _Loader, ahead: BatchesAhead | None) -> Generator[Batch, None, None]:
        cursor, steps = self._cursor, self.steps
        within_epochs = self._epochs is not None
        if not within_epochs:
            self._begin_alone()
            self._recovery.begin_epoch()
        self._begin_batches(loader)
        self._turn += 1
        turn = self._turn
        self._tell_epoch(loader)
        self._is_dealing = True
        try:
            if not within_epochs:
                self._ask()
            self._note_asked()
            self._saves.join_save()
            loader, batches = self._left(loader, ahead)
            while True:
                batch, ends_early = self._next_batch(loader, batches)
                if batch is None:
                    break
                steps.batch, steps.calls = batch, 0
                if self._recovers:
                    self._note_dealt(batch)
                self._run.set_generators("loop", batch.epoch, batch.step, 0)
                self._saves.is_asking = False
                yield batch
                if turn != self._turn:
                    raise ValueError(
                        f"another loop over trainer.batches has begun since step {batch.step} of epoch {batch.epoch} "
                        "was dealt by this one: deal the batches of an epoch by one loop."
                    )
                cursor.step = batch.step + 1  # also if the loop has not used the batch
                steps.batch = None
                self._ask()
                if self._recovers and self._recovery.resizes:
                    loader, batches = self._left(loader, ahead)
            steps.batch = None
            self._run.set_generators("loop", cursor.epoch, cursor.step, 0)
            if ends_early:
                # The run ends in mid-epoch: the loop's code after an epoch is not part of it.
                self._cut_off = cursor.epoch
                self._saves.save_if_whole()
            elif within_epochs:
                self._exhausted = cursor.epoch
            else:
                self._saves.gather()
                self._end_epoch()
            self._saves.is_asking = False
        finally:
            if turn == self._turn:
                self._is_dealing = False

    def _tell_epoch(self, loader: _Loader) -> None:
        self._run_events.tell_epoch(
            steps=loader.steps, num_samples=loader.num_samples, epochs=self._epochs, last_step=self._last_step
        )
        self.steps.begin()

    def _left(self, loader: _Loader, ahead: BatchesAhead | None) -> tuple[_Loader, Iterator[Batch]]:
        """Return the loader of this rank's part and the batches that are left, after a change of the number of ranks.

        A new rank may also come while the others wait for one.
        """
        if self._recovery.resizes:
            assert not isinstance(loader, Rollouts | ShardLoader)  # with those, the number of ranks never changes
            self._recovery.resize()
            loader = loader.divided(self._run.block)
            check_same_data(self._cursor, {"order": None, **loader.identity})
        batches = loader.batches(epoch=self._cursor.epoch, first_step=self._cursor.step)
        return loader, batches if ahead is None else ahead.deal(batches)

    def _begin_batches(self, loader: _Loader) -> None:
        """Record the data of the epoch, and begin to sum its losses."""
        cursor = self._cursor
        for key, value in {"order": None, **loader.identity}.items():
            setattr(cursor, key, value)
        if not cursor.step:
            cursor.loss_sum = cursor.loss_weight = 0.0
            self._carried.begin_epoch()

    def _next_batch(self, loader: _Loader, batches: Iterator[Batch]) -> tuple[Batch | None, bool]:
        """Return the next batch, None if the loop gets no more; and True if the run ends before the epoch does."""
        if isinstance(loader, Rollouts):
            # The user's function makes the batch: not for nothing, and it may change the run's state.
            if self._is_over() and self._cursor.step < loader.steps:
                return None, True
            self._saves.is_asking = False
        begun_s = time.perf_counter() if self._clock.is_measuring else None
        try:
            batch = next(batches, None)
        except BaseException:
            self._saves.save_if_whole()
            raise
        if begun_s is not None:
            self._clock.add_data(time.perf_counter() - begun_s)
        return (None, True) if batch is not None and self._is_over() else (batch, False)

    def note_evaluation(self, name: str, values: Mapping[str, float]) -> None:
        """Add the results of an evaluation to the history; see `SavePoints.note_evaluation`."""
        self._saves.note_evaluation(name, values)

    def save(self, tag: str | None = None) -> None:
        """Save a checkpoint now; see `Trainer.save`."""
        self._saves.save(tag)

    def _ask(self, *, epoch_ended: bool = False, finishing: bool = False) -> None:
        """Note that the loop asks for its next batch or epoch, so that its state is complete; save and stop if due."""
        if self._recovers:
            self._note_asked()
        if self._recovery.is_joined:  # otherwise the state is not the run's yet
            self._digests.tell_if_due(self._cursor.total_steps)
            self._saves.ask(epoch_ended=epoch_ended, finishing=finishing)
        else:
            self._saves.join_save()

    def _note_asked(self) -> None:
        """Note for a recovery where the loop asks for its next batch or epoch."""
        self._recovery.ask()
        self._asked = self._cursor.values(), len(self.history)

    def _note_dealt(self, batch: Batch) -> None:
        """Note for a recovery that the loop gets a batch."""
        if self._recovery.is_on:
            self.steps.versions = batch.versions()
        self._recovery.note("loop")

    def _begin_alone(self) -> None:
        """Prepare the batches of an epoch as a loop over epochs does, where there is none."""
        self._saves.hold("trainer.batches beginning")
        if self._exhausted == self._cursor.epoch:
            self._end_epoch()

    def _end_epoch(self) -> None:
        """Advance the cursor to the next epoch."""
        self._cursor.epoch, self._cursor.step = self._cursor.epoch + 1, 0
        self.optimizers.end_epoch()

    def _tell_over(self, epochs: int, max_steps: int | None) -> None:
        """Report that there is nothing to do, if steps have been asked for and done."""
        is_done = self._cursor.total_steps and epochs and max_steps != 0
        if is_done and self._recovery.is_joined:
            self._run_events.tell_over(epochs, max_steps, first_step=self.began[2])

    def _is_over(self) -> bool:
        return self._last_step is not None and self._cursor.total_steps >= self._last_step

    def _is_cut_off(self) -> bool:
        """Return True if the run has ended before its epoch."""
        return self._is_over() and self._cut_off == self._cursor.epoch

    def raise_pending(self) -> None:
        """Raise the exception of a signal that was put off."""
        self._saves.raise_pending()

    def go_on(self, *, cursor: Cursor | None = None, calls: int | None = None) -> None:
        """Go on after a recovery.

        Args:
            cursor: The cursor of the rank whose place this rank takes; None if it keeps its own.
            calls: The number of steps done there with the batch in the loop; None if this rank has counted them.
        """
        if cursor is not None:
            for each in fields(cursor):
                setattr(self._cursor, each.name, getattr(cursor, each.name))
        if calls is not None:
            self.steps.calls = calls
        if self._cursor.place == self.asked[0].place and not self.steps.calls:
            self._saves.note_state()  # the state is the one from when the loop asked

    def _can_stop(self) -> bool:
        """Return True if a signal may end the run at once."""
        return self._saves.can_stop(is_looping=self._epochs is not None or self._is_dealing)
