"""Parameters keep values and strides where they move, and writes from elsewhere are found."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from unisono.engine import StepTransaction, Trained
from unisono.engine.shared.parameter_arena import LoadStateDictHook, SharedParameters
from unisono.errors import UnisonoError


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(8, 5).to(torch.bfloat16), nn.Linear(1, 1, bias=False))
    model[0].to(memory_format=torch.channels_last)
    return model


def _trained(model):
    names, parameters = zip(*model.named_parameters(), strict=True)
    return Trained(names, parameters)


@pytest.fixture
def shared(model, make_runtimes):
    (runtime,) = make_runtimes(1)
    shared = SharedParameters(runtime, LoadStateDictHook([model]))
    shared.move(StepTransaction(), _trained(model))
    return shared


def test_values_and_strides_are_kept(model, make_runtimes):
    before = [(p.detach().clone(), p.stride(), p.data_ptr()) for p in model.parameters()]
    (runtime,) = make_runtimes(1)
    shared = SharedParameters(runtime, LoadStateDictHook([model]))
    shared.move(StepTransaction(), _trained(model))
    for p, (value, stride, address) in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value)
        assert p.stride() == stride
        assert p.data_ptr() != address
        assert sorted(shared.vector(p).tolist()) == sorted(value.flatten().tolist())
    addresses = [p.data_ptr() for p in model.parameters()]
    shared.move(StepTransaction(), _trained(model))
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_all_ranks_have_the_values_of_the_first(make_runtimes, run_threads):
    runtimes = make_runtimes(2)

    def move(rank):
        torch_model = nn.Linear(3, 2)
        nn.init.constant_(torch_model.weight, 1.0 + rank)
        SharedParameters(runtimes[rank], LoadStateDictHook()).move(StepTransaction(), _trained(torch_model))
        return torch_model

    first, second = run_threads(move, 2)
    assert second.weight.eq(1.0).all()
    first.weight.data[0, 0] = 5.0
    assert second.weight[0, 0] == 5.0


@pytest.mark.parametrize("element", [0, 4, 8])
def test_a_write_that_torch_counts_or_that_meets_a_sample_is_found(model, shared, element):
    shared.check()
    weight = model[1].weight
    with torch.no_grad():
        weight[1].add_(1.0)
    with pytest.raises(UnisonoError, match=r"parameter '1.weight' was written to between two steps"):
        shared.check()
    shared.remember()
    shared.check()
    weight.data.view(-1)[{0: 0, 4: weight.numel() // 2, 8: weight.numel() - 1}[element]] += 1.0  # not counted
    with pytest.raises(UnisonoError, match=r"parameter '1.weight'"):
        shared.check()


def test_weights_are_loaded_into_memory_of_their_own(model, shared):
    addresses = [p.data_ptr() for p in model.parameters()]
    kept = shared.vector(model[2].weight).clone()
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    assert all(p.data_ptr() != address for p, address in zip(model.parameters(), addresses, strict=True))
    assert torch.equal(shared.vector(model[2].weight), kept)
    shared.move(StepTransaction(), _trained(model))
    assert shared.vector(model[2].weight).eq(0).all()
    shared.check()


def test_a_copy_of_the_model_is_not_watched(model, shared):
    other = copy.deepcopy(model)
    addresses = [p.data_ptr() for p in other.parameters()]
    other.load_state_dict(model.state_dict())
    assert [p.data_ptr() for p in other.parameters()] == addresses
    shared.check()
