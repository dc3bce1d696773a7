"""Dropout in evaluation mode, as from_pretrained leaves it, is trained only with a warning; frozen parts may rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.watch import read_events

DATA = TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3)


class Rates(nn.Linear):
    """Keeps a rate for a function, as many models of transformers do."""

    def __init__(self, rate):
        super().__init__(4, 3)
        self.attention_dropout = rate


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        return x


class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


class Attention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


def per_sample(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def network(*inner):
    return nn.Sequential(nn.Linear(4, 4), *inner, nn.Linear(4, 3))


def warnings_of(model, folder, *, change=None, epochs=2, trained=None):
    optimizer = torch.optim.SGD(model.parameters() if trained is None else trained.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, progress=False, directory=folder)
    for epoch in trainer.epochs(epochs):
        for batch in trainer.batches(DATA, batch_size=20):
            trainer.step(per_sample, batch)
        if change is not None:
            change(epoch)
    return [event["message"] for event in read_events(folder / "events.jsonl") if event["event"] == "warning"]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (network(nn.Dropout(0.1)), "'1' is"),
        (network(nn.Sequential(nn.ReLU(), nn.AlphaDropout(0.1))), "'1.1' is"),
        (network(nn.Dropout(0.1), nn.Dropout(0.2)), "'1', '2' are"),
        (network(*[nn.Dropout(0.1)] * 2, *(nn.Dropout(0.1) for _ in range(4))), "'1', '3', '4' and 2 more are"),
        (network(Recurrent(4, 4, num_layers=2, dropout=0.1)), "'1' is"),
        (network(Attention(4, 2, dropout=0.1)), "'1' is"),
        (network(DropPath(0.1)), "'1' is"),
        (Rates(0.1), "'Rates' is"),
    ],
)
def test_dropout_that_rests_in_what_is_trained_is_warned_of_once(tmp_path, capfd, model, name):
    (warning,) = warnings_of(model.eval(), tmp_path)
    assert warning.startswith(f"{name} in evaluation mode, so the model is trained without dropout: call model.train()")
    assert capfd.readouterr().err.count("unisono: warning: ") == 1


def test_a_warning_needs_neither_progress_nor_a_directory_nor_listeners(capfd):
    model = network(nn.Dropout(0.1)).eval()
    trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=4, progress=False)
    for batch in trainer.batches(DATA, batch_size=20):
        trainer.step(per_sample, batch)
    assert capfd.readouterr().err.startswith("unisono: warning: '1' is in evaluation mode, so the model is trained")


def test_what_rests_rightly_is_not_warned_of(tmp_path):
    norm = network(nn.BatchNorm1d(4), nn.Dropout(0.1))
    norm[1].eval()
    none = network(nn.Dropout(0.0), DropPath(0), Recurrent(4, 4), Attention(4, 2)).eval()
    frozen = nn.Sequential(network(nn.Dropout(0.1)), nn.Linear(3, 3))
    frozen[0].eval().requires_grad_(False)
    head = nn.Sequential(network(nn.Dropout(0.1)), nn.Linear(3, 3))
    head[0].eval()  # trained by nobody: the optimizer has the head alone
    for i, (model, trained) in enumerate([(norm, None), (none, None), (frozen, None), (head, head[1])]):
        assert warnings_of(model, tmp_path / str(i), trained=trained) == []


def test_modes_that_change_on_the_way_are_seen(tmp_path):
    model = network(nn.Dropout(0.1))
    assert len(warnings_of(model, tmp_path / "validated", change=lambda epoch: model.eval())) == 1

    thawed = nn.Sequential(network(nn.Dropout(0.1)), nn.Linear(3, 3))
    thawed[0].eval().requires_grad_(False)

    def thaw(epoch):
        thawed[0].requires_grad_(True)

    (warning,) = warnings_of(thawed, tmp_path / "thawed", change=thaw)
    assert warning.startswith("'0.1' is in evaluation mode")


def test_fit_trains_a_model_in_evaluation_mode_and_leaves_its_teacher_alone(tmp_path):
    student, teacher = network(nn.BatchNorm1d(4), nn.Dropout(0.5)).eval(), network(nn.Dropout(0.5)).eval()
    frozen = network(nn.BatchNorm1d(4), nn.Dropout(0.5))
    frozen[1].eval()
    modes = []

    def distilled(models, batch):
        modes.append([m.training for m in (models["student"], models["student"][2], models["teacher"], frozen[1])])
        return per_sample(models["student"], batch) + per_sample(models["frozen"], batch)

    models = {"student": student, "teacher": teacher, "frozen": frozen}
    optimizer = torch.optim.SGD([*student.parameters(), *frozen.parameters()], lr=0.1)
    trainer = unisono.Trainer(models, optimizer, virtual_ranks=4, progress=False, directory=tmp_path)
    trainer.fit(distilled, DATA, batch_size=20, epochs=1)
    assert modes == [[True, True, False, False]] * 8
    assert not [event for event in read_events(tmp_path / "events.jsonl") if event["event"] == "warning"]
