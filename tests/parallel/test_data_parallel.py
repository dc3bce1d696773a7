"""DataParallel equals the model on one device: outputs, losses, gradients, buffers; and says what went wrong where."""

from __future__ import annotations

import copy
import functools
import threading
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unisono
from unisono.errors import LossError
from unisono.parallel import DataParallel, Whole, convert_sync_batchnorm

CPUS = [["cpu"], ["cpu"] * 2, ["cpu"] * 3, ["cpu"] * 5]


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)


def data(samples: int = 7) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, 4, dtype=torch.float64), torch.randint(0, 3, (samples,))


def close(a: Tensor, b: Tensor) -> None:
    exact = {"rtol": 1e-12, "atol": 1e-12} if a.dtype == torch.float64 else {}
    torch.testing.assert_close(a, b, **exact)


def same_gradients(ours: nn.Module, plain: nn.Module) -> None:
    expected = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        assert (parameter.grad is None) == (expected[name].grad is None), name
        if parameter.grad is not None:
            grad, other = parameter.grad, expected[name].grad
            assert grad.is_sparse == other.is_sparse
            close(grad.to_dense(), other.to_dense())


LOSSES = {
    "per sample": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
    "mean": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    "sum": lambda model, batch: unisono.Sum(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])),
    "tensors": lambda model, batch: unisono.Sum(
        F.cross_entropy(model(batch[0]), batch[1], reduction="sum"),
        torch.ones_like(batch[1]).sum(),
    ),
}


@pytest.mark.parametrize("devices", CPUS, ids=len)
@pytest.mark.parametrize("form", LOSSES)
def test_loss_and_gradients_are_those_of_one_device(devices, form):
    plain, ours = network(), network()
    parallel = DataParallel(ours, devices)
    for samples in (7, 1, 4):  # unequal parts, fewer samples than devices
        expected = F.cross_entropy(plain(data(samples)[0]), data(samples)[1])
        loss = parallel(LOSSES[form], data(samples))
        close(loss, expected)
        loss.backward()
        expected.backward()
    same_gradients(ours, plain)


def test_the_loss_of_a_weighted_part_counts_by_its_weight():
    x, y = data(5)
    weights = torch.tensor([0.0, 1, 2, 0, 5], dtype=torch.float64)

    def loss(model, batch):
        losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return {"loss": unisono.Sum((losses * batch["w"]).sum(), batch["w"].sum()), "scores": None}

    found = DataParallel(network(), ["cpu"] * 3).loss(loss, {"x": x, "y": y, "w": weights})
    close(found, (F.cross_entropy(network()(x), y, reduction="none") * weights).sum() / 8)


@pytest.mark.parametrize("devices", CPUS, ids=len)
def test_gathered_outputs_are_those_of_one_device(devices):
    plain, ours = network(), network()
    x, y = data()
    out = DataParallel(ours, devices)(x)
    close(out, plain(x))
    F.cross_entropy(out, y).backward()
    F.cross_entropy(plain(x), y).backward()
    same_gradients(ours, plain)
    with torch.no_grad():
        assert not DataParallel(ours, devices)(x).requires_grad


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class Output:
    logits: Tensor
    parts: list[Tensor]
    name: str


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3).double()

    def forward(self, pair: Pair, *, scale: float, mask: Tensor, extra: dict[str, list[Tensor]]) -> Output:
        assert mask.shape == (4,)
        logits = self.linear(pair.left * mask) * scale + extra["a"][0][:, None] + extra["temperature"]
        return Output(logits, [pair.right, logits.mean()], "nested")


def test_nested_inputs_and_outputs():
    torch.manual_seed(2)
    module = Nested()
    left, right = torch.randn(5, 4).double(), torch.randn(5, 2)
    extra = {"a": [torch.randn(5).double()], "temperature": torch.tensor(2.0)}
    mask = torch.rand(4).double()
    out = DataParallel(module, ["cpu"] * 2)(Pair(left, right), scale=0.5, mask=Whole(mask), extra=extra)
    expected = module(Pair(left, right), scale=0.5, mask=mask, extra=extra)
    assert isinstance(out, Output) and out.name == "nested"
    close(out.logits, expected.logits)
    assert torch.equal(out.parts[0], right)
    close(out.parts[1], torch.stack([expected.logits[:3].mean(), expected.logits[3:].mean()]))


def test_a_whole_result_is_that_of_the_first_device():
    out = call_with(lambda x: {"y": x * 2, "first": Whole([int(x[0]), x[:1]])}, torch.arange(4.0))
    assert torch.equal(out["y"], torch.arange(4.0) * 2)
    assert out["first"][0] == 0 and torch.equal(out["first"][1], torch.zeros(1))


