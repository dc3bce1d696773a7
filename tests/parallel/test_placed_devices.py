"""Placed models on several devices: simulated, with values; fake GPUs, without; and real ones where there are two."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from placed_models import Skips
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from unisono.parallel import place

ON_DEVICE = Path(__file__).parents[1] / "simulated_device.py"
PROGRAM = Path(__file__).parent / "programs" / "placed_devices.py"


def test_layers_on_two_devices_give_what_the_whole_model_gives(fork_python, simulated_device):
    lines = fork_python(ON_DEVICE, simulated_device, PROGRAM)
    devices, outputs, moved, removed, checkpointed, trainer, replicate, absent, divided = lines
    assert devices == ("devices {'embed': 'sim:0', 'inner.a': 'sim:0', 'inner.b': 'cpu', 'head': 'sim:0'} sim:0")
    # The code after the last layer runs where that is, and the one before stays.
    assert outputs == "outputs {'logits': 'sim:0', 'tied': 'sim:0'} sim:0"
    assert moved == "moved {'cpu'} [device(type='sim', index=0), device(type='cpu')]"
    assert "Expected all tensors to be on the same device" in removed
    assert checkpointed == "checkpointed sim:0"
    assert "'model' has been placed on cpu, sim:0, and a Trainer keeps each model on one device" in trainer
    assert "model has been placed on cpu, sim:0, and replicate() sums the gradients of one device" in replicate
    assert absent == "sim:2 is not there: this process has 2 devices of type sim"
    assert divided == "divided ['sim:0', 'sim:0', 'sim:0', 'cpu', 'cpu', 'cpu'] (0.5, 0.5)"


class OnDevice(nn.Module):
    """A linear layer made on a device, which fake GPUs need."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 8, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = OnDevice("cuda:0"), OnDevice("cuda:1")
        self.bias = nn.Parameter(torch.empty(8, device="cuda:0"))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        early = self.a(x)
        late = self.b(early) + self.bias
        early += late  # in place: stays where it is
        return early, torch.cat([early, late], -1)


def test_fake_gpus_get_what_their_layers_need(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with FakeTensorMode(), torch.no_grad():
        model = Net()
        placed = place(model, {"": 0, "b": "cuda:1"}, split_size=3)
        early, both = model(torch.empty(7, 8))
        moved = place(model, {"": 0, "b": 1}, output_device=0)
        _, on_first = model(torch.empty(7, 8))
    assert [str(each) for each in placed.devices] == ["cuda:0", "cuda:1"]
    assert (str(early.device), str(both.device)) == ("cuda:0", "cuda:1")
    assert str(on_first.device) == "cuda:0"
    assert moved.layers == {"a": torch.device("cuda:0"), "b": torch.device("cuda:1")}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
def test_two_gpus_train_as_one_does(options):
    torch.manual_seed(0)
    model = Skips()
    whole = copy.deepcopy(model).to("cuda:0")
    place(model, {"": "cuda:0", "inner.b": "cuda:1"}, split_size=4)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, **options) for each in (model, whole)]
    for _ in range(3):
        tokens, target = torch.randint(0, 16, (10, 5)), torch.randn(10, 5, 16)
        norms = []
        for each, optimizer in zip((model, whole), optimizers, strict=True):
            logits = each(tokens.to("cuda:0"))["logits"]
            F.mse_loss(logits, target.to(logits.device)).backward()
            norms.append(float(nn.utils.clip_grad_norm_(each.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    for (name, a), b in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-3, atol=1e-4, msg=name)
