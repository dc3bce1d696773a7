"""The sum of a node's gradients, of which autograd does some additions."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from unisono.engine.gradient_sum import GradientSum
from unisono.engine.node_sums import NodeSum, add, take
from unisono.errors import LossError
from unisono.plan import Node

NAMES = ("a", "b", "c", "d")


def leaf_loss(parameters: list[Tensor], draw: random.Random) -> Tensor:
    """Return a loss that gives some parameters no gradient, and some a gradient of -0.0."""
    loss = torch.zeros((), requires_grad=True) * 1.0
    for p in parameters:
        kind = draw.random()
        if kind < 0.15:
            loss = loss + (p * -0.0).sum()
        elif kind < 0.75:
            loss = loss + (p * torch.randn(p.shape)).sum()
    return loss


def sum_of_leaves(seed: int, node: Node, *, resumes: bool | None) -> tuple[list[Tensor | None], int]:
    """Sum a node's leaves; with `resumes` None, by taking each leaf's gradients and adding them."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    parameters = [torch.randn(5, requires_grad=True) for _ in NAMES]
    new = GradientSum(node, resumes=bool(resumes))
    old = NodeSum(node, add=add)
    resumed = 0
    for leaf in range(node.start, node.stop):
        parts = draw.choice((1, 1, 2))
        for part in range(parts):
            loss = leaf_loss(parameters, draw)
            if part == parts - 1 and resumes is not None:
                new.resume(leaf, parameters)
                resumed += parts == 1 and any(p.grad is not None for p in parameters)
            loss.backward()
        if resumes is None:
            old.push(leaf, take(parameters))
        else:
            new.close_leaf(leaf, NAMES, parameters)
            assert all(p.grad is None for p in parameters)
    return (old if resumes is None else new).total(), resumed


def bits(gradients: list[Tensor | None]) -> list[bytes | None]:
    return [None if each is None else each.numpy().tobytes() for each in gradients]


@pytest.mark.parametrize("node", [Node(0, 1), Node(0, 2), Node(0, 8), Node(4, 7), Node(0, 13)])
def test_autograd_adds_the_same_bits(node: Node) -> None:
    total = 0
    for seed in range(30):
        expected, _ = sum_of_leaves(seed, node, resumes=None)
        found, resumed = sum_of_leaves(seed, node, resumes=True)
        without, never = sum_of_leaves(seed, node, resumes=False)
        assert bits(found) == bits(expected) == bits(without)
        assert not never
        total += resumed
    assert bool(total) == (node.stop - node.start > 1), "no addition was autograd's"


def two_leaves() -> tuple[GradientSum, Tensor]:
    """Return a sum that has its first leaf, and its parameter."""
    weight = torch.ones(3, requires_grad=True)
    found = GradientSum(Node(0, 2), resumes=True)
    (2.0 * weight).sum().backward()
    found.close_leaf(0, ["weight"], [weight])
    return found, weight


def test_a_hook_of_the_user_sees_the_gradients_of_a_leaf_alone() -> None:
    found, weight = two_leaves()

    def scale(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(10.0)

    weight.register_post_accumulate_grad_hook(scale)  # type: ignore[no-untyped-call]
    found.resume(1, [weight])
    assert weight.grad is None
    (3.0 * weight).sum().backward()
    found.close_leaf(1, ["weight"], [weight])
    assert found.total()[0].tolist() == [32.0, 32.0, 32.0]  # type: ignore[union-attr]


def test_a_gradient_that_comes_in_two_parts_is_refused() -> None:
    found, weight = two_leaves()
    found.resume(1, [weight])
    assert weight.grad is not None
    weight.sum().backward()
    weight.sum().backward()
    with pytest.raises(LossError, match="parameter 'weight' got its gradient twice in one backward"):
        found.close_leaf(1, ["weight"], [weight])


def test_a_sparse_gradient_is_refused() -> None:
    weight = torch.ones(4, 2, requires_grad=True)
    found = GradientSum(Node(0, 2), resumes=True)
    torch.nn.functional.embedding(torch.tensor([1]), weight, sparse=True).sum().backward()
    with pytest.raises(LossError, match="got a sparse gradient"):
        found.close_leaf(0, ["weight"], [weight])


def test_clear_forgets_a_leaf_that_was_not_closed() -> None:
    found, weight = two_leaves()
    found.resume(1, [weight])
    found.clear()
    weight.grad = None
    for leaf in (0, 1):
        found.resume(leaf, [weight])
        weight.sum().backward()
        found.close_leaf(leaf, ["weight"], [weight])
    assert found.total()[0].tolist() == [2.0, 2.0, 2.0]  # type: ignore[union-attr]
