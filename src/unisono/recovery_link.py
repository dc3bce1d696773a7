"""Messages of a rank and its launcher about ranks that come in the place of dead ones, or come and go.

The launcher installs its end in `current` before the program runs; without a launcher that changes ranks it is None.
A Trainer uses it: neither side imports the other.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

__all__ = ["SAME_SIZE", "Membership", "Phase", "RecoveryLink", "current"]

Phase = Literal["loop", "forward", "backward", "sum", "update", "evaluation", "recovery", "resize"]
"""The work of a rank of a Trainer at the moment; "loop" is the code of the user's loop, and reading data.

"recovery" and "resize" are waits: for ranks in the place of dead ones, and for another number of ranks.
"""


SAME_SIZE = 1 << 32
"""Added to a wanted number of ranks that is the present one: some of them are to be on another host."""


class Membership(NamedTuple):
    """The latest decision of the launcher on who the ranks are."""

    number: int
    """Counts the decisions of a job. 0: there has been none."""
    ranks: tuple[int, ...]
    """The ranks that are new: those that this decision adds, and those of earlier ones that have not joined."""
    size: int
    """The number of ranks; 0 for a process that is none of them any more, since its rank is on another host."""
    hosts: tuple[tuple[int, ...], ...] = ()
    """The ranks of each host, if there may be several; otherwise none, and all ranks are on one."""
    store: str = ""
    """Where ranks meet, as "host:port"; "": at the job's store, as at the start."""


class RecoveryLink(Protocol):
    """The end of one rank. All methods cost less than a microsecond, but for those that write texts."""

    is_new: bool
    """True if this process takes the place of a rank that died, or is one more."""
    secret: bytes
    """Known to the ranks of the job alone: by it they know each other's messages."""

    is_armed: bool
    """True if a Trainer of this process survives the death of other ranks."""

    def await_rank(self) -> None:
        """Wait until this process has a rank, if it is a spare one. Then the launcher's variables are that rank's.

        The process ends here if the job is over before.
        """

    def come(self) -> None:
        """Note that the script has come to its Trainer, for the time that it took. Only the first call counts."""

    def arm(self, virtual_ranks: int, *, gpus: int = 0, fixed_size: str = "") -> None:
        """Tell the launcher that a Trainer of this process survives the death of other ranks from now on.

        Args:
            virtual_ranks: The largest number of ranks that it can have.
            gpus: The number of GPUs if each rank needs one; 0: ranks need none, or can share one.
            fixed_size: Why the number of ranks cannot change; "" if it can.
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
        """Note the samples that this rank computes, as words, in a step that is repeated after a death; "": none."""

    def membership(self) -> Membership:
        """Return the latest decision."""

    def settled(self) -> int:
        """Return the number of the latest decision that `membership` returns on all ranks, or a newer one."""

    def wanted_size(self) -> int:
        """Return the number of ranks that the launcher wants from the next step on; 0 if it wants no change.

        `SAME_SIZE` is added if it is the present number, and only their hosts are to change.
        """

    def asked_size(self) -> int:
        """Return `wanted_size`, once `wanted_size` returns it on all ranks; 0 before, and if no change is wanted."""

    def job_ends(self) -> bool:
        """Return True if the launcher ends all ranks, so that a signal was not meant for this one alone."""

    def job_failed(self) -> bool:
        """Return True if it does so because a rank has failed, or a host is lost: it tells that itself."""

    def joined(self, number: int) -> None:
        """Tell the launcher that this rank and all others go on together after a decision."""


current: RecoveryLink | None = None
"""The link of this process."""
