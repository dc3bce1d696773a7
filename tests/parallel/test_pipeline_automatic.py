"""The automatic split: places in models of many forms, times of their parts, and what measuring leaves alone."""

from __future__ import annotations

import itertools
import json
import time

import pipeline_models
import pytest
import torch
from torch import nn

from unisono.parallel.pipeline.balance import ModelSegment
from unisono.parallel.pipeline.candidates import find_places
from unisono.parallel.pipeline.measuring import measure_segments
from unisono.parallel.pipeline.stage_division import divide, measure_places


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Uneven(nn.Module):
    """Each layer computes for its own time, forward and backward, so that times are known."""

    def __init__(self, times_s):
        super().__init__()
        self.layers = nn.ModuleList(Busy(each) for each in times_s)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def compute(seconds):
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


class Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        if not isinstance(x, torch._subclasses.FakeTensor):
            compute(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        compute(2 * ctx.seconds)
        return gradient, None


class Busy(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.ones(4))

    def forward(self, x):
        return Compute.apply(x * self.weight, self.seconds)


def mean(model, x):
    return model(x).mean()


def best_by_brute_force(times, stages):
    count = len(times)
    return min(
        max(sum(times[begin:end]) for begin, end in itertools.pairwise((0, *cuts, count)))
        for cuts in itertools.combinations(range(1, count), stages - 1)
    )


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_slowest_stage_is_within_5_percent_of_the_best(stages):
    times_s = [0.004, 0.001, 0.006, 0.002, 0.003, 0.012, 0.001, 0.005]
    model = Uneven(times_s)
    measured = measure_places(model, mean, (torch.randn(2, 4),), stages=stages, loss_of=lambda loss: loss)
    found = divide(measured, stages=stages, schedules=["1f1b"], ranks=stages, micro_batches=8, limit_nbytes=None)
    begins = [0, *(int(name.removeprefix("layers.")) for name in found.starts), len(times_s)]
    slowest = max(sum(times_s[begin:end]) for begin, end in itertools.pairwise(begins))
    assert slowest <= 1.05 * best_by_brute_force(times_s, stages)
    assert 3 * slowest * (8 + stages - 1) * 0.5 < found.step_s < 3 * slowest * (8 + stages - 1) * 1.5
    assert found.split.excess <= 0.01


CASES = {
    "mlp": (pipeline_models.mlp, pipeline_models.square, lambda: torch.randn(8, 16)),
    "residual": (pipeline_models.Residual, pipeline_models.square, lambda: torch.randn(2, 4, 26, 26)),
    "u_net": (pipeline_models.UNet, pipeline_models.square, lambda: torch.randn(2, 2, 20, 20)),
    "language_model": (pipeline_models.LanguageModel, pipeline_models.next_token, lambda: torch.randint(0, 30, (4, 8))),
}


@pytest.mark.parametrize("name", CASES)
def test_measuring_changes_nothing(name):
    make, function, inputs = CASES[name]
    torch.manual_seed(0)
    model, batch = make(), (inputs(),)
    for parameter in itertools.islice(model.parameters(), 2):
        parameter.grad = torch.ones_like(parameter)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    generator = torch.get_rng_state()
    measured = measure_places(model, function, batch, stages=3, loss_of=lambda loss: loss)
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    after = [p.grad for p in model.parameters()]
    assert all(one is other or torch.equal(one, other) for one, other in zip(gradients, after, strict=True))
    segments = [ModelSegment(*each) for each in json.loads(measured)]
    assert len(segments) >= 4
    assert all(each.forward_s > 0 and each.backward_s >= 0 for each in segments)
    assert sum(each.state_nbytes for each in segments) == 16 * sum(p.numel() for p in model.parameters())


def test_parts_of_large_modules_are_places_and_small_modules_are_whole():
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        nn.Linear(4, 4),
    )
    found = find_places(model, pipeline_models.square, (torch.randn(2, 3, 4),), stages=2)
    assert found.names[:2] == ("1.0", "1.2")
    assert found.names[-1] == "3"
    assert list(found.calls) == sorted(found.calls)
    # It has more than a quarter of all parameters.
    assert any(name.startswith("2.") for name in found.names)


class Deciding(nn.Module):
    """Reads numbers between its layers, so only it as a whole can be a block."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        x = self.layers[0](x)
        return self.layers[1](x) if x.sum() > 0 else x


class Sensitive(nn.Module):
    """Needs the whole graph between its layers, so only it as a whole can be a block."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        y = self.layers[0](x)
        (sensitivity,) = torch.autograd.grad(y.square().sum(), y, create_graph=True)
        return self.layers[1](y + sensitivity)


def test_a_module_whose_own_code_cannot_be_cut_is_a_place_as_a_whole():
    model = nn.Sequential(nn.Linear(4, 4), Sensitive(), nn.Linear(4, 4))
    assert find_places(model, pipeline_models.square, (torch.randn(2, 4),), stages=2).names == ("1", "2")


def test_a_model_that_reads_numbers_between_layers_is_refused_with_the_line():
    model = Deciding()
    with pytest.raises(Exception, match=r"reads numbers from a tensor that depends on a block"):
        measure_places(model, pipeline_models.square, (torch.randn(2, 4),), stages=2, loss_of=lambda loss: loss)


def test_too_many_stages_and_too_little_memory_are_refused_with_numbers():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    measured = measure_places(model, pipeline_models.square, (torch.randn(8, 64),), stages=2, loss_of=lambda loss: loss)
    with pytest.raises(ValueError, match=r"5 stages need 5 places at which one may begin, and the model has 4"):
        divide(measured, stages=5, schedules=["1f1b"], ranks=5, micro_batches=8, limit_nbytes=None)
    with pytest.raises(
        ValueError, match=r"no division into 2 stages fits 0.000954 MiB each: the best one needs 0\.\d+ MiB"
    ):
        divide(measured, stages=2, schedules=["1f1b"], ranks=2, micro_batches=8, limit_nbytes=1000)
    tight = divide(measured, stages=2, schedules=["1f1b"], ranks=2, micro_batches=8, limit_nbytes=180_000)
    assert tight.starts == ("2",)


def test_without_gradients_the_backward_pass_is_estimated():
    model = Uneven([0.002, 0.002, 0.008])
    with torch.no_grad():
        measured = measure_places(model, mean, (torch.randn(2, 4),), stages=2, loss_of=None)
    found = divide(measured, stages=2, schedules=["gpipe"], ranks=2, micro_batches=4, limit_nbytes=None)
    assert found.starts == ("layers.2",)


def test_activations_are_neither_parameters_nor_their_views_nor_the_micro_batch():
    width, samples = 48, 4
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2)])
    x = torch.randn(samples, width)
    places = find_places(model, lambda model, x: model(x).sum(), (x,), stages=2)
    segments = measure_segments(model, lambda model, x: model(x).sum(), (x,), places, loss_of=lambda loss: loss)
    # Backward reads transposed weights, which are views, and what Tanh returned, which the next Linear keeps, too.
    assert [segment.activation_nbytes for segment in segments] == [samples * width * 4] * 2
