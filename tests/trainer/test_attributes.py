"""A tensor in a plain attribute that the forward pass modifies is warned of: each rank has its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono

DATA = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)))


class Keeping(nn.Module):
    """Has a tensor that is no parameter, and does something to it in each forward pass."""

    def __init__(self, do, *, start=True):
        super().__init__()
        self.layer, self.do = nn.Linear(4, 4), do
        self.kept = torch.zeros(4) if start else None

    def forward(self, x):
        out = self.layer(x)
        with torch.no_grad():
            self.do(self, out.detach())
        return out


def in_place(module, out):
    module.kept.mul_(0.9).add_(out.mean(0))


def by_item(module, out):
    module.kept[:2] = out[0, :2]


def once_it_is_there(module, out):
    if module.kept is None:
        module.kept = torch.zeros(4)
    in_place(module, out)


def by_another_tensor(module, out):
    module.kept = 0.9 * module.kept + out.mean(0)


def not_at_all(module, out):
    return module.kept + out


def warned(model, capfd, *, virtual_ranks=4):
    trainer = unisono.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=virtual_ranks, progress=False
    )
    for _ in trainer.epochs(2):
        for batch in trainer.batches(DATA, batch_size=8):
            trainer.step(lambda model, batch: model(batch[0]).square().mean(1), batch)
    return capfd.readouterr().err


@pytest.mark.parametrize(("do", "start"), [(in_place, True), (by_item, True), (once_it_is_there, False)])
def test_a_tensor_that_is_modified_is_warned_of_once_with_what_to_do(capfd, do, start):
    (line,) = warned(nn.Sequential(nn.Identity(), Keeping(do, start=start)), capfd).splitlines()
    assert line.startswith("unisono: warning: the forward pass modifies the tensor in the attribute '1.kept', of which")
    assert line.endswith("Make it a buffer: self.register_buffer('kept', ...).")


@pytest.mark.parametrize("do", [by_another_tensor, not_at_all])
def test_a_note_and_a_constant_are_not(capfd, do):
    assert warned(Keeping(do), capfd) == ""


def test_neither_are_buffers_nor_metrics_nor_what_only_one_virtual_rank_does(capfd):
    buffer = Keeping(in_place)
    del buffer.kept
    buffer.register_buffer("kept", torch.zeros(4))
    assert warned(buffer, capfd) == ""
    torchmetrics = pytest.importorskip("torchmetrics")
    counting = Keeping(lambda module, out: module.mean.update(out))
    counting.mean = torchmetrics.MeanMetric()
    assert warned(counting, capfd) == ""
    assert warned(Keeping(in_place), capfd, virtual_ranks=1) == ""
