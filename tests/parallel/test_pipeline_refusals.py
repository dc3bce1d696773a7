"""Models that cannot be cut over stages are refused with the line of their code, before anything is sent."""

from __future__ import annotations

import random

import pytest
import torch
from pipeline_models import Residual, Written, checkpointed_together, mlp, modified_in_place, sometimes_doubled, square
from stages_in_process import in_stages
from torch import Tensor, nn

from unisono.errors import CutError
from unisono.parallel.pipeline.plan_cache import PlanCache
from unisono.parallel.pipeline.recorder import record
from unisono.parallel.pipeline.stage import Stage

pytestmark = pytest.mark.usefixtures("one_thread")


def inner_gradient(m, x):
    h = m.l[0](x)
    (gradient,) = torch.autograd.grad(h.sum(), h)
    return m.l[2](h) + gradient


def mask_with_view(m, x):
    out = torch.zeros(6, 6)
    view = out.view(-1)
    out[0] = m.l[0](x)[0]
    return m.l[2](out) + view.view(6, 6)


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * random.random()


def decides_by_value(m, x):
    h = m.l[1](m.l[0](x))
    if h.sum() > 0:
        h = h * 2
    return m.l[2](h)


def shared_memory(m, x):
    h = m.l[0](x) * 1
    v = h.view(-1, 3)
    h += m.l[1](h * 1)
    return m.l[2](h) + v.reshape(h.shape)


def norm_twice(m, x):
    return m.norm(m.l[2](m.norm(m.l[0](x))))


def numbers_read(m, x):
    h = m.l[2](m.l[0](x))
    return m.l[3](torch.from_numpy(h.detach().numpy()) + h)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]


def own_function(m, x):
    return m.l[2](Square.apply(m.l[1](x)) + 1)


def mapped(m, x):
    return m.l[2](torch.vmap(torch.sin)(m.l[0](x)))


def buffer_of_blocks(m, x):
    h = m.l[0](x)
    m.mean.mul_(0.9).add_(h.detach().mean(0))
    return m.l[2](h) + m.mean


def buffer_of_another_stage(m, x):
    return m.l[2](m.norm(m.l[0](x))) + m.norm.running_mean


REFUSED = [
    (
        buffer_of_another_stage,
        ["l.2"],
        r"buffer norm.running_mean is read on stage 1 \(at .* in buffer_of_another_stage\)",
    ),
    (mask_with_view, ["l.2"], r"in mask_with_view modifies in place .* which every stage made"),
    (inner_gradient, ["l.2"], r"in inner_gradient calls grad between blocks"),
    (decides_by_value, ["l.2"], r"test_pipeline_refusals.py:\d+ in decides_by_value reads numbers .*__bool__"),
    (numbers_read, ["l.3"], r"in numbers_read reads numbers .*numpy"),
    (shared_memory, ["l.1"], r"in shared_memory modifies in place \(with __iadd__|add_"),
    (norm_twice, ["l.2"], r"buffer norm\.\w+ is modified on stages 0 and 1"),
    (own_function, ["l.2"], r"torch.autograd.Function \(SquareBackward\) is applied outside of all blocks"),
    (mapped, ["l.2"], r"in mapped transforms a tensor"),
    (checkpointed_together, ["l.1"], r"'l.1' is called within activation checkpointing"),
    (buffer_of_blocks, ["l.2"], r"in buffer_of_blocks modifies in place a tensor that every stage has"),
    (modified_in_place, ["l.3", "l.1"], r"'l.1' is called before 'l.3'"),
    (norm_twice, ["l.3"], r"'l.3', which the forward pass never calls"),
]


@pytest.mark.parametrize(("code", "starts", "message"), REFUSED)
def test_refused_with_the_line(code, starts, message):
    with pytest.raises(CutError, match=message):
        in_stages(Written(code), square, [(torch.randn(6, 6),)], starts, lambda result: result)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (["blocks.7"], r"'blocks.7', which is not a submodule of the model; did you mean 'blocks"),
        (["blocks", "blocks.1"], r"with 'blocks' and with 'blocks.1' inside it"),
        (["head", "head"], r"2 stages are to begin with 'head'"),
    ],
)
def test_wrong_names(starts, message):
    with pytest.raises(ValueError, match=message):
        record(Residual(), square, (torch.randn(3, 4, 6, 6),), starts=starts)


def test_recording_touches_nothing():
    model = mlp()
    model.counted = 0
    model.register_forward_pre_hook(lambda module, inputs: setattr(module, "counted", module.counted + 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs, generator = (torch.randn(5, 16),), torch.get_rng_state()
    record(model, square, inputs, starts=["8"])
    assert model.counted == 0
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert type(model[0]) is nn.Linear


def test_a_block_that_draws_python_numbers_is_refused():
    model = nn.Sequential(Random(), Random(), Random())
    state = random.getstate()
    with pytest.raises(CutError, match=r"block '0' draws from Python's or NumPy's random numbers"):
        in_stages(model, square, [(torch.randn(6, 6),)], ["1"], lambda result: result)
    assert random.getstate() == state


def test_the_model_must_be_the_one_that_is_given():
    model = Residual()
    with pytest.raises(CutError, match=r"is neither a parameter of the model that the function was called with"):
        record(model, lambda _, x: square(model, x), (torch.randn(3, 4, 6, 6),), starts=["blocks.2"])


def test_another_way_than_recorded_is_an_error():
    model, inputs = Written(sometimes_doubled), (torch.ones(6, 6),)
    plan = PlanCache(model, starts=["l.2"]).plan_for(square, inputs)
    stage = Stage(plan, 0, model, starts=["l.2"])
    with pytest.raises(CutError, match=r"in sometimes_doubled read other numbers than were recorded \(__bool__\)"):
        stage.forward(square, (-inputs[0],), {})


def test_other_calls_than_recorded_are_an_error():
    model, inputs = Written(lambda m, x: m.l[2](m.l[0](x) * 2)), (torch.ones(6, 6),)
    plan = PlanCache(model, starts=["l.2"]).plan_for(square, inputs)
    model.code = lambda m, x: m.l[2](m.l[0](x))
    with pytest.raises(CutError, match=r"call 1 of the forward pass is l.2 at .* where mul at .* was recorded"):
        Stage(plan, 0, model, starts=["l.2"]).forward(square, inputs, {})
