"""Errors on shared memory: calls that do not match, ranks that are late, that die, leave or give up.

All scenarios of `programs/faults.py` run once, in one process that forks the ranks; each test looks at one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "programs" / "faults.py"
UNUSABLE = "The group cannot be used any more: make a new one"

Said = dict[str, list[Any]]


@pytest.fixture(scope="module")
def said(fork_python: Callable[..., list[str]]) -> Said:
    """What each rank said, by scenario. A rank that was killed has an exit code instead."""
    found: Said = json.loads("\n".join(fork_python(PROGRAM)))
    return found


def check_both_sides(of_rank: list[Any], *words: str) -> None:
    """Each rank's first error names both sides, and its next call fails at once."""
    for first, second in of_rank:
        assert first.startswith("DistBackendError: ")
        assert "Make all ranks call the same, in the same order" in first
        for word in words:
            assert word in first
        assert second.endswith(UNUSABLE)


def test_other_sizes_are_named_on_both_sides(said):
    check_both_sides(said["other_size"], "all_reduce(SUM) of 4 float32", "all_reduce(SUM) of 5 float32", "rank 0")
    own, other = (f"all_reduce(SUM) of {numel} float32 (call 1 of the group) on" for numel in (4, 5))
    seen = rf"ranks call different things: {re.escape(own)} rank 0, {re.escape(other)} rank [12]\."
    for rank in (0, 2):  # the first that has seen a difference says it to all
        assert re.search(seen, said["other_size"][rank][0])


def test_other_types_are_named_on_both_sides(said):
    check_both_sides(said["other_type"], "of 4 float32", "of 4 float64")


def test_other_reductions_are_named_on_both_sides(said):
    check_both_sides(said["other_reduction"], "all_reduce(SUM)", "all_reduce(MAX)")


def test_other_collectives_are_named_on_both_sides(said):
    check_both_sides(
        said["other_collective"], "all_reduce(SUM) of 400000 float32", "broadcast with root 0 of 7 float32"
    )


def test_a_difference_that_nobody_could_see_shows_in_the_next_call(said):
    for first, second in said["other_root"]:
        assert first == "nothing"
        assert "both call barrier" in second
        assert "they called different things before" in second


def test_other_splits_and_sizes_of_lists_are_named(said):
    assert "rank 1 has 2 elements for rank 0, which expects 3 from it" in said["other_splits"][0]
    assert "rank 0 has 3 elements for rank 1, which expects 2 from it" in said["other_splits"][1]
    assert "rank 1 shows 5 elements, rank 0 has room for 4 from it" in said["uneven_gather"][0]


def test_a_late_rank_is_named(said):
    for rank in (0, 2):
        first, second = said["late_rank"][rank]
        assert " timed out: rank 1 did not take part within 3 s; see what it does instead" in first
        assert second.endswith(UNUSABLE)
    assert "rank 1 did not take part within 3 s" in said["late_rank"][1][1]


def test_a_monitored_barrier_has_its_own_limit_and_fails_on_all_ranks(said):
    for message in said["late_for_one_call"]:
        assert "barrier (call 1 of the group) timed out: rank 1 did not take part within 0.5 s" in message
    # As with gloo, the one that waited says that it has timed out.
    first, late = said["late_for_one_call"]
    assert first.startswith("DistBackendError: Rank 0 timed out in monitoredBarrier after 500 ms: ")
    assert "monitoredBarrier" not in late


def test_a_wait_that_gives_up_leaves_the_work_going_on(said):
    (impatient, tensor), (_, other) = said["impatient_wait"]
    assert impatient.endswith(" timed out: not done after 0.2 s, waiting for rank 1")
    assert tensor == other == [4.0] * 4


@pytest.mark.parametrize(
    ("scenario", "dead", "where"),
    [("killed_before", 1, 0), ("killed_in_the_middle", 2, None), ("killed_after", 0, 1)],
)
def test_a_killed_rank_is_named_by_all_others(said, scenario, dead, where):
    for rank, messages in enumerate(said[scenario]):
        if rank == dead:
            assert messages == "exit code -9"
        else:
            message = messages if where is None else messages[where]
            assert message.startswith("DistBackendError: ")
            assert f"the process of rank {dead} has ended" in message


def test_what_a_rank_did_before_its_death_counts(said):
    assert said["killed_after"][1][0] == [3.0] * 4
    assert said["root_died_after_its_broadcast"][1] == [0.0]


def test_works_and_futures_that_were_under_way_fail(said):
    for messages in said["killed_with_async_under_way"][1:]:
        assert len(messages) == 4
        for message in messages:
            assert "the process of rank 0 has ended" in message


def test_a_rank_that_destroyed_the_group_is_not_waited_for(said):
    for rank in (0, 2):
        assert "the group was left by rank 1" in said["left_the_group"][rank]


def test_a_wrong_argument_of_one_rank_does_not_break_the_group(said):
    assert [tensor for _, tensor in said["error_of_one_rank"]] == [[3.0] * 4] * 3
    assert said["error_of_one_rank"][1][0].startswith("RuntimeError: shm cannot use ReduceOp.BAND with torch.float32")


def test_an_interrupted_call_breaks_the_group(said):
    assert "rank 0 was interrupted by KeyboardInterrupt" in said["interrupted"][0]


def test_other_groups_of_the_same_ranks_go_on(said):
    for broken, tensor in said["subgroup_breaks_alone"]:
        assert "all_reduce(SUM) of 5 float32" in broken
        assert tensor == [2.0] * 4


def test_an_aborted_group_fails_on_the_others(said):
    for rank in (0, 2):
        assert "rank 1 has aborted the group" in said["aborted"][rank]


def test_a_group_that_cannot_start_says_why(said):
    assert said["too_little_memory"][0].startswith(
        "ValueError: 1 MiB of shared memory are too few for a group of 8 ranks"
    )
    for message in said["too_little_memory"][1:]:
        assert "rank 0 has no shared memory to offer: 1 MiB of shared memory are too few" in message
    assert "rank 1 did not come within 0.5 s" in said["nobody_comes_to_a_new_group"][0]


def test_memory_that_cannot_be_had_or_mapped_is_an_error_that_says_what_to_do(said):
    (refused, _), (refused_elsewhere, unmapped) = said["limits_of_the_process"]
    for message in (refused, refused_elsewhere):
        assert message.startswith("DistBackendError: ")
        assert "bytes of shared memory cannot be had: File too large. Let the group take less, by" in message
    assert unmapped.startswith("DistBackendError: ")
    assert "bytes of shared memory cannot be mapped: Cannot allocate memory" in unmapped
