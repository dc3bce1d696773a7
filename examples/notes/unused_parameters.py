"""Parameters that a step does not use: torch's DDP needs a flag, unisono's replicate does not.

    unisono run -n 2 examples/notes/unused_parameters.py

The model has two branches and takes one per step, by turns. DDP waits for the gradients of both: the next step
fails. With find_unused_parameters=True it looks through the graph before each backward. replicate finds out at its
end.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono
from unisono import comm
from unisono.parallel import replicate

unisono.init(device="cpu")


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x, step):
        return (self.first if step % 2 == 0 else self.second)(x)


def train(model):
    """Four steps; returns the weights, as one vector."""
    torch.manual_seed(unisono.rank())  # each rank has data of its own
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        loss = model(torch.randn(8, 4), step).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def branches():
    torch.manual_seed(0)
    return Branches()


try:
    train(DistributedDataParallel(branches()))
except RuntimeError as error:
    unisono.print0("DDP without the flag:", str(error).split(".")[0] + ".")

with_flag = train(DistributedDataParallel(branches(), find_unused_parameters=True))
unisono.print0("DDP with find_unused_parameters: done")

model = branches()
replicate(model)
ours = train(model)
unisono.print0("replicate, without a flag: done")
unisono.print0("the same weights as with DDP:", torch.allclose(ours, with_flag))
unisono.print0("on all ranks:", all(torch.equal(w, ours) for w in comm.all_gather(ours)))
