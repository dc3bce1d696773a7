"""A loss function leaves the gradients of its step alone, and may compute others."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.errors import LossError

RANKS = """
import os, torch, unisono
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
data = TensorDataset(torch.randn(40, 4), torch.arange(40) % 3)


def loss(m, b):
    losses = F.cross_entropy(m(b[0]), b[1], reduction="none")
    if os.environ["RANK"] == "1":
        losses.sum().backward(retain_graph=True)
    return losses


trainer = unisono.Trainer(model, torch.optim.AdamW(model.parameters()), virtual_ranks=4, progress=False)
before = trainer.digest()
try:
    for batch in trainer.batches(data, batch_size=8, shuffle=False):
        trainer.step(loss, batch)
        before = trainer.digest()
finally:
    print("unchanged", trainer.digest() == before, flush=True)
"""


def make_trainer(virtual_ranks=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return unisono.Trainer(model, optimizer, virtual_ranks=virtual_ranks, progress=False)


def make_data():
    return TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3)


def first_batch(trainer, **options):
    return next(trainer.batches(make_data(), batch_size=8, **options))


def per_sample(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def with_backward(model, batch, *, keeps_graph=False, clears=False):
    losses = per_sample(model, batch)
    losses.mean().backward(retain_graph=keeps_graph or clears)
    if clears:
        model.zero_grad()
    return losses


@pytest.mark.parametrize("keeps_graph", [False, True])
def test_backward_in_a_loss_function_changes_nothing(keeps_graph):
    trainer = make_trainer()
    before = trainer.digest()
    batch = first_batch(trainer)
    with pytest.raises(LossError, match=r"has called backward: '0\.weight' has a gradient, .* return the loss"):
        trainer.step(partial(with_backward, keeps_graph=keeps_graph), batch)
    assert trainer.digest() == before
    assert trainer.step(per_sample, batch) > 0  # and one can go on


def test_backward_over_a_whole_batch_is_refused_too():
    trainer = make_trainer()
    batch = first_batch(trainer)
    for step in (
        lambda: trainer.step(partial(with_backward, keeps_graph=True), batch, encode=lambda m, b: b),
        lambda: trainer.step(lambda m, z: z, batch, encode=partial(with_backward, keeps_graph=True)),
    ):
        with pytest.raises(LossError, match="the loss function has called backward"):
            step()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.zero_grad(),
        lambda model: model.zero_grad(set_to_none=False),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        lambda model: model(torch.randn(2, 4)).sum().backward(),
    ],
    ids=["none", "zero", "clip", "backward"],
)
def test_gradients_of_earlier_micro_batches_are_not_for_the_loss_function(change):
    def loss(model, batch):
        if model[0].weight.grad is not None:
            change(model)
        return per_sample(model, batch)

    trainer = make_trainer(virtual_ranks=2)
    before = trainer.digest()
    with pytest.raises(LossError, match="has changed gradients, which hold what the share's earlier micro-batches"):
        trainer.step(loss, first_batch(trainer, micro_batch_size=2))
    assert trainer.digest() == before


def test_a_loss_function_may_compute_gradients_that_it_does_not_leave():
    """Such as those of the input, for a penalty or an attack."""
    trainer, plain = make_trainer(), make_trainer()
    for each, loss in ((trainer, partial(with_backward, clears=True)), (plain, per_sample)):
        for batch in each.batches(make_data(), batch_size=8):
            each.step(loss, batch)

    def penalized(model, batch):
        inputs = batch[0].requires_grad_()
        losses = per_sample(model, (inputs, batch[1]))
        (found,) = torch.autograd.grad(losses.sum(), inputs, create_graph=True)
        return losses + found.square().sum(1)

    assert trainer.digest() == plain.digest()
    assert trainer.step(penalized, first_batch(trainer)) > 0


def test_backward_in_the_loss_function_is_refused_on_all_ranks(fork_ranks):
    """Of one rank: its gradient would count twice, and nobody else's."""
    job = fork_ranks(2, RANKS, code=1)
    assert "LossError: the loss function has called backward: '0.weight' has a gradient" in job.said
    assert job.out.count("unchanged True") == 2
