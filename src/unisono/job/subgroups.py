"""Groups of some of a job's ranks: named by their ranks, or made by dividing all ranks.

Every rank of the job calls these functions, also those that end up outside, in the same order. What each asks for is
compared first, so ranks that disagree get an error and not a hang. Start reading at `split`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch.distributed as dist

from unisono.errors import RankMismatchError
from unisono.job.current import Job, NotMember
from unisono.job.initialize import require_job

__all__ = ["split", "subgroup"]


def subgroup(ranks: Iterable[int], *, backend: str | None = None) -> dist.ProcessGroup | NotMember:
    """Make a group of some ranks. Every rank of the job must call it, with the same ranks.

    The group goes wherever unisono or torch.distributed takes one; it ends with the job.
    Args: ranks are numbers in the job; the group numbers its members in their order. backend None is the job's.
    Returns: on members the group; elsewhere a mark, with which unisono's operations raise GroupError. (None would stand
        for all ranks there.) Ask for the rank: `if unisono.rank() in ranks: ...`.
    Raises: ValueError for ranks that are not in the job or repeated, RankMismatchError on every rank if ranks ask for
    different groups, PeerError if some do not call.
    """
    job = require_job()
    mine: list[Any] | Exception
    try:
        mine = [_checked(ranks, job), backend]
    except (TypeError, ValueError) as error:
        mine = error
    everyone = job.exchange("subgroup", mine, doing="call unisono.subgroup")
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise RankMismatchError(
                f"ranks ask for different groups: rank 0 for {_text(everyone[0])}, rank {rank} for {_text(theirs)}. "
                "Every rank of the job must call subgroup with the same ranks, also those outside."
            )
    return _make(everyone[0][0], job, backend)


def split(
    colour: int | str | None = None,
    key: float | None = None,
    *,
    by: Literal["node"] | None = None,
    backend: str | None = None,
) -> dist.ProcessGroup:
    """Divide the ranks of the job into groups, and give this rank its own. Every rank must call it.

    Ranks of one colour form a group, as with MPI_Comm_split.
    Args: key orders the ranks of a group, those of equal keys by rank; None is the rank. by="node" takes the node for
        the colour: one group on each.
    Raises: ValueError unless there is a colour or `by`; PeerError if some ranks do not call.

    Example: `unisono.split(unisono.rank() % 2)` makes a group of the even ranks and one of the odd ones.
    """
    job = require_job()
    mine: list[Any] | Exception
    try:
        mine = _wish(colour, key, by, job)
    except (TypeError, ValueError) as error:
        mine = error
    everyone = job.exchange(
        "split", mine if isinstance(mine, Exception) else [*mine, backend], doing="call unisono.split"
    )
    own_colour = everyone[job.rank][1]
    for rank, theirs in enumerate(everyone):
        if theirs[::3] != everyone[0][::3]:
            raise RankMismatchError(
                f"ranks divide the job in different ways: rank 0 by={everyone[0][0]!r}, backend={everyone[0][3]!r}, "
                f"rank {rank} by={theirs[0]!r}, backend={theirs[3]!r}. Call split with the same `by` and backend."
            )
    members: dict[Any, list[int]] = {}
    for rank in sorted(range(job.world_size), key=lambda r: (everyone[r][2], r)):
        members.setdefault(everyone[rank][1], []).append(rank)
    own: dist.ProcessGroup | None = None
    for group_colour in sorted(members, key=lambda c: min(members[c])):  # the same order on all ranks
        made = _make(members[group_colour], job, backend)
        if group_colour == own_colour:
            assert isinstance(made, dist.ProcessGroup)
            own = made
    assert own is not None
    return own


def _wish(colour: int | str | None, key: float | None, by: str | None, job: Job) -> list[Any]:
    """Check what a rank asks of `split`. Returns: by, colour, key."""
    if (colour is None) == (by is None):
        raise ValueError('split needs either a colour, equal on the ranks of one group, or by="node"')
    if by not in (None, "node"):
        raise ValueError(f'by={by!r} must be "node"')
    if colour is not None and (isinstance(colour, bool) or not isinstance(colour, (int, str))):
        raise TypeError(f"colour={colour!r} must be a whole number or a text, equal on the ranks of one group")
    if isinstance(key, bool) or not isinstance(key, (int, float, type(None))):
        raise TypeError(f"key={key!r} must be a number: it orders the ranks of a group")
    return [by, job.node_rank if colour is None else colour, job.rank if key is None else key]


def _make(ranks: list[int], job: Job, backend: str | None) -> dist.ProcessGroup | NotMember:
    made = dist.new_group(ranks, timeout=job.timeout, backend=backend, sort_ranks=False)
    return made if isinstance(made, dist.ProcessGroup) else NotMember(f"the group of {_text([ranks, None])}")


def _checked(ranks: Iterable[int], job: Job) -> list[int]:
    try:
        asked = list(ranks)
    except TypeError:
        raise TypeError(f"ranks={ranks!r} must be several whole numbers, such as [0, 1]") from None
    for rank in asked:
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"ranks={asked!r} must be whole numbers")
        if not 0 <= rank < job.world_size:
            raise ValueError(f"rank {rank} is not in this job, which has the ranks 0..{job.world_size - 1}")
    if not asked:
        raise ValueError("ranks is empty: a group has at least one rank")
    if len(set(asked)) < len(asked):
        raise ValueError(f"ranks={asked!r} names a rank twice: name each once")
    return asked


def _text(asked: list[Any]) -> str:
    ranks, backend = asked
    return f"ranks {ranks}" + (f" by {backend}" if backend else "")
