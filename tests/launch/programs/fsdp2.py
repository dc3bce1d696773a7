"""FSDP2 on the CPU: sharded parameters learn what unsharded ones learn."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
plain = copy.deepcopy(model)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
x = torch.randn(16, 8)
for each in (model, plain):
    optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        each(x).square().mean().backward()
        optimizer.step()
for sharded, whole in zip(model.parameters(), plain.parameters(), strict=True):
    torch.testing.assert_close(sharded.full_tensor(), whole)
print("same weights")
dist.destroy_process_group()
