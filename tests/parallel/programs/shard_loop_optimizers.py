"""A loop with two optimizers and a GradScaler whose model is divided, or the same additions in one process.

    shard_loop_optimizers.py shares=3 reference
    shard_loop_optimizers.py shares=3 block FOLDER    # the state goes through parts in the folder in the middle

Steps update both optimizers, or one of them. The last share overflows in some steps, so all ranks skip these. Prints
what both must agree on.
"""

import math
import os
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import unisono
import unisono.comm
from unisono.plan import Node, fold
from unisono.state.digest import digest

SHARES, HOW, DEVICE = int(sys.argv[1].removeprefix("shares=")), sys.argv[2], os.environ.get("DEVICE", "cpu")
STEPS, BATCH, BOUND = 20, 12, 0.5
OVERFLOWS = (5, 12)
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(29, 29), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(29, 5)

    def forward(self, x):
        return self.head(self.body(x))


def make(device=DEVICE):
    torch.manual_seed(1)
    return Net().to(device)


def make_optimizers(model):
    return {
        "body": torch.optim.AdamW(model.body.parameters(), lr=1e-2, fused=True),
        "head": torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9),
    }


def make_scaler():
    return torch.amp.GradScaler(torch.device(DEVICE).type, init_scale=2.0**12, growth_interval=4)


def updated(step):
    """The optimizer that a step updates; None: both."""
    return (None, "body", "head")[step % 3]


def loss_of(model, step, share):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(BATCH, 29, generator=generator), torch.randint(5, (BATCH,), generator=generator)
    own = slice(BATCH // SHARES * share, BATCH // SHARES * (share + 1))
    x, y = x.to(DEVICE), y.to(DEVICE)
    with torch.autocast(torch.device(DEVICE).type, torch.float16):
        loss = F.cross_entropy(model(x[own]), y[own])
    return loss * (1e4 if step in OVERFLOWS and share == SHARES - 1 else 1.0)


def tell(model, optimizers, scaler):
    print("weights", digest(dict(model.named_parameters())))
    states = [optimizer.state_dict()["state"] for optimizer in optimizers.values()]
    print("state", digest({"": [state[number] for state in states for number in sorted(state)]}))
    print("scaler", scaler.state_dict())


def tell_step(step, loss, norm, scaler):
    print(f"step {step}: loss {loss:.4g}, norm {norm:.3f}, scale {scaler.get_scale()}")


def reference():
    """One process: the gradients of each share, their sum by the tree, and torch's optimizers and scaler."""
    model = make()
    optimizers, scaler = make_optimizers(model), make_scaler()
    for step in range(STEPS):
        chosen = [each for name, each in optimizers.items() if updated(step) in (None, name)]
        parameters = [p for each in chosen for group in each.param_groups for p in group["params"]]
        gradients, total = {}, 0.0
        for share in range(SHARES):
            loss = loss_of(model, step, share)
            gradients[Node(share, share + 1)] = list(torch.autograd.grad(scaler.scale(loss), parameters))
            total += loss.item()
        summed = fold(gradients, leaves=SHARES, add=lambda left, right: [a + b for a, b in zip(left, right)])  # noqa: B905
        for p, gradient in zip(parameters, summed, strict=True):
            p.grad = gradient * (1 / SHARES)
        for each in chosen:
            scaler.unscale_(each)
        norm = math.sqrt(sum(p.grad.norm().item() ** 2 for p in parameters))
        if math.isfinite(norm):
            factor = min(1.0, BOUND / (math.sqrt(math.fsum(p.grad.norm().item() ** 2 for p in parameters)) + 1e-6))
            for p in parameters:
                p.grad.mul_(factor)
            for each in chosen:
                each.step()
        scaler.update()
        for p in parameters:
            p.grad = None
        tell_step(step, total / SHARES, norm, scaler)
    tell(model, optimizers, scaler)


def divide():
    parallel = {
        "block": unisono.parallel.Shard(unit_bytes=1),
        "built": unisono.parallel.Shard(offload=True),
        "size": unisono.parallel.Shard(by="size", unit_bytes=2000),
        "zero1": unisono.parallel.Shard(zero=1),
        "replicas": unisono.parallel.Shard(replicas=2),
    }[HOW]
    on_cpu = partial(make, "cpu")
    model = unisono.parallel.build(on_cpu, parallel=parallel, device=DEVICE) if HOW == "built" else make()
    optimizers, scaler = make_optimizers(model), make_scaler()
    return model, optimizers, scaler, unisono.parallel.shard(model, optimizers, parallel=parallel, scaler=scaler)


def fail(model, sharded, step):
    """A step that fails, and is as if it had not been."""
    try:
        with sharded.step(updated(step)):
            if unisono.rank() == SHARES - 1:
                raise OSError("a file is missing")
            sharded.backward(loss_of(model, step, unisono.rank()))
    except (OSError, unisono.errors.PeerError):
        pass


def divided():
    unisono.init()
    folder = Path(sys.argv[3])
    model, optimizers, scaler, sharded = divide()
    for step in range(STEPS):
        if step == STEPS // 2:
            torch.save(sharded.state_dict(), folder / f"{unisono.rank()}.pt")
            scales = scaler.state_dict()
            unisono.comm.barrier()
            model, optimizers, scaler, sharded = divide()
            sharded.load_state_dict(torch.load(path) for path in sorted(folder.glob("*.pt")))
            scaler.load_state_dict(scales)
            fail(model, sharded, step)
        with sharded.step(updated(step)):
            sharded.backward(loss_of(model, step, unisono.rank()))
            norm = sharded.clip_grad_norm_(BOUND).item()
        tell_step(step, sharded.loss, norm, scaler)
    with sharded.whole():
        tell(model, optimizers, scaler)


reference() if HOW == "reference" else divided()
