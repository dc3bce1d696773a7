"""Setting every generator that training code draws from: torch's, Python's and NumPy's.

State is never saved or restored: it is set from a key of the plan wherever random numbers are about to be drawn, so it
is a function of the place in the run and not of what was drawn before.
"""

from __future__ import annotations

import random
import sys

import torch

__all__ = ["set_generators"]


def set_generators(key: int, device: torch.device | None = None) -> None:
    """Seed the generators of this process from one key; a device's too if it is not the CPU. About 6 µs on a CPU.

    Importing NumPy is left to the user: its generator is set if it has been imported.
    """
    # torch.manual_seed would also visit every kind of device there is, which costs ten times as much.
    torch.default_generator.manual_seed(key)
    random.seed(key)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(key & 0xFFFFFFFF)
    if device is not None and device.type == "cuda":
        torch.cuda.manual_seed(key)
    elif device is not None and device.type == "mps":
        torch.mps.manual_seed(key)
