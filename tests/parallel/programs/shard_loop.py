"""A loop of a user whose model is divided, or the same additions in one process; prints what both must agree on.

    shard_loop.py shares=3 reference    # one process computes the shares of 3 ranks, and adds them
    shard_loop.py shares=3 block FOLDER         # 3 ranks; parts of the last state go into the folder
    shard_loop.py shares=2 block FOLDER load    # 2 ranks show what they load from these parts

The last share has no data in one step and fails once in another. A layer is frozen in some steps. In the middle, the
state goes into a file, and new objects go on from there.
"""

import math
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import unisono
import unisono.comm
from unisono.plan import Node, fold
from unisono.state.digest import digest

SHARES, HOW, DEVICE = int(sys.argv[1].removeprefix("shares=")), sys.argv[2], os.environ.get("DEVICE", "cpu")
STEPS, BATCH, BOUND = 6, 24, 0.8
IN_PARTS = ("built", "size", "replicas", "offload")
"""The divisions whose state goes into parts in the middle; that of others goes into one file."""
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.norm(self.linear(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 37)
        self.layers = nn.ModuleList(Block(37) for _ in range(3))
        self.head = nn.Linear(37, 20)
        self.head.weight = self.embedding.weight  # tied
        self.scale = nn.Parameter(torch.tensor(0.2))

    def forward(self, x):
        x = self.embedding(x).mean(1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale


def make(device=DEVICE):
    torch.manual_seed(1)
    return Net().to(device)


def data(step):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randint(20, (BATCH, 5), generator=generator), torch.randint(20, (BATCH,), generator=generator)
    return x.to(DEVICE), y.to(DEVICE)


def micro_batches(step, share):
    """The micro-batches of a share: two, and none of the last share in the third step."""
    if step == 2 and share == SHARES - 1 > 0:
        return []
    x, y = data(step)
    own = slice(BATCH // SHARES * share, BATCH // SHARES * (share + 1))
    return [*zip(x[own].chunk(2), y[own].chunk(2), strict=True)]


def freeze(model, step):
    model.layers[1].requires_grad_(step != 3)


def losses(model, step, share):
    torch.manual_seed(100 * step + share)  # dropout
    for x, y in micro_batches(step, share):
        yield F.cross_entropy(model(x), y) / 2


def make_optimizer(model):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def test_loss(model):
    model.eval()
    x, y = data(-1)
    loss = F.cross_entropy(model(x), y).item()
    model.train()
    return f"{loss:.5f}"  # of buffers that are means in another order


def tell(model, optimizer):
    print("weights", digest(dict(model.named_parameters())))
    state = optimizer.state_dict()["state"]
    print("state", digest({"": [state[number] for number in sorted(state)]}))
    print("buffers", *(f"{b.double().sum():.4f}" for b in model.buffers()))


def reference():
    """One process: the gradients of each share, their sum by the tree, and torch's optimizer."""
    model = make()
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(STEPS):
        freeze(model, step)
        before = [b.clone() for b in model.buffers()]
        gradients, totals, buffers = {}, {}, []
        for share in range(SHARES):
            model.zero_grad()
            for b, value in zip(model.buffers(), before, strict=True):
                b.copy_(value)
            of_share = None
            for loss in losses(model, step, share):
                loss.backward()
                of_share = loss.detach() if of_share is None else of_share + loss.detach()
            totals[Node(share, share + 1)] = [of_share]
            gradients[Node(share, share + 1)] = [p.grad for p in model.parameters()]
            buffers.append([b.double() for b in model.buffers()])
        summed, (total,) = (fold(each, leaves=SHARES, add=add) for each in (gradients, totals))
        for p, gradient in zip(model.parameters(), summed, strict=True):
            p.grad = None if gradient is None else gradient * (1 / SHARES)
        norm = sum(p.grad.double().square().sum() for p in model.parameters() if p.grad is not None).sqrt().item()
        if step % 2:
            factor = min(1.0, BOUND / (exact_norm(model) + 1e-6))
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(factor)
        for b, values in zip(model.buffers(), zip(*buffers, strict=True), strict=True):
            b.copy_(sum(values) / SHARES if b.is_floating_point() else values[0])
        optimizer.step()
        schedule.step()
        print(f"step {step}: loss {total.item() / SHARES:.4f}, norm {f'{norm:.4f}' if step % 2 else None}")
    print("test", test_loss(model))
    tell(model, optimizer)


def exact_norm(model):
    """The norm as the engines compute it: exact sums of the squares of each parameter's norm in float32."""
    return math.sqrt(math.fsum(p.grad.norm().item() ** 2 for p in model.parameters() if p.grad is not None))


def add(left, right):
    return [b if a is None else a if b is None else a + b for a, b in zip(left, right, strict=True)]


def divide(state=None):
    """Make the model, its optimizer and its schedule, and divide them."""
    parallel = {
        "block": unisono.parallel.Shard(),
        "built": unisono.parallel.Shard(unit_bytes=1),
        "named": unisono.parallel.Shard(by=["layers.0", "layers.2"]),
        "size": unisono.parallel.Shard(by="size", unit_bytes=4000),
        "zero1": unisono.parallel.Shard(zero=1),
        "replicas": unisono.parallel.Shard(replicas=2),
        "offload": unisono.parallel.Shard(offload=True),
    }[HOW]
    if HOW == "built":
        model = unisono.parallel.build(lambda: make("cpu"), parallel=parallel, device=DEVICE)
    else:
        model = make()
        if unisono.rank() and state is None:
            nn.init.normal_(model.head.weight)  # rank 0 decides
    optimizer = make_optimizer(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    if state is not None and HOW not in IN_PARTS:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    sharded = unisono.parallel.shard(model, optimizer, parallel=None if HOW == "block" else parallel)
    if state is not None:
        schedule.load_state_dict(state["schedule"])
        if HOW in IN_PARTS:
            sharded.load_state_dict(parts_in(Path(sys.argv[3]) / "middle"))
        if HOW == "zero1":  # again, now that it is divided
            with sharded.whole():
                model.load_state_dict(state["model"])
                optimizer.load_state_dict(state["optimizer"])
    return model, optimizer, schedule, sharded


def save_parts(sharded, folder):
    folder.mkdir(exist_ok=True)
    torch.save(sharded.state_dict(), folder / f"{unisono.rank()}.pt")
    unisono.comm.barrier()


def parts_in(folder):
    return (torch.load(path, mmap=True) for path in sorted(folder.glob("*.pt"), reverse=True))


def train(model, schedule, sharded, step):
    freeze(model, step)
    norm = None
    with sharded.step():
        for number, loss in enumerate(losses(model, step, unisono.rank())):
            with nullcontext() if number else sharded.no_sync():
                sharded.backward(loss)
        if step % 2:
            norm = sharded.clip_grad_norm_(BOUND).item()
    schedule.step()
    print(f"step {step}: loss {sharded.loss:.4f}, norm {norm if norm is None else f'{norm:.4f}'}")


def fail(model, sharded, step):
    """A step that fails on the last rank alone, which is as if it had not been."""
    try:
        with sharded.step():
            for loss in losses(model, step, unisono.rank()):
                if unisono.rank() == SHARES - 1:
                    raise OSError("a file is missing")
                with sharded.no_sync():
                    sharded.backward(loss)
    except (OSError, unisono.errors.PeerError) as error:
        assert type(error) is (OSError if unisono.rank() == SHARES - 1 else unisono.errors.PeerError), error


def divided():
    unisono.init()
    assert unisono.world_size() == SHARES
    folder = Path(sys.argv[3])
    path = folder / "whole.pt"
    model, optimizer, schedule, sharded = divide()
    for step in range(STEPS // 2):
        train(model, schedule, sharded, step)
    with sharded.whole(everywhere=False):
        if unisono.is_main():
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
            }
            torch.save(state, path)
    save_parts(sharded, folder / "middle")
    model, optimizer, schedule, sharded = divide(torch.load(path))
    fail(model, sharded, STEPS // 2)
    for step in range(STEPS // 2, STEPS):
        train(model, schedule, sharded, step)
    with sharded.no_grad():
        for _ in range(unisono.rank()):
            test_loss(model)
        print("test", test_loss(model))
    save_parts(sharded, folder / "end")
    with sharded.whole():
        tell(model, optimizer)


def show():
    """Show what is loaded from parts of another number of ranks."""
    unisono.init()
    model, optimizer, _, sharded = divide()
    optimizer.param_groups[0]["lr"] = 7.0  # to be replaced
    sharded.load_state_dict(parts_in(Path(sys.argv[3]) / "end"))
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2 * 0.5**3] * 2
    with sharded.whole():
        tell(model, optimizer)


show() if "load" in sys.argv else reference() if HOW == "reference" else divided()
