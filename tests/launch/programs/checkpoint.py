"""torch.distributed.checkpoint: save a sharded tensor and load it again."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
whole = torch.arange(12.0).reshape(4, 3)
dcp.save({"weight": distribute_tensor(whole, mesh, [Shard(0)]), "step": 7}, checkpoint_id=sys.argv[1])
state = {"weight": distribute_tensor(torch.zeros(4, 3), mesh, [Shard(1)]), "step": 0}
dcp.load(state, checkpoint_id=sys.argv[1])
assert torch.equal(state["weight"].full_tensor(), whole)
print("loaded step", state["step"])
dist.destroy_process_group()
