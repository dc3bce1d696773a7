"""The states of torch's generators travel as bytes."""

from __future__ import annotations

import torch

from unisono.state.random import CPU_STATE_NBYTES, generator_states, set_generator_states


def test_states_set_the_generators_to_where_they_were():
    with torch.random.fork_rng(devices=[]):
        states = generator_states()
        drawn = torch.rand(3)
        padded = torch.cat([torch.zeros(8, dtype=torch.uint8), states])[8:]  # not at the beginning of its memory
        set_generator_states(padded[:CPU_STATE_NBYTES])
        assert torch.equal(torch.rand(3), drawn)
