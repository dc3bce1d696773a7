"""Messages between stages keep values, strides and the generator's state."""

from __future__ import annotations

import pytest
import torch

from unisono.parallel.pipeline.messages import Message, MessageLayout
from unisono.parallel.pipeline.placeholder import TensorLayout

TENSORS = {
    0: torch.randn(3, 4),
    1: torch.randn(4, 3).t(),
    2: torch.randn(3, 1).expand(3, 5),
    3: torch.randn(()).expand(2, 2),
    4: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    5: torch.zeros(0, 7),
    6: torch.arange(5),
    7: torch.tensor([True, False, True]),
    8: torch.randn(7).bfloat16(),
    9: torch.randn(3, dtype=torch.complex64),
    10: torch.tensor(2.5),
}


def same(one, other):
    return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)


@pytest.mark.parametrize("are_gradients", [False, True])
@pytest.mark.parametrize("has_random_state", [False, True])
def test_tensors_arrive_with_their_strides(are_gradients, has_random_state):
    made = MessageLayout(
        {key: TensorLayout.of(value) for key, value in TENSORS.items()},
        are_gradients=are_gradients,
        has_random_state=has_random_state,
    )
    state = torch.get_rng_state()
    memory = made.pack(Message(TENSORS, state))
    assert memory.nbytes == made.nbytes == made.allocate().nbytes
    found = made.unpack(memory.clone())
    assert found.tensors.keys() == TENSORS.keys()
    assert [key for key in TENSORS if not same(TENSORS[key], found.tensors[key])] == []
    if has_random_state:
        drawn = torch.rand(3)
        torch.set_rng_state(found.random_state)
        assert torch.equal(torch.rand(3), drawn)


def test_gradients_may_be_absent_and_have_other_strides():
    made = MessageLayout(
        {0: TensorLayout.of(torch.zeros(3, 4)), "b": TensorLayout.of(torch.zeros(2))}, are_gradients=True
    )
    for gradient in torch.randn(4, 3).t(), torch.ones(()).expand(3, 4), torch.ones(4).expand(3, 4):
        found = made.unpack(made.pack(Message({0: gradient}))).tensors
        assert found.keys() == {0}
        assert same(found[0], gradient)
    spread = torch.randn(3, 8)[:, ::2]  # takes more memory than it has elements
    assert torch.equal(made.unpack(made.pack(Message({0: spread}))).tensors[0], spread)
    assert made.unpack(made.pack(Message({}))).tensors == {}


def test_values_may_have_gaps_in_memory():
    spread = torch.randn(3, 8)[:, ::2]
    made = MessageLayout({0: TensorLayout.of(spread)})
    assert same(made.unpack(made.pack(Message({0: spread}))).tensors[0], spread)