def test_samples_along_another_dimension():
    module = nn.LSTM(4, 3, num_layers=2).double()
    x = torch.randn(6, 5, 4).double()
    out, (hidden, _) = DataParallel(module, ["cpu"] * 3, dim=1)(x)
    expected, (other, _) = module(x)
    close(out, expected)
    close(hidden, other)
    out.sum().backward()
    ours = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    expected.sum().backward()
    for grad, parameter in zip(ours, module.parameters(), strict=True):
        close(grad, parameter.grad)


class Odd(nn.Module):
    """Much of what breaks when a module is copied."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4, sparse=True)
        self.first = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.unused = nn.Linear(4, 4)
        self.short = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.listed = [self.first, self.tied]
        self.chosen = self.first.forward
        self.double()
        self.short.data = self.short.data.bfloat16()
        nn.utils.parametrizations.weight_norm(self.frozen)

    def forward(self, index: Tensor) -> Tensor:
        self.steps += 1
        x = self.embedding(index)
        for layer in self.listed:
            x = layer(x).tanh()
        x = self.frozen(self.chosen(x)) * self.scale * self.short
        # Models ask their own parameters for type and device, and penalise them.
        return x.to(list(self.parameters())[1].dtype) + self.first.weight.square().sum()


@pytest.mark.parametrize("copies", [2, 4])
def test_shared_unused_frozen_and_sparse_parameters_and_attributes(copies):
    torch.manual_seed(3)
    plain = Odd()
    ours = copy.deepcopy(plain)
    ours.chosen, ours.listed = ours.first.forward, [ours.first, ours.tied]
    index = torch.arange(9) % 4
    loss = DataParallel(ours, ["cpu"] * copies).loss(lambda model, batch: model(batch).square().mean(1), index)
    expected = plain(index).square().mean()
    close(loss, expected)
    loss.backward()
    expected.backward()
    assert ours.unused.weight.grad is None and ours.embedding.weight.grad.is_sparse
    same_gradients(ours, plain)
    assert ours.steps == 1  # the first device's


def test_buffers_of_the_first_device_are_kept():
    torch.manual_seed(4)
    plain = nn.BatchNorm1d(4)
    ours = copy.deepcopy(plain)
    x = torch.randn(6, 4)
    out = DataParallel(ours, ["cpu"] * 2)(x)
    first = plain(x[:3])
    assert torch.equal(out[:3], first)
    assert torch.equal(ours.running_var, plain.running_var) and ours.num_batches_tracked == 1
    ours.eval()
    close(DataParallel(ours, ["cpu"] * 2)(x), plain.eval()(x))


def test_second_derivatives_and_accumulation():
    plain, ours = network(), network()
    x, _ = data()
    parallel = DataParallel(ours, ["cpu"] * 3)
    for call in (parallel, plain):
        for _ in range(2):
            own = x.clone().requires_grad_()
            (first,) = torch.autograd.grad(call(own).tanh().sum(), own, create_graph=True)
            first.square().sum().backward()
    same_gradients(ours, plain)


def test_more_than_one_bucket(monkeypatch):
    monkeypatch.setattr("unisono.parallel.device_copies.BUCKET_BYTES", 100)
    plain, ours = network(), network()
    x, y = data()
    DataParallel(ours, ["cpu"] * 4)(LOSSES["mean"], (x, y)).backward()
    F.cross_entropy(plain(x), y).backward()
    same_gradients(ours, plain)


def test_an_optimizer_trains_the_model_that_was_given():
    plain, ours = network(), network()
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (plain, ours)]
    parallel = DataParallel(ours, ["cpu"] * 2)
    for _ in range(3):
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            (parallel.loss if model is ours else lambda f, batch: f(plain, batch))(LOSSES["mean"], data()).backward()
            optimizer.step()
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-7, atol=1e-9)


def test_replicas_work_at_the_same_time_and_as_the_caller_would():
    together = threading.Barrier(3, timeout=60)
    seen = {}

    class Meeting(nn.Module):
        def forward(self, x):
            together.wait()
            seen[threading.current_thread().name] = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            return x @ x.T, torch.is_autocast_enabled("cpu")

    parallel = DataParallel(Meeting(), ["cpu"] * 3)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        out, autocast = parallel(torch.ones(6, 2))
    assert autocast and out.dtype == torch.bfloat16
    assert list(seen.values()) == [(False, False)] * 3
    with torch.inference_mode():
        parallel(torch.ones(6, 2))
    assert list(seen.values()) == [(False, True)] * 3
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()


def test_what_a_replica_raises_keeps_its_class_and_says_which_one():
    class Picky(nn.Module):
        def forward(self, x):
            return {"0": 1.0, "1": 2.0}[str(int(x.max()))] * x

    parallel = DataParallel(Picky(), ["cpu"] * 3)
    with pytest.raises(KeyError) as caught:
        parallel(torch.tensor([0, 1, 2]))
    assert "in replica 2, on cpu" in _said(caught.value)
    with pytest.raises(KeyError) as caught:
        parallel(torch.tensor([7, 1, 8]))
    assert "in replica 0, on cpu" in _said(caught.value)


def _said(error: BaseException) -> str:
    """What an exception says, with its notes; before Python 3.11 there are none."""
    return "\n".join([*map(str, error.args), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            (torch.ones(4, 2), {"y": torch.ones(3)}),
            r"input\[0\]\[0\] has 4 samples \(dimension 0\) and input\[0\]\[1\]\['y'\] has 3.*Whole",
        ),
        ((torch.ones(4, 2), torch.ones(0)), r"has 4 samples .* has 0"),
    ],
)
def test_inputs_that_cannot_be_divided(batch, message):
    with pytest.raises(ValueError, match=message):
        DataParallel(nn.Identity(), ["cpu"] * 2)(*batch)


def test_inputs_without_the_dimension():
    with pytest.raises(ValueError, match=r"shape \[4\] has no dimension 1 to divide along"):
        DataParallel(nn.Identity(), ["cpu"] * 2, dim=1)(torch.ones(4))


def call_with(function, *inputs):
    class Calls(nn.Module):
        def forward(self, *inputs):
            return function(*inputs)

    return DataParallel(Calls(), ["cpu"] * 2)(*inputs)


def test_inputs_without_tensors_are_for_one_device():
    assert call_with(lambda a, b: (a, b), "a", 3) == ("a", 3)
    assert call_with(lambda: 5) == 5


def test_outputs_that_cannot_be_joined():
    x = torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"output\['n'\] differs between devices: 2 on replica 0, 1 on replica 1"):
        call_with(lambda x: {"n": len(x)}, x)
    with pytest.raises(ValueError, match=r"output cannot be concatenated along dimension 0: .*\[2, 2\].*\[2, 1\]"):
        call_with(lambda x: x.T, x)
    with pytest.raises(ValueError, match="output has another structure on some devices"):
        call_with(lambda x: {str(len(x)): x}, x)


def test_losses_that_cannot_be_read():
    parallel = DataParallel(network(), ["cpu"] * 2)
    x, _ = data()
    with pytest.raises(
        LossError, match=r"shape \[4, 3\] for a micro-batch of 4 samples; expected one loss per sample, shape \[4\]"
    ):
        parallel(lambda model, batch: model(batch), x)
    with pytest.raises(LossError, match=r"returned 3\.0"):
        parallel(lambda model, batch: 3.0, x)
    with pytest.raises(LossError, match="weights of the batch add up to 0"):
        parallel(lambda model, batch: unisono.Sum(model(batch).sum(), 0), x)
    with pytest.raises(LossError, match="returned a tuple of 2 values"):
        parallel(lambda model, batch: (model(batch).sum(), 4), x)


def test_models_that_cannot_be_copied():
    with pytest.raises(ValueError, match="'1' is a SyncBatchNorm, which joins ranks"):
        DataParallel(convert_sync_batchnorm(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(2))), ["cpu"] * 2)
    with pytest.raises(ValueError, match="the model is compiled"):
        DataParallel(torch.compile(nn.Linear(2, 2), backend="eager"), ["cpu"] * 2)
    with pytest.raises(ValueError, match="'weight' has no size yet"):
        DataParallel(nn.LazyLinear(2), ["cpu"] * 2)(torch.ones(2, 2))
    with pytest.raises(ValueError, match="'weight' lies on meta and the first device is cpu"):
        DataParallel(nn.Linear(2, 2, device="meta"), ["cpu"] * 2)(torch.ones(2, 2))


def test_devices_that_are_not_there():
    with pytest.raises(TypeError, match="module is an int"):
        DataParallel(3, ["cpu"])
    with pytest.raises(TypeError, match="device_ids='cpu' must be a list"):
        DataParallel(nn.Linear(2, 2), "cpu")
    with pytest.raises(ValueError, match="device_ids is empty"):
        DataParallel(nn.Linear(2, 2), [])
    with pytest.raises(ValueError, match=r"cuda:97 is not there: this process has [0-9]+ devices of type cuda"):
        DataParallel(nn.Linear(2, 2), [97, 98])
    with pytest.raises(ValueError, match="dim=-1 must count from the front"):
        DataParallel(nn.Linear(2, 2), ["cpu"], dim=-1)


def test_it_is_no_module_and_says_so():
    model = network()
    parallel = DataParallel(model, ["cpu"] * 2)
    assert parallel.module is model and "Sequential" in repr(parallel)
    with pytest.raises(AttributeError, match=r"no attribute 'state_dict': .* use model.state_dict"):
        parallel.state_dict()
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        parallel.nothing  # noqa: B018


def test_functions_of_all_kinds_are_losses():
    parallel = DataParallel(network(), ["cpu"] * 2)
    expected = parallel(LOSSES["mean"], data())
    assert torch.equal(parallel(functools.partial(lambda k, m, b: LOSSES["mean"](m, b), 1), data()), expected)
