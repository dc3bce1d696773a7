"""A tensor in a plain attribute that the forward pass modifies is warned of: each rank has its own."""

from __future__ import annotations

from collections import deque

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


def note(module, out):
    module.kept = out.mean(0)


def as_a_cache(module, out):
    module.kept = torch.zeros(len(module.kept) + 1)


def by_an_equal_tensor(module, out):
    module.kept = module.kept.clone()


def not_at_all(module, out):
    return module.kept + out


def warned(model, capfd, *, virtual_ranks=4, engine="auto"):
    trainer = unisono.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        virtual_ranks=virtual_ranks,
        engine=engine,
        progress=False,
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


def test_so_is_one_that_is_there_from_the_start_and_gets_another_tensor(capfd):
    (line,) = warned(nn.Sequential(nn.Identity(), Keeping(by_another_tensor)), capfd).splitlines()
    assert line.startswith("unisono: warning: the forward pass puts another tensor into the attribute '1.kept', of")


@pytest.mark.parametrize(
    ("make", "place"), [(lambda t: [1, t], "[1]"), (lambda t: {"mean": t}, "['mean']"), (lambda t: deque([t]), "[0]")]
)
def test_so_is_one_in_a_container(capfd, make, place):
    mean = torch.zeros(4)
    model = Keeping(lambda _, out: mean.mul_(0.9).add_(out.mean(0)))
    model.history = make(mean)
    (line,) = warned(model, capfd).splitlines()
    assert f" modifies the tensor in the attribute {'history' + place!r}, of which" in line


@pytest.mark.parametrize("engine", ["shared", "collective"])
def test_a_view_of_a_weight_is_not_since_the_optimizer_writes_it(capfd, engine):
    model = Keeping(not_at_all)
    model.alias, model.aliases = model.layer.weight.detach(), [model.layer.bias.detach()]
    assert warned(model, capfd, engine=engine) == ""


@pytest.mark.parametrize(
    ("do", "start"), [(note, False), (as_a_cache, True), (by_an_equal_tensor, True), (not_at_all, True)]
)
def test_a_note_a_cache_and_a_constant_are_not(capfd, do, start):
    assert warned(Keeping(do, start=start), capfd) == ""


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


PIPELINE = """
import torch
from torch import nn
import unisono
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.kept = nn.Linear(4, 4), nn.Linear(4, 4), torch.zeros(4)
    def forward(self, x):
        out = self.last(self.first(x))
        self.kept = 0.9 * self.kept + out.detach().mean(0)
        return out
torch.manual_seed(0)
model = Model()
data = torch.utils.data.TensorDataset(torch.randn(24, 4))
parallel = unisono.parallel.Pipeline(stages=2) if STAGES else None
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, progress=False, parallel=parallel)
for _ in trainer.epochs(2):
    for batch in trainer.batches(data, batch_size=8):
        trainer.step(lambda model, batch: model(batch[0]).square().mean(1), batch)
trainer.print("weights sha256:", trainer.digest())
"""


def test_one_that_another_stage_computes_is_not_read(run_ranks):
    whole = run_ranks(1, PIPELINE.replace("STAGES", "False"))
    assert run_ranks(2, PIPELINE.replace("STAGES", "True")).sha() == whole.sha()
