"""What the scripts of recovery have in common: the task, and what they write down for `bench/step_log.py`."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import torch
from torch import nn

__all__ = ["BATCH", "SAMPLES", "Diary", "make_data", "make_model", "own_samples", "tell_way"]

SAMPLES, BATCH = 1024, 64
_PAUSE_S = 0.005
"""Follows each step, so that no system is measured by the speed of its steps."""


def make_model() -> nn.Module:
    """Build a model of 66 thousand parameters, with the same weights in each process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the samples and their classes."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 64, generator=generator), torch.randint(10, (SAMPLES,), generator=generator)


def own_samples(done: int, rank: int, ranks: int) -> slice:
    """Return a rank's part of the batch that follows so many steps."""
    first = done * BATCH % SAMPLES + rank * (BATCH // ranks)
    return slice(first, first + BATCH // ranks)


def tell_way(folder: str, seconds: float) -> None:
    """Tell how long the script was on its way to its Trainer, which comes next."""
    Path(folder, f"way.{os.getpid()}").write_text(f"{seconds}\n", encoding="utf-8")


class Diary:
    """What a rank tells of itself, in a folder. It is made when the rank is about to train.

    Args:
        folder: The folder of the run.
        rank: This rank.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self._folder, self._rank = Path(folder), rank
        self._steps = self._folder.joinpath(f"steps.{rank}.{os.getpid()}").open("w", buffering=1)

    def step(self, done: int, samples: int) -> None:
        """Tell that a step is done, with so many samples over all ranks, and pause."""
        self._steps.write(f"{time.monotonic()} {done} {samples}\n")
        time.sleep(_PAUSE_S)

    def end(self, model: nn.Module) -> None:
        """Tell that all steps are done, and what the weights have come to."""
        value = hashlib.sha256()
        for parameter in model.parameters():
            value.update(bytes(parameter.detach().view(torch.uint8).flatten().tolist()))
        done = self._folder / f"digest.{self._rank}"
        part = done.with_name(f"{done.name}.part")
        part.write_text(value.hexdigest(), encoding="utf-8")
        part.replace(done)
