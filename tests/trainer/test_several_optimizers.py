"""Several optimizers of one Trainer, stepped together and one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize("before", [[None], ["head", "rest", None], ["rest", None, "rest"]])
@pytest.mark.parametrize("name", ["head", None])
def test_a_parameter_that_is_frozen_keeps_its_value_whichever_optimizers_were_stepped_before(before, name):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizers = {
        "head": torch.optim.AdamW(model[2].parameters(), lr=0.1),
        "rest": torch.optim.SGD(model[0].parameters(), lr=0.3, momentum=0.5),
    }
    trainer, weight = unisono.Trainer(model, optimizers, virtual_ranks=4, progress=False), model[2].weight
    batch = next(trainer.batches(TensorDataset(torch.randn(28, 5), torch.arange(28) % 3), batch_size=12))
    for is_frozen in (True, False, True):
        for each in before:
            trainer.step(cross_entropy, batch, optimizer=each)
        weight.requires_grad_(not is_frozen)
        value = weight.clone()
        trainer.step(cross_entropy, batch, optimizer=name)
        assert torch.equal(weight, value) == is_frozen
        weight.requires_grad_(True)


@pytest.mark.parametrize("overflows", ["head", "rest"])
def test_several_optimizers_skip_a_step_together(overflows):
    """The scaled gradient of one alone overflows: none steps, and all do once the scale fits."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"head": nn.Linear(3, 1), "rest": nn.Linear(3, 1)})
    optimizers = {name: torch.optim.Adam(part.parameters(), lr=0.1) for name, part in model.items()}
    trainer = unisono.Trainer(model, optimizers, virtual_ranks=2, autocast="fp16", progress=False)

    def loss(model, batch):
        return sum(part(batch[0] * (20.0 if name == overflows else 1e-3)).squeeze(1) for name, part in model.items())

    data = TensorDataset(torch.ones(4, 3))
    skipped, moved = [], []
    for _ in trainer.epochs(9):
        for batch in trainer.batches(data, batch_size=4):
            before = {name: p.clone() for name, p in model.named_parameters()}
            skipped.append(trainer.step(loss, batch).skipped)
            moved.append(
                {name.split(".")[0] for name, p in model.named_parameters() if not torch.equal(p, before[name])}
            )
    assert skipped[0] and not skipped[-1]
    assert moved == [set() if skip else {"head", "rest"} for skip in skipped]
