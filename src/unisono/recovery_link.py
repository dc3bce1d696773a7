"""What a rank and its launcher tell each other about the replacement of ranks that have died.

The launcher installs its end in `current` before the program runs; without a launcher that replaces ranks it is None.
A Trainer uses it: neither side imports the other.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

__all__ = ["Phase", "RecoveryLink", "Replacement", "current"]

Phase = Literal["loop", "forward", "backward", "sum", "update", "evaluation", "recovery"]
"""What a rank of a Trainer is doing; "loop" is the code of the user's loop, and reading data."""


class Replacement(NamedTuple):
    """The latest decision of the launcher to replace ranks."""

    number: int
    """Counts the decisions of a job. 0: there has been none."""
    ranks: tuple[int, ...]
    """The ranks that are new: those that this decision replaces, and those of earlier ones that have not joined."""


class RecoveryLink(Protocol):
    """The end of one rank. All methods cost less than a microsecond, but for those that write texts."""

    is_new: bool
    """True if this process takes the place of a rank that died."""
    secret: bytes
    """Known to the ranks of the job alone: by it they know each other's messages."""

    def arm(self) -> int:
        """Tell the launcher that a Trainer of this process survives the death of other ranks from now on.

        Returns:
            How many Trainers of this process have done so.
        """

    def refuse(self, reason: str) -> None:
        """Tell the launcher that it must not replace single ranks of this job any more, and why.

        Args:
            reason: Completes "no rank can be replaced alone: …".
        """

    def note(self, phase: Phase, step: int, virtual_rank: int = -1) -> None:
        """Note what this rank does.

        Args:
            phase: What it does.
            step: The steps done since the start of the run.
            virtual_rank: The virtual rank whose samples it computes; -1: none.
        """

    def note_samples(self, samples: str) -> None:
        """Note the samples that this rank computes, as words, in a step that is repeated after a death."""

    def replacement(self) -> Replacement:
        """Return the latest decision."""

    def joined(self, number: int) -> None:
        """Tell the launcher that this rank and all others go on together after a decision."""


current: RecoveryLink | None = None
"""The link of this process."""
