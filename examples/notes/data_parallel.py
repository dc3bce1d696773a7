"""DataParallel: one process, several devices; and why the first device is no longer the busy one.

    python examples/notes/data_parallel.py                    # on CPU "devices"; with GPUs: cuda:0, cuda:1, ...

torch's nn.DataParallel gathers all outputs on the first device and computes the loss there, so the first has more
to hold and to do. parallel(loss_fn, batch) computes the loss where the outputs are and brings home one number for
each device. For training in earnest take ranks: one process for each device has no interpreter to share.
"""

import torch
from torch import nn
from torch.nn import functional as F

from unisono.parallel import DataParallel

count = torch.cuda.device_count()
devices = [f"cuda:{number}" for number in range(count)] if count > 1 else ["cpu"] * 4

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3)).to(devices[0])
inputs, labels = torch.randn(32, 10, device=devices[0]), torch.randint(0, 3, (32,), device=devices[0])
seen = []


def loss_fn(model, batch):
    """Runs once on each device, with its replica of the model and its part of the batch."""
    inputs, labels = batch
    seen.append(len(inputs))
    return F.cross_entropy(model(inputs), labels)


# The gradient of the whole batch on one device.
F.cross_entropy(model(inputs), labels).backward()
expected = [parameter.grad.clone() for parameter in model.parameters()]
model.zero_grad()


def gradients_are_right():
    same = all(torch.allclose(p.grad, e, atol=1e-6) for p, e in zip(model.parameters(), expected, strict=True))
    model.zero_grad()
    return same


parallel = DataParallel(model, device_ids=devices)

# torch's way: outputs come together on the first device.
outputs = parallel(inputs)
F.cross_entropy(outputs, labels).backward()
print("outputs gathered:", tuple(outputs.shape), " gradients of the whole batch:", gradients_are_right())

# The balanced way: the loss is computed on every device.
parallel(loss_fn, (inputs, labels)).backward()
print("samples for each device:", sorted(seen), " gradients of the whole batch:", gradients_are_right())

# 30 samples on 4 devices: unequal parts count for what they are.
seen.clear()
F.cross_entropy(model(inputs[:30]), labels[:30]).backward()
expected = [parameter.grad.clone() for parameter in model.parameters()]
model.zero_grad()
parallel(loss_fn, (inputs[:30], labels[:30])).backward()
print("30 samples, cut into", sorted(seen), " gradients of the whole batch:", gradients_are_right())
