"""Wrong arguments of what saves, loads and stops, and their calls inside a loss function."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from refusals import check_refused, each_case
from unisono.errors import CheckpointError


def make_trainer(directory=None):
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return unisono.Trainer(model, optimizer, virtual_ranks=2, progress=False, directory=directory)


def checkpoints(**options):
    return unisono.Checkpoints(**options)


def save(**options):
    return make_trainer().save(**options)


def stalled(metric="loss", patience=3, **options):
    return make_trainer().stalled(metric, patience=patience, **options)


def load(path="x", **options):
    return make_trainer().load(path, **options)


def export(path="x.pt", **options):
    return make_trainer().export(path, **options)


REFUSED = {
    checkpoints: [
        ({"best": "accuracy"}, ValueError, "best='accuracy' needs a mode: mode=\"max\" if greater values are better"),
        ({"best": 3, "mode": "max"}, TypeError, "best=3 must be a text, and is an int"),
        ({"best": "", "mode": "max"}, ValueError, "best='' must not be empty"),
        ({"mode": "max"}, ValueError, "mode='max' is for the metric of best=..."),
        ({"best": "loss", "mode": "least"}, ValueError, "mode='least' must be one of 'max', 'min'"),
    ],
    save: [
        ({"tag": 3}, TypeError, "tag=3 must be a text"),
        ({"tag": "a/b"}, ValueError, "tag='a/b' becomes the name of a folder: use up to 100 letters"),
        ({"tag": "../x"}, ValueError, "tag='../x' becomes"),
        ({"tag": ".hidden"}, ValueError, "tag='.hidden' becomes"),
        ({"tag": "x" * 101}, ValueError, "becomes the name of a folder"),
        ({"tag": "best"}, ValueError, 'tag="best" is the name of the checkpoint that'),
    ],
    stalled: [
        ({"metric": 3}, TypeError, "metric=3 must be a text"),
        ({"patience": 0}, ValueError, "patience=0 must be at least 1"),
        ({"patience": 2.5}, TypeError, "patience=2.5 must be"),
        ({"mode": "lower"}, ValueError, "mode='lower' must be one of 'min', 'max'"),
        ({"min_delta": -1}, ValueError, "min_delta=-1 must not be negative"),
        ({"min_delta": math.nan}, ValueError, "min_delta=nan must be"),
    ],
    load: [
        ({"path": 3}, TypeError, "path=3 must be the path of a checkpoint or a file, and is an int"),
        ({"path": ""}, ValueError, 'path="" must be the path of a checkpoint'),
        ({"strict": 1}, TypeError, "strict=1 must be True or False"),
        ({"ema": "yes"}, TypeError, "ema='yes' must be"),
        ({"key": 3}, TypeError, "key=3 must be a text"),
        ({"path": "best"}, CheckpointError, 'load("best") needs a run with a directory and Checkpoints(best=...)'),
        ({"path": "nowhere"}, CheckpointError, "nowhere cannot be read: [Errno 2] No such file"),
    ],
    export: [
        ({"path": 3}, TypeError, "path=3 must be the path of a file"),
        ({"path": "x.onnx"}, ValueError, "path='x.onnx' must say by its suffix what to write"),
        ({"path": ""}, ValueError, "path='' must say by its suffix"),
        ({"ema": 1}, TypeError, "ema=1 must be"),
        ({"ema": True}, ValueError, "ema=True needs averaged weights"),
    ],
}


@each_case(REFUSED)
def test_what_cannot_be_meant_is_refused(call, options, error, words):
    check_refused(call, options, error, words)


def test_nothing_of_it_may_be_called_inside_a_loss_function(tmp_path):
    trainer = make_trainer(tmp_path)
    calls = [
        lambda: trainer.save(tag="x"),
        lambda: trainer.load(tmp_path),
        lambda: trainer.export(tmp_path / "x.pt"),
    ]
    turns = itertools.cycle(calls)

    def calling(model, batch):
        next(turns)()

    batch = next(trainer.batches(TensorDataset(torch.ones(20, 6)), batch_size=10))
    for name in ("save", "load", "export"):
        with pytest.raises(RuntimeError, match=rf"the loss function called trainer\.{name}, in the middle of a step"):
            trainer.step(calling, batch)
