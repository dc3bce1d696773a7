"""Checks that the ranks of one host do the same, by comparison in shared memory; see `engine.consistency`.

A check costs two words and a barrier. In the shared engine the barrier is the one at which gradients are awaited.
"""

from __future__ import annotations

from unisono.engine.consistency import BROKEN, StepDescription, settle_differences
from unisono.engine.shared.shared_runtime import SharedRuntime
from unisono.engine.step_transaction import Passed, StepTransaction
from unisono.errors import UnisonoError

__all__ = ["SharedConsistencyCheck"]

# Columns of the runtime's words, in two sets that take turns: a rank may publish its next call while others still read
# its last one, but it cannot reach the call after that.
_ATTEMPT, _FINGERPRINT, _COLUMNS = 0, 1, 2

_PLACE = "where the weights lie (anew after load_state_dict)"


class SharedConsistencyCheck:
    """Compares by words in shared memory; see `ConsistencyCheck`.

    Args:
        runtime: The shared memory of the ranks.
        counts_attempts: True if `enter` is called for every step that begins, even for those that fail before `begin`.
    """

    def __init__(self, runtime: SharedRuntime, *, counts_attempts: bool) -> None:
        self._runtime, self._counts_attempts = runtime, counts_attempts
        self._intent: StepDescription | None = None
        self._outside = StepTransaction()
        """Stands in for the step if the caller has none, in calls of the Trainer that are not steps."""
        self._published = 0
        self._compared = 0
        self._is_broken = False
        self.attempt = 0
        """The number of calls that this rank has begun, including steps that failed."""
        self.is_open = False

    def intend(self, intent: StepDescription) -> None:
        """See `ConsistencyCheck`."""
        self._intent = intent

    def enter(self) -> None:
        """Count a call that this rank begins, and release the last step's gradient."""
        self.attempt += 1
        self._runtime.release_gradients()

    def begin(self, step: StepTransaction | None = None, *, anew: bool = False) -> None:
        """See `ConsistencyCheck`.

        Args:
            step: The current step. If Ctrl-C comes here, it raises KeyboardInterrupt later.
            anew: True if this rank is about to move weights, which all ranks must do together.
        """
        assert self._intent is not None
        if self._is_broken:
            raise UnisonoError(BROKEN)
        if self.is_open:
            self._wait("waiting for ranks to give a step up", step or self._outside)  # all of them did
        if not self._counts_attempts:
            self.enter()
        runtime, first = self._runtime, self._compared % 2 * _COLUMNS
        runtime.publish(first + _ATTEMPT, self.attempt)
        self._published = self._intent.fingerprint ^ anew
        runtime.publish(first + _FINGERPRINT, self._published)
        self.is_open = True
        runtime.arrive()

    def check(self, what: str = "comparing what ranks do", step: StepTransaction | None = None) -> Passed:
        """Compare at a barrier; see `ConsistencyCheck`.

        Args:
            what: The name of the wait in errors.
            step: The current step. If Ctrl-C comes here, it raises KeyboardInterrupt later; without it, this call does.

        Returns:
            The barrier, which has been passed.

        Raises:
            UnisonoError: On all ranks, if they are at different steps.
        """
        assert self._intent is not None
        runtime, first = self._runtime, self._compared % 2 * _COLUMNS
        passed = self._wait(what, step or self._outside)
        attempts = runtime.published(first + _ATTEMPT, passed)
        if attempts.count(self.attempt) != len(attempts):
            runtime.abort(f"rank {runtime.rank} found ranks at different steps: {attempts}")
            raise UnisonoError(
                f"ranks are at different steps: they have begun {attempts} calls of the Trainer. A step that fails on "
                "one rank must fail on all, or end the job."
            )
        numbers = runtime.published(first + _FINGERPRINT, passed)
        if numbers.count(self._published) != len(numbers):
            anew = self._published != self._intent.fingerprint
            settle_differences(runtime.world, self._intent, {_PLACE: "anew" if anew else "before"})
        if step is None:
            self._outside.raise_interrupt()
        return passed

    def compare(self, intent: StepDescription) -> None:
        """See `ConsistencyCheck`."""
        self.intend(intent)
        if self._counts_attempts:
            self.enter()
        self.begin()
        self.check("waiting for all ranks to come to a call of the Trainer")

    def break_off(self) -> None:
        """See `ConsistencyCheck`."""
        self._is_broken = True

    def _wait(self, what: str, step: StepTransaction) -> Passed:
        passed = self._runtime.barrier(what, step, arrived=True)
        self.is_open = False
        self._compared += 1
        return passed
