"""State that an optimizer has before a run goes where the Trainer moves the parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from unisono.engine.optimizer_placement import follow_parameters


def adagrad(parameters):
    return torch.optim.Adagrad(parameters, lr=0.1)  # makes its state when it is built


def loaded(parameters):
    parameters = [*parameters]
    for p in parameters:
        p.grad = torch.ones_like(p)
    first = torch.optim.AdamW(parameters)
    first.step()
    optimizer = torch.optim.AdamW(parameters)
    optimizer.load_state_dict(first.state_dict())
    return optimizer


@pytest.mark.parametrize("make", [adagrad, loaded])
def test_state_follows_the_parameters_and_step_does_not(make):
    model = nn.Sequential(nn.Linear(3, 2), nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last))
    begun = make(model.parameters())
    there = copy.deepcopy(model).to("meta")  # a GPU that every machine has
    optimizer = make(there.parameters())
    for p, q in zip(model.parameters(), there.parameters(), strict=True):
        optimizer.state[q] = dict(begun.state[p])
    follow_parameters([optimizer])
    moved = set()
    for p in there.parameters():
        for key, value in optimizer.state[p].items():
            if key == "step":
                assert value.device.type == "cpu" and value.dim() == 0
            else:
                moved.add(key)
                assert value.device == p.device and value.stride() == p.stride()
    assert moved in ({"sum"}, {"exp_avg", "exp_avg_sq"})


def test_what_lies_there_stays_the_same_tensor():
    model = nn.Linear(3, 2)
    optimizer = adagrad(model.parameters())
    before = optimizer.state[model.weight]["sum"]
    follow_parameters([optimizer])
    assert optimizer.state[model.weight]["sum"] is before
