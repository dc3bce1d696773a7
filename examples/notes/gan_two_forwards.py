"""A GAN: the judge goes forward twice, for real and for forged samples, before it goes backward.

    unisono run -n 2 examples/notes/gan_two_forwards.py

DDP averages gradients once for all forwards before a backward. If a backward for each follows, it leaves the second
out: no error, but ranks have different gradients from then on, and soon different models. So notes tell you to join
both batches into one forward, or both losses into one backward. With replicate the order does not matter.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import unisono
from unisono import comm
from unisono.parallel import replicate

unisono.init(device="cpu")


def make_judge():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))


def backward_twice(judge, real, forged):
    """Two forwards, then a backward for each."""
    on_real, on_forged = judge(real), judge(forged)
    F.softplus(-on_real).mean().backward()
    F.softplus(on_forged).mean().backward()


def equal_on_all_ranks(tensors):
    vector = nn.utils.parameters_to_vector(tensors).detach()
    return all(torch.equal(theirs, vector) for theirs in comm.all_gather(vector))


def samples(count):
    return torch.randn(count, 2) * 0.5 + torch.tensor([2.0, -1.0])


torch.manual_seed(unisono.rank())  # each rank draws its own samples
real, forged = samples(8), torch.randn(8, 2)

judge = DistributedDataParallel(make_judge())
backward_twice(judge, real, forged)
unisono.print0("DDP: gradients equal on all ranks:      ", equal_on_all_ranks(p.grad for p in judge.parameters()))

judge = make_judge()
replicate(judge)
backward_twice(judge, real, forged)
unisono.print0("replicate: gradients equal on all ranks:", equal_on_all_ranks(p.grad for p in judge.parameters()))

# The whole GAN: both networks are replicated, and neither is wrapped.
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
replicate(generator)
judging = torch.optim.Adam(judge.parameters(), lr=0.03, betas=(0.5, 0.9), weight_decay=0.05)
forging = torch.optim.Adam(generator.parameters(), lr=0.006, betas=(0.5, 0.9))
torch.manual_seed(unisono.rank())
for _ in range(100):
    forged = generator(torch.randn(32, 4))
    judging.zero_grad()
    backward_twice(judge, samples(32), forged.detach())
    judging.step()

    forging.zero_grad()
    F.softplus(-judge(forged)).mean().backward()
    forging.step()
weights_equal = equal_on_all_ranks([*judge.parameters(), *generator.parameters()])
centre = comm.all_reduce(generator(torch.randn(256, 4)).detach().mean(0), "mean")
distance = (centre - torch.tensor([2.0, -1.0])).norm().item()
unisono.print0(f"trained: weights equal: {weights_equal}, forged samples lie where real ones do: {distance < 1}")
