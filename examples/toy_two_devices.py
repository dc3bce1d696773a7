"""Train a model whose layers are on two devices of one process; its code has no `.to("cuda:1")` in it.

    python examples/toy_two_devices.py                    # two GPUs if there are two, otherwise the CPU twice
    python examples/toy_two_devices.py --split-size 0     # without micro-batches

A batch goes through the devices in micro-batches, so that two GPUs work at the same time. On a CPU, the last line does
not change with --whole, which leaves the model in one place and divides the batch in the loop.
"""

import argparse
import resource
import time

import torch
from torch import nn
from torch.nn import functional as F

from unisono.parallel import place

parser = argparse.ArgumentParser(description="Train a model whose layers are on two devices.")
parser.add_argument("--whole", action="store_true", help="do not place the model")
parser.add_argument("--by", choices=["memory", "time"], help="let unisono decide which layer is where")
parser.add_argument("--split-size", type=int, default=20, help="samples of a micro-batch; 0: the whole batch")
parser.add_argument("--batch-size", type=int, default=120)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--layers", type=int, default=4, help="hidden layers of each of the two nets")
parser.add_argument("--steps", type=int, default=60)
args = parser.parse_args()
torch.manual_seed(0)
torch.set_num_threads(1)


# 1. A model, as for one device.
class ToyModel(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.net1 = nn.Sequential(nn.Linear(10, width), *[hidden(width) for _ in range(layers)])
        self.relu = nn.ReLU()
        self.net2 = nn.Sequential(*[hidden(width) for _ in range(layers)], nn.Linear(width, 5))

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def hidden(width):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.05))


model = ToyModel(args.width, args.layers)
teacher = ToyModel(16, 1).eval()

# 2. Its layers on two devices.
devices = ["cuda:0", "cuda:1"] if torch.cuda.device_count() > 1 else ["cpu", "cpu"]
split_size = args.split_size or None
if args.by:
    placed = place(model, devices, by=args.by, inputs=(torch.ones(args.batch_size, 10),), split_size=split_size)
    print("shares:", ", ".join(f"{share:.0%}" for share in placed.shares))
elif not args.whole:
    placed = place(model, {"net1": devices[0], "net2": devices[1]}, split_size=split_size)
    print("devices:", ", ".join(f"{name} on {device}" for name, device in placed.layers.items()))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

# 3. The loop.
begun = time.process_time()
for _step in range(args.steps):
    x = torch.randn(args.batch_size, 10)
    with torch.no_grad():
        labels = teacher(x)
    parts = x.split(split_size or args.batch_size) if args.whole else [x]
    outputs = torch.cat([model(part) for part in parts])
    loss = F.mse_loss(outputs, labels.to(outputs.device))  # where the last layer is
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
seconds = time.process_time() - begun
peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(f"{1000 * seconds / args.steps:.2f} ms of the CPU a step, {peak_mib:.0f} MiB at most")
print(f"loss: {loss.item():.6f}")
