"""Groups of some of a job's ranks: listed by rank, or made by dividing all ranks.

Every rank of the job calls these functions in the same order, also ranks that end up outside. The ranks compare their
requests first, so a disagreement is an error and not a hang. Start reading at `split`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch.distributed as dist

from unisono.errors import RankMismatchError
from unisono.job.current import Job, NotMember
from unisono.job.default_group import make_subgroup
from unisono.job.initialize import require_job

__all__ = ["split", "subgroup"]


def subgroup(ranks: Iterable[int], *, backend: str | None = None) -> dist.ProcessGroup | NotMember:
    """Make a group of some ranks. Every rank of the job must call it, with the same arguments.

    The group is valid wherever unisono or torch.distributed takes one; it ends with the job.

    Args:
        ranks: The global ranks of the members; the group numbers its members in this order.
        backend: The backend of the group. None: the job's.

    Returns:
        On members the group. On other ranks a `NotMember`, with which unisono's operations raise GroupError. (They take
        None for all ranks.) To tell members apart, test the rank: `if unisono.rank() in ranks: ...`.

    Raises:
        ValueError: Ranks are not in the job or repeated, or there are none.
        TypeError: `ranks` are not whole numbers.
        RankMismatchError: Ranks request different groups; raised on every rank.
        PeerError: Some ranks do not call, or passed wrong arguments.
        GroupError: The ranks have not met, or a loss function is running.
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
    """Divide the ranks of the job into groups, and return this rank's group. Every rank must call it.

    Ranks of one colour form a group, as with MPI_Comm_split. For example, `unisono.split(unisono.rank() % 2)` makes a
    group of the even ranks and one of the odd ones.

    Args:
        colour: The group of this rank: equal on all its members.
        key: Orders the ranks of a group; ranks of equal keys are in rank order. None: the rank.
        by: "node" makes one group of the ranks of each node, in place of a colour.
        backend: The backend of the groups, equal on all ranks. None: the job's.

    Raises:
        ValueError: There is neither a colour nor `by`, or there are both.
        TypeError: The colour or the key has the wrong type.
        RankMismatchError: Ranks pass a different `by` or backend; raised on every rank.
        PeerError: Some ranks do not call, or passed wrong arguments.
        GroupError: The ranks have not met, or a loss function is running.
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
    """Check a rank's arguments of `split`, and return `by`, colour and key with defaults filled in."""
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
    made = make_subgroup(ranks, timeout=job.timeout, backend=backend)
    return NotMember(f"the group of {_text([ranks, None])}") if made is None else made


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
