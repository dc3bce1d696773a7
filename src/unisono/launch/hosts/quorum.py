"""Which hosts of a job go on when some are lost, and who leads them. Pure.

Hosts that do not answer may be dead, or they may believe the same of this one: then the network is divided, and at most
one side may go on. Start reading at `find_obstacle`.
"""

from __future__ import annotations

from collections.abc import Collection

from unisono.text import format_ranks

__all__ = ["find_obstacle", "succession"]


def find_obstacle(
    members: Collection[int],
    *,
    reachable: Collection[int],
    ended: Collection[int] = (),
    joining: Collection[int] = (),
    min_hosts: int,
) -> str:
    """Return why the hosts that can be reached must not go on without the others; "" if they may.

    They may if they are more than half of those that may still run, or half of them with the lowest number. Two
    disjoint sets of hosts cannot both be that, so two halves never go on separately. While a host joins, some count it
    and others do not know of it yet: then both counts must allow it, as in Raft's joint consensus.

    Args:
        members: The hosts of the job, as all of them knew last.
        reachable: Those of them that answer, with this one.
        ended: Those that are known to have ended, so that they cannot go on anywhere.
        joining: Further hosts, which some of the members count as members already.
        min_hosts: The smallest number of hosts of the job.

    >>> find_obstacle([0, 1, 2], reachable=[1, 2], min_hosts=1)
    ''
    >>> find_obstacle([0, 1, 2], reachable=[0], min_hosts=1)
    'hosts 1-2 do not answer and may go on without this side, which is 1 of 3 hosts'
    >>> find_obstacle([0, 1], reachable=[0], min_hosts=1), find_obstacle([0, 1], reachable=[1], min_hosts=1)
    ('', 'host 0 does not answer and may go on without this side, which is 1 of 2 hosts')
    >>> find_obstacle([0, 1], reachable=[1], ended=[0], min_hosts=1)
    ''
    >>> find_obstacle([0, 1], reachable=[1], ended=[0], min_hosts=2)
    '1 host is left, and --nnodes asks for 2'
    >>> find_obstacle([0, 1], reachable=[1, 2], joining=[2], min_hosts=1)  # host 0 may not know of host 2
    'host 0 does not answer and may go on without this side, which is 1 of 2 hosts'
    >>> find_obstacle([0, 1], reachable=[0], joining=[2], min_hosts=1)  # host 1 may have counted host 2
    'hosts 1-2 do not answer and may go on without this side, which is 1 of 3 hosts'
    >>> find_obstacle([0], reachable=[0], ended=[1], joining=[1], min_hosts=1)
    ''
    """
    if len(reachable) < min_hosts:
        left = "1 host is" if len(reachable) == 1 else f"{len(reachable)} hosts are"
        return f"{left} left, and --nnodes asks for {min_hosts}"
    return _find_rivals(set(members) - set(ended), set(reachable) & set(members)) or _find_rivals(
        {*members, *joining} - set(ended), set(reachable)
    )


def _find_rivals(possible: set[int], reachable: set[int]) -> str:
    """Return why others of the hosts that may still run may go on without these; "" if they may not."""
    if not possible or 2 * len(reachable) > len(possible):
        return ""
    if 2 * len(reachable) == len(possible) and min(possible) in reachable:
        return ""
    silent = sorted(possible - reachable)
    names = f"host {silent[0]} does" if len(silent) == 1 else f"hosts {format_ranks(silent)} do"
    return f"{names} not answer and may go on without this side, which is {len(reachable)} of {len(possible)} hosts"


def succession(members: Collection[int], *, lost: Collection[int]) -> list[int]:
    """Return the hosts that may lead when the leader is lost, in the order in which the others turn to them.

    >>> succession([0, 1, 2, 3], lost=[0])
    [1, 2, 3]
    """
    return sorted(set(members) - set(lost))
