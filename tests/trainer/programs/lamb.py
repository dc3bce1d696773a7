"""An optimizer of a user, for programs of tests."""

import torch
from torch import optim


class Lamb(optim.Optimizer):
    """As people write it: it looks at whole parameters, puts new tensors into its state, and counts in Python."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    state["mean"] = 0.9 * state.get("mean", torch.zeros_like(p)) + 0.1 * p.grad
                    state["note"], state["trust"] = "lamb", float(p.norm() / (1e-6 + state["mean"].norm()))
                    p.sub_(state["mean"], alpha=group["lr"] * min(state["trust"], 10.0) / group["steps"])
