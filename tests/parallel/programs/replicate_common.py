"""What the checks of `replicate` share. The reference is the same model on this rank alone with the batches of all
ranks: its loss is the mean of their losses.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

import unisono

warnings.simplefilter("error")
unisono.init(sys.argv[1])
RANK, SIZE = unisono.rank(), unisono.world_size()
SMALL = {"bucket_mb": 1e-4, "first_bucket_mb": 1e-4}
"""About a parameter to a bucket, so that the order of buckets matters."""


class Branches(nn.Module):
    """Uses what a number says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, which: int) -> Tensor:
        x = self.first(x)
        for i, branch in enumerate(self.branches):
            if which >> i & 1:
                x = torch.tanh(branch(x))
        return self.last(x)


def drawn(step: int, rank: int, *shape: int) -> Tensor:
    """The batch of a rank in a step; every rank can draw all of them."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def mlp(*widths: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def whole(loss: Callable[[int], Tensor]) -> Tensor:
    return torch.stack([loss(rank) for rank in range(SIZE)]).mean()


def same_gradients(model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), (name, p.grad, q.grad)
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def alike(*tensors: Tensor) -> None:
    for tensor in tensors:
        found = [torch.empty_like(tensor.detach()) for _ in range(SIZE)]
        dist.all_gather(found, tensor.detach().contiguous())
        assert all(torch.equal(found[0], other) for other in found)


def state(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
