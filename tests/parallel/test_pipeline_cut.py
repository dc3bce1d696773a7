"""A model cut over stages has the results, gradients, buffers and random numbers of one process, to the bit."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import UserDict

import pytest
import torch
from pipeline_models import (
    LanguageModel,
    Residual,
    TwoOfEach,
    UNet,
    Written,
    checkpointed,
    mlp,
    modified_in_place,
    next_token,
    of_both,
    sometimes_doubled,
    square,
)
from stages_in_process import differences
from torch import Tensor, nn
from torch.nn import functional as F

from unisono.parallel.losses import Sum
from unisono.parallel.pipeline import plan_cache
from unisono.parallel.pipeline.plan_cache import PlanCache
from unisono.parallel.pipeline.recorder import record
from unisono.parallel.pipeline.stage import Gradients, Stage
from unisono.parallel.pipeline.traffic import bytes_across

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("starts", [["4"], ["5", "9"], ["1", "8", "16"]])
def test_batch_norm_and_dropout(starts):
    assert differences(mlp(), square, [(torch.randn(5, 16),) for _ in range(3)], starts) == []


@pytest.mark.parametrize("starts", [["blocks.3"], ["blocks.2", "blocks.4"], ["blocks.1", "blocks.3", "head"]])
def test_skips_over_stages(starts):
    batches = [(torch.randn(3, 4, 6, 6),) for _ in range(2)]
    assert differences(Residual(), square, batches, starts) == []


@pytest.mark.parametrize("starts", [["middle"], ["down.1", "up.1"], ["down.1", "middle", "wider.1"]])
def test_u_net(starts):
    batches = [(torch.randn(2, 2, 10, 10),) for _ in range(2)]
    assert differences(UNet(), square, batches, starts) == []


@pytest.mark.parametrize("starts", [["layers.2"], ["layers.1", "layers.3"], ["layers.1", "layers.2", "norm"]])
def test_parameters_that_stages_share(starts):
    batches = [(torch.randint(0, 30, (4, 8)),) for _ in range(2)]
    assert differences(LanguageModel(), next_token, batches, starts) == []


@pytest.mark.parametrize("starts", [["second"], ["both", "recurrent"], ["second", "both", "recurrent"]])
def test_several_inputs_and_outputs(starts):
    batches = [(torch.randn(3, 4), torch.randn(3, 4)) for _ in range(2)]
    assert differences(TwoOfEach(), of_both, batches, starts, lambda result: result["loss"]) == []


def spread(count: int) -> list[Tensor]:
    """Terms of which no two orders of addition have the same sum, except that the first two commute."""
    return [torch.randn(4096) * 10 ** torch.empty(4096).uniform_(-3, 3) for _ in range(count)]


def folded(terms: list[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)


def test_autograd_adds_gradients_in_the_reverse_order_of_calls():
    terms = spread(4)
    x = torch.randn(4096, requires_grad=True)
    uses = [x * term for term in terms]
    # Graphs of other depths, combined in another order, which a search by breadth or depth would follow.
    (uses[3] + (uses[0] + (uses[2] * 1.0 * 1.0 + uses[1] * 1.0 * 1.0 * 1.0))).sum().backward()
    orders = itertools.permutations(range(4))
    equal = [order for order in orders if torch.equal(folded([terms[place] for place in order]), x.grad)]
    assert equal == [(2, 3, 1, 0), (3, 2, 1, 0)]


@pytest.mark.parametrize("leaf", [True, False])
def test_a_gradient_of_later_stages_is_the_first_term(leaf):
    terms = spread(4)
    x = torch.randn(4096, requires_grad=True)
    shared = x if leaf else x * 1.0
    shared.retain_grad()
    own = (shared * terms[0] + shared * terms[1]).sum()
    later = terms[3] + terms[2]
    torch.autograd.backward([own, shared], [None, later])
    assert torch.equal(shared.grad, folded(terms[::-1]))
    assert not torch.equal(shared.grad, later + (terms[1] + terms[0]))


def test_a_sum_for_each_stage_would_differ(monkeypatch):
    backward = Stage.backward

    def added_afterwards(stage, done, gradients, *, losses=()):
        passed_on = backward(stage, done, Gradients(gradients.values), losses=losses)
        for name, later in gradients.parameters.items():
            if name in passed_on.parameters:
                passed_on.parameters[name] += later
            else:
                stage._model.get_parameter(name).grad += later
        return passed_on

    batches, starts = [(torch.randint(0, 30, (4, 8)),)], ["layers.1", "layers.3"]
    assert differences(LanguageModel(), next_token, batches, starts) == []
    monkeypatch.setattr(Stage, "backward", added_afterwards)
    assert differences(LanguageModel(), next_token, batches, starts) == ["positions"]


def items_assigned(m, x):
    h = m.l[0](x) * 1
    h[:, 0] = m.l[1](h * 1)[:, 1]
    h = m.l[2](h)
    h.clamp_(min=0)
    h.add_(m.l[3](h * 1))
    return h


def noise(m, x):
    h, n = m.l[0](x) + torch.randn_like(x), torch.rand(6)
    h = m.l[2](m.l[1](h) * n) + torch.randn(x.shape)
    return m.l[3](F.dropout(h, 0.2)) * n


def many_operators(m, x):
    h = m.l[0](x)
    for part in h.split(2):
        h = torch.cat([h, m.l[1](part)])
    left, right = h.chunk(2, -1)
    product = torch.einsum("bi,bj->ij", left, right)
    values, indices = h.masked_fill(h.isnan(), 0).topk(2, 0)
    return m.l[3](m.l[2](h))[indices[0]] * values.mean() + product.norm()


def no_gradient(m, x):
    h = m.l[0](x)
    with torch.no_grad():
        k = m.l[1](h)
    return m.l[3](m.l[2](h) + k) + h.detach()


def buffer_of_inputs(m, x):
    m.mean.mul_(0.9).add_(x.mean(0))
    return m.l[3](m.l[2](m.l[1](m.l[0](x)))) + m.mean


def gradient_hook(m, x):
    h = m.l[0](x)
    h.register_hook(lambda gradient: gradient * 2)
    return m.l[3](m.l[2](h)) + m.l[1](x) + h


def hook_removed(m, x):
    h = m.l[0](x)
    h.register_hook(lambda gradient: gradient * 2).remove()
    return m.l[3](m.l[2](h)) + h


def around_again(m, x):
    for _ in range(3):
        for layer in m.l:
            x = layer(x).tanh()
    return x


def expanded(m, x):
    h = m.l[0](x).mean(0, keepdim=True).expand(5, 6)
    k = h.t()
    return m.l[3]((m.l[2](h) + k.t())[:, ::2].repeat(1, 2))


def mapped_over_inputs(m, x):
    k = torch.vmap(lambda t: t * t.sum())(x)
    return m.l[3](m.l[2](m.l[0](x)) * k)


@pytest.mark.parametrize(
    "code",
    [
        modified_in_place, items_assigned, noise, many_operators, no_gradient, buffer_of_inputs, gradient_hook,
        around_again, expanded, mapped_over_inputs, hook_removed,
    ],
)  # fmt: skip
@pytest.mark.parametrize("starts", [["l.2"], ["l.2", "l.3"]])
def test_code_between_blocks(code, starts):
    rows = 5 if code is expanded else 6
    assert differences(Written(code), square, [(torch.randn(rows, 6),) for _ in range(2)], starts) == []


def test_checkpoints_between_cuts():
    batches = [(torch.randn(6, 6),) for _ in range(2)]
    assert differences(Written(checkpointed), square, batches, ["l.3"]) == []
    assert differences(Written(checkpointed), square, batches, ["l.1", "l.2"]) == []


def test_checkpoints_that_make_a_tensor_after_they_have_noted_the_generator(monkeypatch):
    """As those of torch 2.11 and 2.12 do, by which a stage would have taken over the generator too late."""
    frame = torch.utils.checkpoint._CheckpointFrame
    make = frame.__init__
    monkeypatch.setattr(frame, "__init__", lambda *args: (torch.empty(0), make(*args))[1])
    batches = [(torch.randn(6, 6),) for _ in range(2)]
    assert differences(Written(checkpointed), square, batches, ["l.1", "l.2"]) == []


class Keep(torch.autograd.Function):
    """Keeps a tensor with the graph, as checkpoints of older versions of torch keep their inputs."""

    @staticmethod
    def forward(ctx, leaf, tensor):
        ctx.save_for_backward(tensor)
        return torch.empty(0)


def scaled_by_kept(m, x):
    h = m.l[0](x)
    kept = Keep.apply(torch.empty(0, requires_grad=True), h)
    h = m.l[1](h)
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient * kept.grad_fn.saved_tensors[0].detach())
    return m.l[3](m.l[2](h))


@pytest.mark.parametrize("in_flight", [1, 2])
def test_what_a_function_keeps_is_that_of_its_pass(in_flight):
    batches = [(torch.randn(6, 6),) for _ in range(3)]
    assert differences(Written(scaled_by_kept), square, batches, ["l.2"], in_flight=in_flight) == []


def test_numbers_of_inputs_may_decide():
    batches = [(torch.ones(6, 6),), (-torch.ones(6, 6),), (torch.ones(6, 6),)]
    assert differences(Written(sometimes_doubled), square, batches, ["l.2"]) == []


def test_a_path_is_recorded_once(monkeypatch):
    recorded = []
    monkeypatch.setattr(plan_cache, "record", lambda *args, **kwargs: recorded.append(1) or record(*args, **kwargs))
    plans = PlanCache(Written(sometimes_doubled), starts=["l.2"])
    x = torch.ones(6, 6)
    lengths = [len(plans.plan_for(square, (sign * x,)).program.calls) for sign in (1, -1, 1, 2, -2)]
    assert (len(recorded), lengths[0] - lengths[1], lengths[2:]) == (2, 1, [lengths[0], lengths[0], lengths[1]])


def test_ragged_batches():
    batches = [(torch.randn(5, 16),), (torch.randn(2, 16),), (torch.randn(5, 16),)]
    assert differences(mlp(), square, batches, ["4", "12"]) == []


def test_evaluation_sends_no_graph():
    model = mlp().eval()
    inputs = (torch.randn(5, 16),)
    with torch.no_grad():
        plan = PlanCache(model, starts=["8"]).plan_for(square, inputs)
        first, second = (Stage(plan, number, model, starts=["8"]) for number in range(2))
        result = second.forward(square, inputs, first.forward(square, inputs, {}).sent).result
        assert torch.equal(result, square(model, *inputs))
    assert not any(transfer.requires_grad for transfer in plan.transfers)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo reads it
@pytest.mark.parametrize("wrapped", [True, False])
def test_compiled_blocks(wrapped):
    layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2)) for _ in range(4)]
    if wrapped:
        model = nn.Sequential(*[torch.compile(layer, backend="eager") for layer in layers])
    else:
        model = nn.Sequential(*layers)
        for layer in layers:
            layer.compile(backend="eager")
    assert differences(model, square, [(torch.randn(4, 8),) for _ in range(2)], ["2"]) == []


def test_bytes_across_cuts():
    program = record(Residual(), square, (torch.randn(3, 4, 6, 6),), starts=["blocks.0"])
    across = dict(zip([call.block for call in program.calls], bytes_across(program), strict=True))
    # Before block n: the sum so far, and the results of all blocks before, which are used at the end.
    assert [across[f"blocks.{number}"] for number in range(6)] == [1728 * (1 + number) for number in range(6)]
    assert across["head"] == 3 * 4 * 4


def test_several_batches_at_once():
    batches = [(torch.randn(3, 4, 6, 6),) for _ in range(4)]
    assert differences(Residual(), square, batches, ["blocks.2", "blocks.4"], in_flight=3) == []


def test_dataclasses_and_mappings():
    @dataclasses.dataclass(frozen=True)
    class Pair:
        left: Tensor
        right: list[Tensor]

    class Splitting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, pair: Pair) -> Pair:
            return Pair(self.layer(pair.left), [pair.right[0].relu()])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Splitting() for _ in range(3))

        def forward(self, given: UserDict) -> Pair:
            pair = Pair(given["x"], [given["x"] * 2])
            for layer in self.layers:
                pair = layer(pair)
                pair = dataclasses.replace(pair, right=[pair.right[0] + pair.left])
            return pair

    def loss(model: nn.Module, given: UserDict) -> Sum:
        pair = model(given)
        return Sum((pair.left * pair.right[0]).sum(), given["weights"].sum())

    batches = [(UserDict(x=torch.randn(3, 4), weights=torch.rand(3)),) for _ in range(2)]
    assert differences(Model(), loss, batches, ["layers.1", "layers.2"], lambda result: result.total) == []


def test_memory_of_other_stages_parameters_is_not_read():
    model, starts = Residual(), ["blocks.2", "blocks.4"]
    inputs = (torch.randn(3, 4, 6, 6),)
    plans = PlanCache(model, starts=starts)
    plan = plans.plan_for(square, inputs)
    for name, parameter in model.named_parameters():
        if 0 not in plan.parameter_stages[name]:
            parameter.untyped_storage().resize_(0)
    Stage(plan, 0, model, starts=starts).forward(square, inputs, {})
    plans.plan_for(square, (torch.randn(2, 4, 6, 6),))  # recorded anew
