"""Runs placed models on the CPU and on a simulated device, compares them with whole ones; prints what was equal."""

import copy
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from placed_models import Skips, Toy

import unisono
from unisono.parallel import place

torch.set_num_threads(1)


def refused(call):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


# 1. Outputs, gradients and updates of a model with skips are those of a whole one.
torch.manual_seed(0)
whole = Skips()
tokens, extra = torch.randint(0, 16, (6, 5)), {"more": [torch.randn(6, 5, 8)]}
for split_size in (None, 2):
    model = copy.deepcopy(whole)
    names = list(model.state_dict())
    placed = place(model, {"": "sim", "inner.b": "cpu"}, split_size=split_size)
    parts = [slice(start, start + (split_size or 6)) for start in range(0, 6, split_size or 6)]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, foreach=False) for each in (model, whole)]
    for _ in range(3):
        result = model(tokens, extra=extra)
        expected = [whole(tokens[part], extra={"more": [extra["more"][0][part]]}) for part in parts]
        for key in ("logits", "tied"):
            assert torch.equal(result[key].cpu(), torch.cat([each[key] for each in expected])), key
        target = torch.randn(6, 5, 16)
        loss = F.mse_loss(result["logits"], target.to(result["logits"].device))
        F.mse_loss(torch.cat([each["logits"] for each in expected]), target).backward()
        loss.backward()
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.5, foreach=False) for each in (model, whole)]
        assert torch.equal(norms[0].cpu(), norms[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert list(model.state_dict()) == names
    assert all(torch.equal(a.cpu(), b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))
print("devices", {name: str(device) for name, device in placed.layers.items()}, model.position.device)
print("outputs", {key: str(result[key].device) for key in ("logits", "tied")}, result["others"][1][0].device)

# 2. A whole model can be loaded, and the model can be moved, copied, and made an ordinary one again.
model.load_state_dict(whole.state_dict())
copied = copy.deepcopy(model)
copied.to("cpu")
with torch.no_grad():
    assert torch.equal(copied(tokens)["logits"], model(tokens)["logits"].cpu())
print("moved", {str(p.device) for p in copied.parameters()}, placed.devices)
placed.remove()
print("removed:", refused(lambda: model(tokens)))

# 3. Batch norms, and layers that are computed again in the backward pass.
model = Toy()
model.drop.p = 0.0
whole = copy.deepcopy(model)
placed = place(model, {"net1": "cpu", "net2": "sim"}, split_size=4, output_device="cpu")
model.net2.forward = lambda x, run=model.net2.forward: torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
x = torch.randn(10, 6)
output = model(x)
expected = torch.cat([whole(part) for part in x.split(4)])
assert output.device.type == "cpu"
assert torch.equal(output, expected)
output.square().sum().backward()
expected.square().sum().backward()
for (name, a), b in zip(model.named_parameters(), whole.parameters(), strict=True):
    assert torch.equal(a.grad.cpu(), b.grad), name
print("checkpointed", model.net2[0].weight.grad.device)

# 4. What does not go together with several devices.
print(refused(lambda: unisono.Trainer(model, torch.optim.SGD(model.parameters()), virtual_ranks=2)))
print(refused(lambda: unisono.parallel.replicate(model)))
print(refused(lambda: place(Toy(), {"": "sim:2"})))

# 5. A division by weights.
layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
placed = place(layers, ["sim", "cpu"], by="memory")
print("divided", [str(layer.weight.device) for layer in layers], placed.shares)
