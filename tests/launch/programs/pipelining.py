"""torch.distributed.pipelining: two stages and the 1F1B schedule, compared with the whole model."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
x, y = torch.randn(8, 4), torch.randn(8, 4)
stage = PipelineStage(layers[rank], rank, dist.get_world_size(), torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
if rank == 0:
    schedule.step(x)
else:
    losses = []
    schedule.step(target=y, losses=losses)
    whole = nn.functional.mse_loss(layers[1](layers[0](x)), y)
    torch.testing.assert_close(torch.stack(losses).mean(), whole)
assert layers[rank].weight.grad is not None
print("stage", rank, "done")
dist.destroy_process_group()
