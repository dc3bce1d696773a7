"""Wrong uses of a module on another rank: every rank prints what it is told, and calls work afterwards.

It is run as `fork_ranks(3, remote_errors.py)`.
"""

import threading
import warnings

import torch
from torch import nn

import unisono
from unisono import comm
from unisono.parallel import Pipeline, cut, remote, replicate

unisono.init()
RANK = unisono.rank()
ODD = RANK == 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x, how=None):
        if how == "sum" and x.sum() > 10:
            raise KeyError("too large")
        if how == "collective":
            comm.barrier()
        if how == "number":
            return 1.0 if x.sum() > 10 else x * self.weight
        if how == "backward":
            x = x * self.weight
            y = x.exp()
            y.mul_(2)
            return y
        return x * self.weight


def no_weights():
    raise RuntimeError("no weights here")


def call(x=None, *args, grad=True, training=True):
    net.train(training)
    with torch.set_grad_enabled(grad):
        return net(torch.ones(3) if x is None else x, *args)


net, twin = remote(Net, on=1), remote(Net, on=1)
named = nn.Sequential(net, nn.Linear(3, 1))
large = torch.full((3,), 9.0) if ODD else torch.ones(3)
CASES = {
    "module fails": lambda: call(large, "sum"),
    "backward fails": lambda: call(large, "backward").sum().backward(),
    "a collective": lambda: call(large, "collective"),
    "no tensor for one": lambda: call(large, "number"),
    "cannot be sent": lambda: call(threading.Lock() if ODD else None),
    "other mode": lambda: call(training=not ODD),
    "other grad mode": lambda: call(grad=not ODD),
    "other module": lambda: (twin if ODD else net)(torch.ones(3)),
    "function fails": lambda: remote(no_weights, on=1),
    "no module": lambda: remote(lambda: 3, on=1),
    "no such rank": lambda: remote(Net, on=3),
    "other rank": lambda: remote(Net, on=RANK),
    "within itself": lambda: remote(lambda: nn.Sequential(net), on=1),
    "closure": lambda: net.optimizer(torch.optim.LBFGS, lr=1.0),
    "no optimizer": lambda: net.optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters())),
    "trainer": lambda: unisono.Trainer(named, torch.optim.SGD(named.parameters(), 1.0), virtual_ranks=3),
    "cut": lambda: cut(named, Pipeline(stages=["1"])),
    "sums and means": lambda: replicate(named, average=False),
}
for name, use in CASES.items():
    try:
        said = f"gave {use()}"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    print(f"{name} | {said!r}", flush=True)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        out = twin(torch.ones(3, requires_grad=True))
        out.sum().backward()
assert out.tolist() == [1.0, 1.0, 1.0]
print(f"afterwards | {[str(each.message) for each in caught]!r}", flush=True)
