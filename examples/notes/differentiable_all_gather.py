"""Gradients through all_gather: a contrastive loss over the embeddings of all ranks.

    unisono run -n 2 examples/notes/differentiable_all_gather.py

torch.distributed.all_gather cuts the graph: a loss over gathered embeddings trains only what the rank computed
itself, and only through its own copy. comm.all_gather is differentiable. The gradient is that of one process that
adds up the losses of all ranks; with equal losses on W ranks it is W times that of one loss.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F

import unisono
from unisono import comm

unisono.init(device="cpu")
rank, world_size = unisono.rank(), unisono.world_size()
torch.manual_seed(0)
images, texts = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
weight = torch.randn(4, 4, dtype=torch.float64)


def contrastive_loss(images, texts):
    """Each image should be more like its own text than like all others."""
    return F.cross_entropy(images @ texts.T, torch.arange(len(images)))


def gradient(gather):
    """The gradient that the ranks average, each with its share of the samples."""
    w = weight.clone().requires_grad_()
    share = slice(rank * 6 // world_size, (rank + 1) * 6 // world_size)
    loss = contrastive_loss(gather(images[share] @ w), gather(texts[share]))
    loss.backward()
    return comm.all_reduce(w.grad, "mean")


def torchs_gather(tensor):
    parts = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(parts, tensor)
    parts[rank] = tensor  # the usual repair: the rank's own part keeps its graph
    return torch.cat(parts)


w = weight.clone().requires_grad_()
contrastive_loss(images @ w, texts).backward()


def report(name, found):
    verdict = "that of one process" if torch.allclose(found, w.grad) else "another one"
    print(f"{name}: the gradient is {verdict}, {found.norm() / w.grad.norm():.2f} times as long")


report("unisono", gradient(lambda tensor: comm.all_gather(tensor, concat=0)))
report("torch  ", gradient(torchs_gather))
