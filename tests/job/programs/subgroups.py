"""Subgroups and divisions of a job of four ranks on two pretended nodes. Prints "ok" per check."""

from __future__ import annotations

import os
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

import unisono
from job import expect
from unisono.errors import GroupError, PeerError, RankMismatchError
from unisono.job.current import require_group

N = 4


def sum_in(group: dist.ProcessGroup) -> int:
    """All-reduce one power of ten per rank: shows who took part."""
    own = torch.tensor([10**RANK])
    dist.all_reduce(own, group=group)
    return int(own)


def members() -> None:
    group = unisono.subgroup([2, 0])
    if RANK in {0, 2}:
        assert sum_in(group) == 101
        assert dist.get_process_group_ranks(group) == [2, 0]  # numbered as named
        assert dist.get_rank(group) == (1 if RANK == 0 else 0)
        assert require_group(group) is group
    else:
        expect(GroupError, "not in the group of ranks [2, 0]", call=lambda: require_group(group))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dist.barrier(group=group)  # torch's functions know such a group, and do nothing
        assert "does not belong to the given group" in str(caught[0].message)
    everybody = unisono.subgroup(range(N))
    assert sum_in(everybody) == 1111
    lone = unisono.subgroup([3], backend="gloo")
    assert RANK != 3 or sum_in(lone) == 1000


def division() -> None:
    halves = unisono.split(RANK % 2)
    assert sum_in(halves) == (101 if RANK % 2 == 0 else 1010)
    backwards = unisono.split("all", key=-RANK)
    assert dist.get_process_group_ranks(backwards) == [3, 2, 1, 0]
    keyed = unisono.split(RANK // 2, key=0.5)  # equal keys: by rank
    assert dist.get_process_group_ranks(keyed) == [RANK // 2 * 2, RANK // 2 * 2 + 1]
    own = unisono.split(by="node")
    assert dist.get_process_group_ranks(own) == [RANK // 2 * 2, RANK // 2 * 2 + 1]
    assert sum_in(own) == (11 if RANK < 2 else 1100)


def nodes() -> None:
    job = unisono.init()
    assert (job.node_rank, job.local_rank, job.local_world_size, job.num_nodes) == (RANK // 2, RANK % 2, 2, 2)
    assert (unisono.node_rank(), unisono.local_rank(), unisono.local_world_size()) == (RANK // 2, RANK % 2, 2)
    assert unisono.is_main() == (RANK == 0)
    assert unisono.is_main(local=True) == (RANK in {0, 2})


def refusals() -> None:
    expect(ValueError, "rank 4 is not in this job", "0..3", call=lambda: unisono.subgroup([0, 4]))
    expect(ValueError, "names a rank twice", call=lambda: unisono.subgroup([1, 1]))
    expect(ValueError, "empty", call=lambda: unisono.subgroup([]))
    expect(TypeError, "ranks=2", call=lambda: unisono.subgroup(2))
    expect(ValueError, "by='rack'", call=lambda: unisono.split(by="rack"))
    expect(ValueError, "either a colour", call=unisono.split)
    expect(TypeError, "colour=[0]", call=lambda: unisono.split([0]))
    expect(TypeError, "key='a'", call=lambda: unisono.split(0, key="a"))


def one_wrong() -> None:
    """Errors of one rank reach the others at once."""
    wrong = lambda: unisono.subgroup([0, 0] if RANK == 2 else [0])  # noqa: E731
    if RANK == 2:
        expect(ValueError, "names a rank twice", call=wrong)
    else:
        expect(PeerError, "rank 2 could not call unisono.subgroup", "names a rank twice", call=wrong)
    differing = lambda: unisono.subgroup([0, 1] if RANK == 3 else [0])  # noqa: E731
    expect(RankMismatchError, "rank 0 for ranks [0], rank 3 for ranks [0, 1]", call=differing)
    by = lambda: unisono.split(by="node") if RANK == 1 else unisono.split(0)  # noqa: E731
    expect(RankMismatchError, "rank 0 by=None", "rank 1 by='node'", call=by)
    assert sum_in(unisono.split(0)) == 1111  # and it goes on


def absent() -> None:
    unisono.init().end()
    job = unisono.init(backend=sys.argv[1], timeout=4)
    store = job.store("absent")
    if RANK == 1:
        store.wait(["0", "2", "3"], timedelta(seconds=60))
    else:
        expect(PeerError, "rank 1 did not call unisono.split within 4 s", call=lambda: unisono.split(0))
        store.set(str(RANK), "told")
    group = None if RANK == 1 else job.group
    job.end()
    if group is not None:
        expect(GroupError, "ended", call=lambda: require_group(group))


if __name__ == "__main__":
    RANK = unisono.rank()
    # As a launcher with two nodes would say.
    os.environ |= {"LOCAL_RANK": str(RANK % 2), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": str(RANK // 2)}
    unisono.init(sys.argv[1])
    for check in (members, division, nodes, refusals, one_wrong, absent):
        check()
        print(f"ok {check.__name__}")
