"""Which hosts of a job go on when some are lost, and who leads them. Pure.

Hosts that do not answer may be dead, or they may believe the same of this one: then the network is divided, and at most
one side may go on. Start reading at `find_obstacle`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from unisono.text import format_ranks

__all__ = ["find_obstacle", "place_ranks", "succession"]


def find_obstacle(
    members: Collection[int], *, reachable: Collection[int], ended: Collection[int] = (), min_hosts: int
) -> str:
    """Return why the hosts that can be reached must not go on without the others; "" if they may.

    They may if they are more than half of those that may still run, or half of them with the lowest number. Two
    disjoint sets of hosts cannot both be that, so two halves never go on separately.

    Args:
        members: The hosts of the job, as all of them knew last.
        reachable: Those of them that answer, with this one.
        ended: Those that are known to have ended, so that they cannot go on anywhere.
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
    """
    if len(reachable) < min_hosts:
        left = "1 host is" if len(reachable) == 1 else f"{len(reachable)} hosts are"
        return f"{left} left, and --nnodes asks for {min_hosts}"
    possible = set(members) - set(ended)
    if 2 * len(reachable) > len(possible) or (2 * len(reachable) == len(possible) and min(possible) in reachable):
        return ""
    silent = sorted(possible - set(reachable))
    names = f"host {silent[0]} does" if len(silent) == 1 else f"hosts {format_ranks(silent)} do"
    return f"{names} not answer and may go on without this side, which is {len(reachable)} of {len(possible)} hosts"


def succession(members: Collection[int], *, lost: Collection[int]) -> list[int]:
    """Return the hosts that may lead when the leader is lost, in the order in which the others turn to them.

    >>> succession([0, 1, 2, 3], lost=[0])
    [1, 2, 3]
    """
    return sorted(set(members) - set(lost))


def place_ranks(
    placement: Mapping[int, Sequence[int]], *, hosts: Collection[int], homes: Mapping[int, int] | None = None
) -> dict[int, list[int]]:
    """Return which ranks are on which host once only some hosts are left, or others have come.

    Each rank of a lost host goes to the host that has the fewest then, the one with the lowest number among equals.
    No other rank moves, unless its home has come back.

    Args:
        placement: The ranks of each host so far.
        hosts: The hosts that are there, each of them.
        homes: For ranks that go home, the host that is there again.

    >>> place_ranks({0: [0, 1], 1: [2, 3], 2: [4, 5]}, hosts=[0, 2])
    {0: [0, 1, 2], 2: [3, 4, 5]}
    >>> place_ranks({0: [0, 1], 1: [2, 3]}, hosts=[1])
    {1: [0, 1, 2, 3]}
    >>> place_ranks({0: [0, 1, 2, 3]}, hosts=[0, 4], homes={2: 4, 3: 4})
    {0: [0, 1], 4: [2, 3]}
    """
    homes = homes or {}
    placed = {host: [r for r in placement.get(host, ()) if homes.get(r, host) == host] for host in sorted(hosts)}
    moving = sorted(rank for host, ranks in placement.items() for rank in ranks if rank not in placed.get(host, ()))
    for rank in moving:
        target = homes.get(rank)
        if target not in placed:
            target = min(placed, key=lambda host: (len(placed[host]), host))
        placed[target].append(rank)
    return {host: sorted(ranks) for host, ranks in placed.items()}
