"""The automatic division of layers over devices: by weights, by measured time, within limits, in the order of calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from unisono.parallel import place

pytestmark = pytest.mark.usefixtures("one_thread")

GIB = 2**30


def where(model: nn.Module) -> list[str]:
    return [str(parameter.device) for name, parameter in model.named_parameters() if name.endswith("weight")]


def test_weights_are_divided_evenly_with_gradients_and_averages():
    model = nn.Sequential(*[nn.Linear(8, size) for size in (8, 8, 32)], nn.Linear(8, 8))
    placed = place(model, ["cpu", "meta"], by="memory")
    assert where(model) == ["cpu", "cpu", "meta", "meta"]
    small, large = 8 * 9, 8 * 33  # weights and biases
    assert placed.shares == pytest.approx((2 * small / (3 * small + 9 * 32), (9 * 32 + small) / (3 * small + 9 * 32)))
    assert large < 9 * 32


def test_limits_of_devices_are_kept():
    layers = [nn.Linear(64, 64) for _ in range(6)]
    one = 4 * sum(parameter.nbytes for parameter in layers[0].parameters())
    model = nn.Sequential(*layers)
    place(model, ["cpu", "meta"], by="memory", memory_gib=[1.1 * one / GIB, 6 * one / GIB])
    assert where(model) == ["cpu"] + ["meta"] * 5
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    with pytest.raises(
        ValueError, match=r"no division into 2 devices fits 0\.133, 0\.14 MiB: the best one needs 0\.19 MiB"
    ):
        place(model, ["cpu", "meta"], by="memory", memory_gib=[2.1 * one / GIB, 2.2 * one / GIB])
    assert where(model) == ["cpu"] * 6


class Slow(nn.Linear):
    """Takes the time of 100 layers."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(100):
            x = torch.tanh(super().forward(x))
        return x


class Backwards(nn.Module):
    """Calls its layers in another order than they are registered in; has weights of its own, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Slow(16, 16), *(nn.Linear(16, 16) for _ in range(5))])
        self.unused = nn.Linear(2, 2)
        self.bias = nn.Parameter(torch.zeros(16))
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.layers[5].weight

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x) * scale + self.bias
        return self.head(x)


@pytest.mark.parametrize("given", [tuple, dict])
def test_measured_parts_follow_the_order_of_calls(given):
    torch.manual_seed(0)
    model, x = Backwards(), torch.randn(8, 16)
    inputs = (x,) if given is tuple else {"x": x, "scale": 2.0}
    before = torch.get_rng_state()
    placed = place(model, ["cpu", "meta"], by="time", inputs=inputs)
    assert torch.equal(torch.get_rng_state(), before)
    # The slow layer, called last, takes the most time by far; the head goes where its weights are.
    layers = {name: str(device) for name, device in placed.layers.items()}
    called = [layers[f"layers.{number}"] for number in (5, 4, 3, 2, 1, 0)]
    assert called == sorted(called)  # contiguous: first "cpu", then "meta"
    assert (called[0], called[-1], layers["unused"], layers["head"]) == ("cpu", "meta", "cpu", "cpu")
    assert model.bias.device.type == "cpu"
    assert sum(placed.shares) == pytest.approx(1.0)
    assert placed.shares[1] > 0.5
    assert all(parameter.grad is None for parameter in model.parameters())


def test_measured_memory_counts_activations():
    # Equal weights, but the first layers keep activations of many rows.
    class Shrinking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                x = torch.relu(layer(x))
                if number == 0:
                    x = x[:10]
            return x

    placed = place(model := Shrinking(), ["cpu", "meta"], by="memory", inputs=(torch.randn(5000, 8),))
    assert where(model) == ["cpu", "meta", "meta", "meta"]
    assert placed.shares[0] > 0.9
    place(model := Shrinking(), ["cpu", "meta"], by="memory")
    assert where(model) == ["cpu", "cpu", "meta", "meta"]


def test_a_placed_model_can_be_divided_anew_and_stays_as_it_was_if_that_fails():
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    x = torch.randn(3, 4)
    first = place(model, {"": "cpu", "1": "cpu"}, split_size=2)
    with pytest.raises(ValueError, match="5 devices need 5 places"):
        place(model, ["cpu"] * 5, by="time", inputs=(x,))
    assert len(model[1]._forward_pre_hooks) == 1
    assert first.split_size == 2
    first.remove()
    assert not model[1]._forward_pre_hooks
    with torch.no_grad():
        place(model, ["cpu", "meta"], by="time", inputs=(x,))
    with pytest.raises(ValueError, match="inputs= are for measuring the model on one device, and it is on 2"):
        place(model, ["cpu", "meta"], by="time", inputs=(x,))


def test_a_model_without_gradients_in_its_outputs_says_so():
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x)).argmax(1)

    with pytest.raises(ValueError, match="returned no tensor that requires a gradient"):
        place(Picks(), ["cpu", "cpu"], by="time", inputs=(torch.ones(2, 4),))
