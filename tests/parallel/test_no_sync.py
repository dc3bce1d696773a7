"""`no_sync`: gradients that remain on a rank, and are dropped there, count nowhere."""

from __future__ import annotations

DROPPED = """
import torch
import torch.distributed as dist
from torch import nn
from unisono.parallel import replicate

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
replicas = replicate(model)
for dropped in (True, False):
    with replicas.no_sync():
        model["b"](torch.ones(4, 3)).sum().backward()
    if dropped:
        model.zero_grad()
    model["a"](torch.ones(4, 3)).sum().backward()
    assert model["a"].bias.grad.tolist() == [4.0, 4.0]
    assert (model["b"].bias.grad is None) == dropped, model["b"].bias.grad
    model.zero_grad()
"""


def test_a_gradient_that_zero_grad_drops_after_no_sync_stays_none(fork_ranks):
    """With zeros instead, momentum and weight decay would change a parameter that plain torch leaves alone."""
    fork_ranks(2, DROPPED)
