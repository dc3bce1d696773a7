"""Which hosts go on when some are lost."""

from __future__ import annotations

from itertools import chain, combinations

import pytest

from unisono.launch.hosts.quorum import find_obstacle, place_ranks


def subsets(hosts: range) -> list[frozenset[int]]:
    return [frozenset(each) for each in chain(*(combinations(hosts, n) for n in range(1, len(hosts) + 1)))]


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_two_sides_that_cannot_reach_each_other_never_both_go_on(number):
    members = range(number)
    for ended in [frozenset[int](), *subsets(members)]:
        going = [
            side
            for side in subsets(members)
            if not side & ended and not find_obstacle(members, reachable=side, ended=ended, min_hosts=1)
        ]
        assert all(one & other for one in going for other in going)
        # All that are left may always go on together.
        assert frozenset(members) - ended in going or len(ended) == number


def test_fewer_hosts_than_the_job_wants_do_not_go_on():
    assert find_obstacle([0, 1, 2], reachable=[0, 1], min_hosts=3) == "2 hosts are left, and --nnodes asks for 3"


def test_every_rank_has_one_host_and_no_rank_moves_without_need():
    placement = {0: [0, 1, 2], 1: [3, 4, 5], 2: [6, 7, 8]}
    for hosts in subsets(range(3)):
        placed = place_ranks(placement, hosts=hosts)
        assert sorted(rank for ranks in placed.values() for rank in ranks) == list(range(9))
        assert all(set(placement[host]) <= set(placed[host]) for host in hosts)
        assert max(map(len, placed.values())) - min(map(len, placed.values())) <= 1
