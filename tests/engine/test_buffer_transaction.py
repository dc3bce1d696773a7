"""Buffers over a step in one process: the mean over virtual ranks, or what they were before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from unisono.collectives.world import World
from unisono.engine import BufferTransaction, StepTransaction
from unisono.engine.buffer_vector import BufferVector
from unisono.engine.tracked_buffer import TrackedBuffer
from unisono.errors import LossError


class _Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.tensor(2**62 + 1))
        self.register_buffer("fixed", torch.ones(1))


@pytest.fixture
def model():
    return _Counting()


@pytest.fixture
def buffers(model):
    return BufferTransaction({"": model}, World(), make_all_reduce=None, virtual_ranks=4)


def _forward(model, leaf):
    model.mean += float(leaf)
    model.count += 1 + leaf


def _step(model, buffers, leaves):
    buffers.find()
    buffers.start(leaves=leaves)
    found = []
    for leaf in range(leaves):
        _forward(model, leaf)
        found.append(buffers.new_buffers())
        buffers.close_leaf(leaf)
    buffers.launch()
    return found


def test_a_buffer_becomes_the_mean_and_a_counter_that_of_the_first(model, buffers):
    step = StepTransaction()
    for number in (1, 2):
        found = _step(model, buffers, 4)
        assert found == [number == 1] * 4
        buffers.receive(step)
        buffers.commit(step, new_buffers=found[0])
        assert model.mean.tolist() == [1.5 * number] * 2
        assert model.count.item() == 2**62 + 1 + number
    assert model.fixed.item() == 1.0


def test_a_step_that_fails_changes_nothing(model, buffers):
    _step(model, buffers, 3)
    assert buffers.roll_back()
    assert (model.mean.tolist(), model.count.item()) == ([0.0, 0.0], 2**62 + 1)


def test_a_parameter_that_a_forward_pass_writes_is_refused(model, buffers):
    buffers.start(leaves=2)
    model.weight.data[0] = 5.0
    with pytest.raises(LossError, match="parameter 'weight' was written to in the forward pass"):
        buffers.new_buffers()
    assert not buffers.roll_back()


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([0, 1, -1, 2**63 - 1, -(2**63)], torch.int64),
        ([0, 2**64 - 1, 2**63], torch.uint64),
        ([True, False], torch.bool),
        ([-128, 127], torch.int8),
    ],
)
def test_whole_numbers_survive_as_pairs_of_float64(values, dtype):
    value, mean = torch.tensor(values, dtype=dtype), torch.tensor([[0.5, 1.5]])
    vector = BufferVector([value, mean], torch.device("cpu"))
    first, second = vector.pack([([value, mean], [True, False]), ([value, mean], [False, False])], first=0)
    total = first.add_(second)
    changed, (whole, average) = vector.unpack(total, leaves=2)
    assert changed == [True, False]
    assert torch.equal(whole.to(dtype), value)
    assert average.tolist() == mean.tolist()


def test_norm_layers_keep_to_the_mean_when_some_are_frozen_or_get_other_buffers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    plain = [copy.deepcopy(model) for _ in range(3)]
    buffers = BufferTransaction({"": model}, World(), make_all_reduce=None, virtual_ranks=3)
    for number in range(4):
        if number == 1:
            model[1].eval()
        if number == 2:
            model[1].train()
            model[2].running_mean = torch.full((2,), 7.0)
        if number == 3:
            model[0].running_var.fill_(3.0)
        buffers.find()
        buffers.start(leaves=3)
        before = copy.deepcopy(model)
        found = []
        for leaf in range(3):
            batch = torch.randn(4, 2)
            model(batch)
            plain[leaf] = copy.deepcopy(before)
            plain[leaf](batch)
            found.append(buffers.new_buffers())
            buffers.close_leaf(leaf)
        buffers.launch()
        step = StepTransaction()
        buffers.receive(step)
        buffers.commit(step, new_buffers=any(found))
        for name, value in model.named_buffers():
            values = [dict(each.named_buffers())[name] for each in plain]
            if name.endswith("tracked"):
                assert value == values[0]
            else:
                assert torch.equal(value, ((values[0].double() + values[1] + values[2]) / 3).float())
    assert buffers.undo()
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before.buffers(), strict=True))


@pytest.mark.parametrize(
    ("value", "index", "other"),
    [
        (torch.zeros(3000), 2999, -0.0),
        (torch.full((40, 50), torch.nan), (39, 49), 1.0),
        (torch.ones(1001, dtype=torch.bool), 1000, False),
        (torch.zeros(30, 20).t(), (19, 29), 1.0),
        (torch.tensor(5), (), 6),
    ],
)
def test_a_write_past_the_version_counter_is_seen_by_its_bits(value, index, other):
    module = nn.Module()
    module.register_buffer("b", value)
    tracked = TrackedBuffer("b", module, "b")
    assert not tracked.changed()
    assert not tracked.was_written()
    module.b.data[index] = other
    assert module.b._version == tracked.version
    assert tracked.changed()
    assert tracked.was_written()
