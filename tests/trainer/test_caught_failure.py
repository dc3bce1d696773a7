"""A rank dies in a run whose loop has caught the exception of an earlier call."""

from __future__ import annotations

import pytest

PROGRAM = """
import os, signal, sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
import unisono.errors

ENGINE, WHEN, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])
torch.manual_seed(0)
model = nn.Linear(6, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(64, 6), torch.arange(64) % 3)
trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, engine=ENGINE, progress=False)
rank, bad = trainer.rank, False


def loss(model, batch):
    here = (trainer.steps_done, bad) == ((5, False) if WHEN == "later" else (3, False))
    if here and caught and rank == 1 and WHEN != "never" and not (FOLDER / "died").exists():
        (FOLDER / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none") * (float("nan") if bad else 1.0)


caught = trainer.recovered  # what plain variables hold begins anew
for epoch in trainer.epochs(3):
    for batch in trainer.batches(data, batch_size=16):
        if trainer.steps_done == 3:
            bad = True
            try:
                trainer.step(loss, batch)
            except unisono.errors.NonFiniteLossError:
                caught = True
            bad = False
        trainer.step(loss, batch)
print("digest", trainer.digest())
"""


@pytest.mark.parametrize("engine", ["shared", "collective"])
def test_a_rank_is_replaced_in_a_later_step(run_ranks, tmp_path, engine):
    calm = run_ranks(2, PROGRAM, engine, "never", tmp_path)
    job = run_ranks(2, PROGRAM, engine, "later", tmp_path)
    assert "rank 1 was killed by SIGKILL in forward of step 6; replaced" in job.said
    assert job.lines() == calm.lines()


def test_a_new_rank_cannot_repeat_a_failure_alone(run_ranks, tmp_path):
    job = run_ranks(2, PROGRAM, "collective", "same", tmp_path, code=None)
    assert job.code
    assert "comes to trainer.step, which has failed in the others" in job.said
