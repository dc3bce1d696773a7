"""Which ranks are on which host once hosts have been lost, or have come. Pure.

Start reading at `place_ranks`, which decides, `ranks_for_newcomer`, which decides for a host that joins, and
`spread_ranks`, for another number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

__all__ = ["place_ranks", "ranks_for_newcomer", "spread_ranks"]


def place_ranks(
    placement: Mapping[int, Sequence[int]],
    *,
    hosts: Collection[int],
    newcomer: int | None = None,
    ranks: Collection[int] = (),
) -> dict[int, list[int]]:
    """Return which ranks are on which host once only some hosts are left, or another has come.

    Each rank of a lost host goes to the host that has the fewest then, the one with the lowest number among equals. No
    other rank moves, but those of the newcomer.

    Args:
        placement: The ranks of each host so far.
        hosts: The hosts that are there, without the newcomer.
        newcomer: A host that joins.
        ranks: Its ranks: some that are on other hosts so far, and new ones.

    >>> place_ranks({0: [0, 1], 1: [2, 3], 2: [4, 5]}, hosts=[0, 2])
    {0: [0, 1, 2], 2: [3, 4, 5]}
    >>> place_ranks({0: [0, 1], 1: [2, 3]}, hosts=[1])
    {1: [0, 1, 2, 3]}
    >>> place_ranks({1: [0, 1, 2]}, hosts=[1], newcomer=2, ranks=[2, 3])
    {1: [0, 1], 2: [2, 3]}
    """
    placed = {host: [rank for rank in placement.get(host, ()) if rank not in ranks] for host in sorted(hosts)}
    kept = {rank for own in placed.values() for rank in own}
    for rank in sorted(rank for own in placement.values() for rank in own if rank not in kept and rank not in ranks):
        placed[min(placed, key=lambda host: (len(placed[host]), host))].append(rank)
    if newcomer is not None:
        placed[newcomer] = [*ranks]
    return {host: sorted(own) for host, own in placed.items()}


def ranks_for_newcomer(
    placement: Mapping[int, Sequence[int]],
    *,
    capacities: Mapping[int, int],
    homes: Mapping[int, int],
    most: int,
    largest_world: int,
) -> list[int]:
    """Return the ranks of a host that joins: first those that lost hosts have left to others, then new ones.

    Of a host with more ranks than it was started with, those go that came from elsewhere; if rank 0 is among them,
    those with the highest numbers: rank 0 stays where it is, with the files that it writes.

    Args:
        placement: The ranks of each host so far.
        capacities: How many ranks each host was started with.
        homes: For each rank, the host that it was on at first.
        most: How many ranks the newcomer was started with.
        largest_world: How many ranks there may be on all hosts.

    >>> def ranks(placement, **options):
    ...     homes = {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}
    ...     return ranks_for_newcomer(placement, capacities=dict.fromkeys(range(4), 2), homes=homes, **options)
    >>> ranks({0: [0, 1]}, most=2, largest_world=8)  # a host more
    [2, 3]
    >>> ranks({0: [0, 1, 2], 2: [3, 4, 5]}, most=2, largest_world=8)  # host 1 was lost
    [2, 3]
    >>> ranks({1: [0, 1, 2, 3]}, most=2, largest_world=8)  # host 0 was lost
    [2, 3]
    >>> ranks({0: [0, 1, 2, 3]}, most=4, largest_world=5)
    [2, 3, 4]
    >>> ranks({0: [0, 1], 1: [2, 3]}, most=2, largest_world=4)
    []
    """
    surplus: list[int] = []
    for host, own in sorted(placement.items()):
        foreign = sorted(own, key=lambda rank, host=host: (homes.get(rank) == host, rank))  # type: ignore[misc]
        if foreign and homes.get(0) != host and foreign[0] == 0:
            foreign = sorted(own, reverse=True)
        surplus += foreign[: max(0, len(own) - capacities[host])]
    size = sum(map(len, placement.values()))
    moved = sorted(surplus)[-most:]
    return [*moved, *range(size, min(largest_world, size + most - len(moved)))]


def spread_ranks(
    placement: Mapping[int, Sequence[int]], size: int, *, capacities: Mapping[int, int]
) -> dict[int, list[int]]:
    """Return which ranks are on which host if there are to be `size` of them, so that as few as possible move.

    Each host gets a number in proportion to that with which it was started, and at least one.

    Args:
        placement: The ranks of each host so far.
        size: The number of ranks then, at least that of hosts.
        capacities: How many ranks each host was started with.

    >>> spread_ranks({0: [0, 1], 1: [2, 3]}, 6, capacities={0: 2, 1: 2})
    {0: [0, 1, 4], 1: [2, 3, 5]}
    >>> spread_ranks({0: [0, 1], 1: [2, 3]}, 2, capacities={0: 2, 1: 2})
    {0: [0], 1: [1]}
    >>> spread_ranks({0: [0, 1, 4], 1: [2, 3, 5]}, 3, capacities={0: 2, 1: 2})
    {0: [0, 1], 1: [2]}
    >>> spread_ranks({0: [0, 1], 1: [2]}, 6, capacities={0: 2, 1: 1})
    {0: [0, 1, 3, 4], 1: [2, 5]}
    """
    counts = dict.fromkeys(sorted(placement), 1)
    for _ in range(size - len(counts)):
        counts[min(counts, key=lambda host: ((counts[host] + 1) / capacities[host], host))] += 1
    kept = {host: sorted(rank for rank in placement[host] if rank < size)[: counts[host]] for host in counts}
    left = iter(sorted(set(range(size)).difference(*kept.values())))
    return {host: sorted([*own, *(next(left) for _ in range(counts[host] - len(own)))]) for host, own in kept.items()}
