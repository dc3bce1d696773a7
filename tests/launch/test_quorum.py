"""Which hosts go on when some are lost."""

from __future__ import annotations

from itertools import chain, combinations

import pytest

from unisono.launch.hosts.quorum import find_obstacle
from unisono.launch.hosts.rank_places import place_ranks, ranks_for_newcomer


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


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_two_sides_never_both_go_on_while_a_host_joins(number):
    before, after = range(number), range(number + 1)

    def going(hosts: range, members: range, joining: tuple[int, ...], ended: frozenset[int]) -> set[frozenset[int]]:
        return {
            side
            for side in subsets(hosts)
            if not side & ended
            and not find_obstacle(members, reachable=side, ended=ended, joining=joining, min_hosts=1)
        }

    for ended in [frozenset[int](), *subsets(after)]:
        unaware = going(before, before, (), ended)
        aware = going(after, before, (number,), ended)
        sure = going(after, after, (), ended)
        # Nobody is unaware of the newcomer any more once somebody is sure that all count it.
        for one, other in [(unaware, aware), (aware, aware), (aware, sure), (sure, sure)]:
            assert all(a & b for a in one for b in other)


def test_a_newcomer_takes_ranks_home_and_no_host_keeps_more_than_it_had():
    homes = {rank: rank // 2 for rank in range(8)}
    for left in subsets(range(4)):
        placement = place_ranks({host: [2 * host, 2 * host + 1] for host in range(4)}, hosts=left)
        hosts = set(left)
        for newcomer in range(4, 8 - len(left)):
            capacities = dict.fromkeys(range(8), 2)
            ranks = ranks_for_newcomer(placement, capacities=capacities, homes=homes, most=2, largest_world=8)
            placement = place_ranks(placement, hosts=hosts, newcomer=newcomer, ranks=ranks)
            hosts.add(newcomer)
            assert sorted(rank for own in placement.values() for rank in own) == list(range(8))
            assert len(ranks) == 2 and 0 not in ranks
        assert all(len(own) == 2 for own in placement.values()) or len(left) == 4


def test_fewer_hosts_than_the_job_wants_do_not_go_on():
    assert find_obstacle([0, 1, 2], reachable=[0, 1], min_hosts=3) == "2 hosts are left, and --nnodes asks for 3"


def test_every_rank_has_one_host_and_no_rank_moves_without_need():
    placement = {0: [0, 1, 2], 1: [3, 4, 5], 2: [6, 7, 8]}
    for hosts in subsets(range(3)):
        placed = place_ranks(placement, hosts=hosts)
        assert sorted(rank for ranks in placed.values() for rank in ranks) == list(range(9))
        assert all(set(placement[host]) <= set(placed[host]) for host in hosts)
        assert max(map(len, placed.values())) - min(map(len, placed.values())) <= 1
