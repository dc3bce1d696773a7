"""Copies of the state of ranks in shared memory: the one from before is whole while the next one is written."""

from __future__ import annotations

import os

import torch

from unisono.engine.staged.state_slots import StateContent, StateSlots, slots_nbytes
from unisono.shm.segment import Segment

CAPACITIES = [16384, 4096]


def slots() -> list[StateSlots]:
    """The slots of two ranks, each as its rank has them."""
    segment = Segment.create(slots_nbytes(CAPACITIES), name="test")
    StateSlots.prepare(CAPACITIES)(segment)
    return [StateSlots(Segment(os.dup(segment.fd)), rank=rank) for rank in range(2)]


def content() -> StateContent:
    turned = torch.arange(12.0).view(3, 4).t()
    tensors = {"turned": turned, "again": turned, "empty": torch.zeros(0, 3), "step": torch.tensor(7.0)}
    return StateContent({"model": tensors, "buffers": {"mask": torch.tensor([True, False])}}, {"lr": 0.5})


def test_what_one_rank_writes_another_reads():
    first, second = slots()
    written = content()
    first.write(1, written)
    found = second.read(0, 1)
    assert found.document == {"lr": 0.5}
    for group, tensors in written.groups.items():
        assert [*found.groups[group]] == [*tensors]
        for name, tensor in tensors.items():
            read = found.groups[group][name]
            assert torch.equal(read, tensor) and read.dtype == tensor.dtype and read.stride() == tensor.stride()
    assert found.groups["model"]["turned"].data_ptr() == found.groups["model"]["again"].data_ptr()


def test_the_last_but_one_stays_whole_and_the_one_before_it_is_written_over():
    first, second = slots()
    state = content()
    for number in range(1, 5):
        state.groups["model"]["step"].fill_(number)
        first.write(number, state)
        second.write(number, StateContent({"model": {"w": torch.full((5,), -float(number))}}, number))
    for number in (3, 4):
        assert second.read(0, number).groups["model"]["step"].item() == number
        assert first.read(1, number).groups["model"]["w"].tolist() == [-number] * 5
        assert first.read(1, number).document == number


def test_a_state_that_has_become_too_large_is_told_to_all():
    first, second = slots()
    second.write(1, StateContent({"model": {"w": torch.ones(100)}}, None))
    assert not first.is_full
    second.write(2, StateContent({"model": {"w": torch.ones(1000)}}, None))
    assert first.is_full and second.is_full
    assert first.read(1, 1).groups["model"]["w"].tolist() == [1.0] * 100, "what was there is left alone"
