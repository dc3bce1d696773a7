"""Tensor parallel layers and DTensor."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
plain = copy.deepcopy(model)
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
x = torch.randn(4, 8)
torch.testing.assert_close(model(x), plain(x))
model(x).square().mean().backward()
plain(x).square().mean().backward()
torch.testing.assert_close(model[0].weight.grad.full_tensor(), plain[0].weight.grad)
print("same output")
dist.destroy_process_group()
