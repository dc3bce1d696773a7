"""The memory of a rank that has no model: Python, torch, and what a user's file imports."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from unisono.machine import resident_bytes

__all__ = ["base_nbytes"]

_PATIENCE_S = 120
"""Seconds after which a child that builds a model is given up."""


def base_nbytes(build: Callable[[], Any]) -> int:
    """Return the memory of a rank before it has a model, in bytes, with what torch loads for a first step.

    A child of this process builds the model without memory and trains a tiny one. So what the build function imports
    counts, and what only this estimate needs does not.

    Args:
        build: Returns model, optimizer, loss function and data.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        # Whatever happens here, the child must not go on as its parent would.
        try:
            os.write(writer, str(_measure(build)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as told:
        found = told.read()
    os.waitpid(child, 0)
    return int(found) if found else resident_bytes() or 0


def _measure(build: Callable[[], Any]) -> int:
    signal.alarm(_PATIENCE_S)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    torch.set_num_threads(1)  # threads of the parent's OpenMP are not here
    importlib.import_module("unisono.trainer.trainer")
    # A failure is found, and told, when the model is built for its profile.
    with suppress(Exception), torch.device("meta"):
        build()
    layer = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.zeros(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    return resident_bytes() or 0
