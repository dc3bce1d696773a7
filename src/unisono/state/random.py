"""Setting the random generators that training code uses: torch's, Python's and NumPy's.

A Trainer never saves the state of the generators: it sets them from a key of the plan before random numbers are drawn,
so the state is a function of the place in the run and not of earlier draws. A user's own loop keeps its state.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = [
    "CPU_STATE_NBYTES",
    "GPU_STATE_NBYTES",
    "generator_states",
    "kept_generators",
    "set_generator_states",
    "set_generators",
]

CPU_STATE_NBYTES, GPU_STATE_NBYTES = torch.default_generator.get_state().nbytes, 16
"""Lengths of the states of torch's generators, on the CPU and on an NVIDIA GPU."""


def set_generators(key: int, device: torch.device | None = None) -> None:
    """Seed the generators of this process from one key, and that of `device` if it is a GPU. About 6 µs on a CPU.

    NumPy is not imported: its generator is set if the program has imported it.
    """
    # torch.manual_seed would also seed every type of device, which takes ten times as long.
    torch.default_generator.manual_seed(key)
    random.seed(key)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(key & 0xFFFFFFFF)
    kind = "cpu" if device is None else device.type
    if kind == "cuda":
        torch.cuda.manual_seed(key)
    elif kind == "mps":
        torch.mps.manual_seed(key)


def generator_states() -> Tensor:
    """Return the state of torch's CPU generator and, if this process uses a GPU, that of the current one, as bytes."""
    state = torch.default_generator.get_state()
    uses_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cat([state, torch.cuda.get_rng_state()]) if uses_gpu else state


def set_generator_states(states: Tensor) -> None:
    """Set torch's CPU generator, and the one of the current GPU if its state is there, too.

    Args:
        states: What `generator_states` has returned, or the beginning of it that is the CPU's. On the CPU.
    """
    torch.default_generator.set_state(states[:CPU_STATE_NBYTES].clone())
    if len(states) > CPU_STATE_NBYTES:
        torch.cuda.set_rng_state(states[CPU_STATE_NBYTES:].clone())


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the state of torch's CPU generator, Python's and NumPy's after the block, whatever it sets or draws.

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
