"""Slots: what is published is seen in its round, and no slot is written while a peer may still read it."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import DistBackendError
from two_ranks import SLOT_NBYTES, two_ranks

from unisono.shm.collective_context import CollectiveContext
from unisono.shm.data_movement import barrier
from unisono.shm.fingerprint import CollectiveFingerprint
from unisono.shm.slot_ring import DEPTH


def test_ranks_see_each_others_rounds():
    one, two = (rank.slots for rank in two_ranks())
    for round_ in range(3 * DEPTH):
        for slots in (one, two):
            assert slots.readers()[1] == []
            slots.slot(slots.rank, slots.round, torch.int64)[:] = 10 * round_ + slots.rank
            slots.write_header(bytes([round_, slots.rank]))
        assert one.publish() == round_
        assert one.missing(round_, [1]) == [1]
        assert two.missing(round_, [0]) == []
        assert two.slot(0, round_, torch.int64).tolist() == [10 * round_] * (SLOT_NBYTES // 8)
        assert two.header(0, round_, 2) == bytes([round_, 0])
        two.publish()
        assert one.missing(round_, [1]) == []
        assert int(one.slot(1, round_, torch.int64)[0]) == 10 * round_ + 1


def test_a_rank_may_be_ahead_as_far_as_slots_reach_and_no_further():
    ahead, behind = (rank.slots for rank in two_ranks())
    while not (late := ahead.readers()[1]):
        ahead.publish()
    assert late == [1]
    assert 3 <= ahead.round < DEPTH
    behind.publish()
    ahead.wait_for(1, 10.0)
    assert ahead.readers()[1] == []


def _meet(one, two):
    """Run an operation on each rank until both end."""
    running = [one, two]
    while running:
        for operation in list(running):
            try:
                next(operation)
            except StopIteration:
                running.remove(operation)


def test_ranks_that_call_the_same_come_through_and_others_are_named():
    contexts = [CollectiveContext(rank.slots, [0, 1]) for rank in two_ranks()]
    for _ in range(DEPTH):
        _meet(*(barrier(context, CollectiveFingerprint("barrier", None, 0)) for context in contexts))
    assert [context.number for context in contexts] == [DEPTH, DEPTH]
    calls = [CollectiveFingerprint("broadcast", torch.float32, 2, "", 0), CollectiveFingerprint("barrier", None, 0)]
    with pytest.raises(
        DistBackendError, match=r"broadcast with root 0 of 2 float32 .* on rank 0, barrier .* on rank 1"
    ):
        _meet(*(barrier(context, call) for context, call in zip(contexts, calls, strict=True)))
