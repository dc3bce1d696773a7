"""Refuses collectives inside a loss function or a function that is evaluated.

Such a function is called once for each virtual rank and micro-batch. Ranks have different numbers of those, so a
collective would wait for the other ranks for ever, or combine different values on a different number of ranks. Our
collectives check this when they are called; those of torch.distributed are found by the sequence numbers of process
groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token

import torch.distributed as dist

from unisono.errors import GroupError

__all__ = [
    "collectives_of_user",
    "count_collectives",
    "enter",
    "leave",
    "refuse_collective",
    "refuse_collectives_since",
    "refuse_inside",
    "uncounted_collectives",
]

_running: ContextVar[tuple[str, str] | None] = ContextVar("running", default=None)
"""Kind of function that runs in this thread, and what to do instead of a collective there; or None."""

_calls = 0
_uncounted = 0

_REMEDY = (
    "It is called once for each virtual rank's samples, and ranks have different numbers of those, so they would wait "
    "for each other for ever. Return the losses of the samples that it is given, and call collectives in your loop; "
    "a loss over all samples of a global batch is trainer.step(loss_fn, batch, encode=function)."
)


def enter(what: str, remedy: str = _REMEDY) -> Token[tuple[str, str] | None]:
    """Begin to refuse collectives in this thread.

    Args:
        what: The function that is about to run.
        remedy: Why it must not call collectives, and what to do instead.
    """
    return _running.set((what, remedy))


def leave(token: Token[tuple[str, str] | None]) -> None:
    """Return to the state before `enter`."""
    _running.reset(token)


def collectives_of_user() -> int:
    """Count the calls of unisono's collectives by this process's program."""
    return _calls


def refuse_collective() -> None:
    """Count a collective of ours, and refuse it if a loss function calls it.

    Raises:
        GroupError: The function of a step or an evaluation is running.
    """
    global _calls  # noqa: PLW0603  of this process
    _calls += 1
    running = _running.get()
    if running is not None:
        what, remedy = running
        raise GroupError(f"{what} called a collective. {remedy}")


def refuse_inside(name: str) -> None:
    """Refuse a method of the Trainer that a loss function calls.

    Raises:
        RuntimeError: The function of a step or an evaluation is running.
    """
    running = _running.get()
    if running is not None:
        what, _ = running
        raise RuntimeError(f"{what} called {name}, in the middle of a step or an evaluation: call it in your loop.")


def count_collectives() -> int:
    """Count this process's calls of collectives in all its groups. Takes half a microsecond."""
    count = -_uncounted
    for group in tuple(dist.distributed_c10d._world.pg_map):  # a copy, since a thread of `GroupWatch` calls this, too
        try:
            count += group._get_sequence_number_for_group()  # type: ignore[attr-defined]
        except RuntimeError:  # the backend does not count, such as mpi
            continue
    return count


@contextmanager
def uncounted_collectives() -> Iterator[None]:
    """Leave calls out of `count_collectives`: those that a model divided over ranks makes within a user's function."""
    global _uncounted  # noqa: PLW0603  of this process
    before = count_collectives()
    try:
        yield
    finally:
        _uncounted += count_collectives() - before


def refuse_collectives_since(count: int) -> None:
    """Refuse collectives of torch.distributed that a loss function has called.

    Args:
        count: The result of `count_collectives` before the function was called.

    Raises:
        GroupError: The function has called a collective.
    """
    called = count_collectives() - count
    if called > 0:
        what, remedy = _running.get() or ("The function", _REMEDY)
        raise GroupError(f"{what} called {called} collective{'s' * (called > 1)} of torch.distributed. {remedy}")
