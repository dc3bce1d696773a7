"""Backward passes in two parts: the bits of whole passes, nothing computed twice, and whole where need be."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
import torch
from pipeline_models import (
    LanguageModel,
    Residual,
    UNet,
    Written,
    checkpointed,
    mlp,
    modified_in_place,
    next_token,
    square,
)
from stages_in_process import differences
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from unisono.parallel.pipeline.plan_cache import PlanCache
from unisono.parallel.pipeline.stage import Gradients, Stage

pytestmark = pytest.mark.usefixtures("one_thread")


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]


class Block(nn.Module):
    """A layer with a function of its own beside it."""

    def __init__(self, beside) -> None:
        super().__init__()
        self.linear, self.beside = nn.Linear(6, 6), beside

    def forward(self, x: Tensor) -> Tensor:
        return self.beside(self.linear, x)


def stack(beside) -> nn.Module:
    return nn.Sequential(*(Block(beside) for _ in range(3)))


def twice(linear, x):
    return linear(linear(x).tanh())


def scaled_weight(linear, x):
    return F.linear(x, linear.weight * 2, linear.bias)


def in_low_precision(linear, x):
    with torch.autocast("cpu", torch.bfloat16):
        return linear(x.relu()).float()


def of_a_shared_view(linear, x):
    turned = linear.weight.t()
    return x @ turned + x.tanh() @ turned


def with_own_function(linear, x):
    return Squared.apply(linear(x))


def kept_through_hooks(linear, x):
    return checkpoint(lambda t: linear(t).tanh(), x, use_reentrant=False)


def with_penalty(model, x):
    return square(model, x) + sum(parameter.square().sum() for parameter in model.parameters())


def frozen_embedding():
    model = LanguageModel()
    model.embedding.requires_grad_(False)
    return model


CASES = {
    "a frozen parameter that is shared": (frozen_embedding, next_token, ["layers.1", "layers.3"], {1, 2}),
    "batch norm": (mlp, square, ["1", "8"], {1, 2}),
    "convolutions": (Residual, square, ["blocks.2", "blocks.4"], {1, 2}),
    "skips": (UNet, square, ["middle", "wider.1"], {1, 2}),
    "shared parameters": (LanguageModel, next_token, ["layers.1", "norm"], {1}),  # the head belongs to the embedding
    "in place": (lambda: Written(modified_in_place), square, ["l.2", "l.3"], {1, 2}),
    "low precision": (lambda: stack(in_low_precision), square, ["1", "2"], {1, 2}),
    "a penalty": (mlp, with_penalty, ["8"], set()),
    "used twice": (lambda: stack(twice), square, ["1", "2"], set()),
    "a changed weight": (lambda: stack(scaled_weight), square, ["1"], {1}),
    "a shared view": (lambda: stack(of_a_shared_view), square, ["1"], set()),
    "an own function": (lambda: stack(with_own_function), square, ["1", "2"], set()),
    "checkpoints between blocks": (lambda: Written(checkpointed), square, ["l.1", "l.3"], {2}),
    "checkpoints in blocks": (lambda: stack(kept_through_hooks), square, ["1", "2"], set()),
}


def inputs_of(name):
    if "shared" in name and "view" not in name:
        return torch.randint(0, 30, (4, 8))
    shapes = {"convolutions": (3, 4, 6, 6), "skips": (2, 2, 10, 10), "batch norm": (5, 16), "a penalty": (5, 16)}
    return torch.randn(*shapes.get(name, (6, 6)))


@pytest.mark.parametrize("name", CASES)
def test_two_parts_have_the_bits_of_a_whole_pass(name):
    make, function, starts, divided = CASES[name]
    torch.manual_seed(0)
    batches = [(inputs_of(name),) for _ in range(4)]
    assert differences(make(), function, batches, starts, in_flight=3, divided=divided) == []


@pytest.mark.parametrize("post", [False, True])
def test_hooks_of_parameters_see_each_gradient_once(post):
    model, calls = stack(lambda linear, x: linear(x).tanh()), Counter()
    weight = model[2].linear.weight
    if post:
        weight.register_post_accumulate_grad_hook(lambda parameter: calls.update(["hook"]))
    else:
        weight.register_hook(lambda gradient: calls.update(["hook"]) or gradient * 3)
    stage, done, loss = last_stage(model, ["2"])
    parts = stage.backward_in_parts(done, Gradients(), losses=[(loss, None)])
    if post:
        assert parts is None
        return
    parts[1]()
    assert calls["hook"] == 1
    expected, *_ = torch.autograd.grad(last_stage(model, ["2"])[2], [weight])
    assert torch.equal(weight.grad, expected)


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def last_stage(model, starts):
    x = torch.linspace(-1, 1, 36).reshape(6, 6)
    plan = PlanCache(model, starts=starts).plan_for(square, (x,))
    first, last = (Stage(plan, number, model, starts=starts) for number in range(2))
    sent = {number: value.detach() for number, value in first.forward(square, (x,), {}).sent.items()}
    done = last.forward(square, (x,), sent)
    loss, done.result = done.result, None
    return last, done, loss


def test_nothing_is_computed_twice_and_weights_come_last():
    model = stack(lambda linear, x: linear(x).tanh())
    stage, done, loss = last_stage(model, ["1"])
    with Operators() as whole:
        stage.backward(done, Gradients(), losses=[(loss, None)])
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    stage, done, loss = last_stage(model, ["1"])
    with Operators() as first:
        given, add = stage.backward_in_parts(done, Gradients(), losses=[(loss, None)])
    assert len(given.values) == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    with Operators() as second:
        add()
    assert {name: p.grad is None or torch.equal(p.grad, expected[name]) for name, p in model.named_parameters()} == (
        dict.fromkeys(expected, True)
    )
    assert whole.calls["mm"] == 4
    assert (first.calls["mm"], second.calls["mm"]) == (2, 2)
    assert first.calls["tanh_backward"] == 2
    assert second.calls["tanh_backward"] == 0


@pytest.mark.parametrize("runs_second_part", [True, False])
def test_nothing_is_left_behind(runs_second_part):
    model = stack(lambda linear, x: linear(x).tanh())
    gc.collect()
    gc.disable()
    try:
        stage, done, loss = last_stage(model, ["1"])
        leaf = weakref.ref(done.entries[0])  # the graph below received values ends there
        given, add = stage.backward_in_parts(done, Gradients(), losses=[(loss, None)])
        if runs_second_part:
            add()
        del done, loss, given, add
        assert leaf() is None
    finally:
        gc.enable()
