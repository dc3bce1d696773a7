"""Setting every generator that training code draws from: torch's, Python's and NumPy's.

The state of a Trainer's run is never saved: it is set from a key of the plan wherever random numbers are about to be
drawn, so it is a function of the place in the run and not of what was drawn before. A user's own loop keeps its state.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["kept_generators", "set_generators"]


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


@contextmanager
def kept_generators() -> Iterator[None]:
    """Put the generators of torch's CPU, Python and NumPy back to where they were, whatever is set or drawn inside.

    About 15 µs, and 60 µs more if NumPy has been imported.
    """
    numpy = sys.modules.get("numpy")
    states = torch.default_generator.get_state(), random.getstate(), numpy and numpy.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        random.setstate(states[1])
        if numpy is not None:
            numpy.random.set_state(states[2])
