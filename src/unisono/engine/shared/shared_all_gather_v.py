"""All-gather of messages of any size among the ranks of one host: each writes to shared memory, and all read there.

The calls are those of `engine.all_gather_v.AllGatherV`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unisono.engine.all_gather_v import packed_nbytes, write_parts
from unisono.engine.shared.shared_runtime import SharedRuntime
from unisono.engine.step_transaction import StepTransaction

__all__ = ["SharedAllGatherV"]


class SharedAllGatherV:
    """A slot of shared memory for each rank.

    A message that was posted can be read after the next barrier, which the step must have passed. All ranks must have
    read it when they arrive at the barrier after that, and no rank may post again before it; the barriers of a step
    ensure both.

    Args:
        runtime: The shared memory of the ranks.
        word: The column of the runtime's words that is reserved for this object.
    """

    def __init__(self, runtime: SharedRuntime, *, word: int) -> None:
        self._runtime, self._word = runtime, word
        self._capacity = self._posted_at = 0
        self._slots: Sequence[Tensor] = ()
        self._parts: Sequence[Tensor] = ()

    def post(self, parts: Sequence[Tensor]) -> None:
        """Write the message, if it fits; see `AllGatherV`."""
        nbytes = packed_nbytes(parts)
        self._parts, self._posted_at = parts, self._runtime.barriers
        self._runtime.publish(self._word, nbytes)
        if self._slots and nbytes <= self._capacity:  # a rank without leaves posts 0 bytes, even before there are slots
            write_parts(parts, self._slots[self._runtime.rank])

    def collect(self, step: StepTransaction) -> Sequence[Tensor]:
        """Return the messages. If one did not fit, all ranks make larger slots and write again; see `AllGatherV`."""
        assert step.passed is not None and step.passed > self._posted_at, "no barrier has been passed since `post`"
        runtime, longest = self._runtime, max(self._runtime.published(self._word, step.passed))
        if longest > self._capacity:
            # All ranks see the same lengths, and so come here together. Pages that are not written take no memory.
            self._capacity = 1 << longest.bit_length()
            segment = runtime.segment(self._capacity * runtime.size, "sparse gradients")
            self._slots = segment.tensor(0, (runtime.size, self._capacity)).unbind()
            write_parts(self._parts, self._slots[runtime.rank])
            step.passed = runtime.barrier("waiting for the sparse gradients of all ranks", step)
        self._parts = ()
        return self._slots
