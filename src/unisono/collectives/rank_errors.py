"""Errors of one rank that every rank raises, so that none continues or waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from unisono.collectives.world import World
from unisono.errors import CheckpointError, PeerError

__all__ = ["RankError", "gather_or_raise", "raised_on_all"]

T = TypeVar("T")


class RankError(NamedTuple):
    """The error of a rank, as sent to the other ranks."""

    kind: str
    """The name of its class."""
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind


def gather_or_raise(
    world: World,
    value: T,
    error: Exception | None,
    call: str,
    *,
    work: str,
    remedy: str = "",
    convert: Callable[[int, RankError], Exception | None] = lambda _rank, _error: None,
) -> list[T]:
    """Return a value of each rank, or raise the error of a rank on all ranks. Every rank must call it.

    Args:
        world: The ranks.
        value: The value of this rank, picklable; any value if there is an error.
        error: The exception that this rank's work raised, if any. It is raised here once the others know.
        call: The purpose of the call, for messages.
        work: The work that may have failed, for messages.
        remedy: The state after a failure or a remedy, for messages.
        convert: Returns the exception that the other ranks raise, given the failed rank and its error; None stands for
            PeerError.

    Raises:
        PeerError: Another rank has failed; the message has its rank and error.
    """
    everyone = world.gather((None if error is None else RankError(type(error).__name__, str(error)), value), call)
    if error is not None:
        raise error
    for rank, (failure, _) in enumerate(everyone):
        if failure is not None:
            raise convert(rank, failure) or PeerError(f"rank {rank} failed in {work}: {failure}{remedy}")
    return [each for _, each in everyone]


@contextmanager
def raised_on_all(world: World, call: str) -> Iterator[None]:
    """Make all ranks raise the error of a rank in this context. Every rank must enter it; a small exchange ends it.

    The code in it may be a user's, such as a state_dict: whatever it raises, it raises once the other ranks know.

    Args:
        world: The ranks.
        call: The purpose of the call, for messages.

    Raises:
        CheckpointError: Another rank has failed; the message has its rank and error.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # whatever it is, it is raised below
        error = raised
    gather_or_raise(world, None, error, call, work=call, convert=_as_checkpoint_error)


def _as_checkpoint_error(rank: int, error: RankError) -> CheckpointError:
    is_own = error.kind in ("CheckpointError", "CorruptCheckpointError")
    return CheckpointError(f"rank {rank}: {error.message if is_own else error}")
