"""Trains with a module on another rank, and compares all that can be seen with the same module called on each rank.

It is run as `fork_ranks(n, remote_bits.py, owner)`. Each rank computes what all ranks do without remote(), in turn.
"""

import copy
import sys

import torch
from torch import nn

import unisono
from unisono.parallel import remote

unisono.init()
RANK, RANKS, OWNER = unisono.rank(), unisono.world_size(), int(sys.argv[1])


class Net(nn.Module):
    """Draws random numbers, has buffers, writes to its input, and leaves an input and an output unused."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 37), nn.BatchNorm1d(37), nn.Linear(37, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x, other, *, scale):
        y = torch.dropout(self.norm(self.first(x.mul_(scale))), 0.3, self.training)
        return {"y": self.last(torch.relu(y)), "parts": (y.sum(1), y.detach()), "scale": scale}


def build():
    torch.manual_seed(5)
    return Net()


def begin(rank):
    """The part of the model that each rank has itself, and its optimizer."""
    torch.manual_seed(100 + rank)
    own = nn.Linear(4, 6)
    return own, torch.optim.SGD(own.parameters(), lr=0.1)


def losses_of(net, own, step):
    x, other = torch.randn(5, 4), torch.randn(2, requires_grad=True)
    out = net(own(x).t().contiguous().t(), other, scale=2.0)  # not contiguous: sums round by strides
    assert out["scale"] == 2.0 and not out["parts"][1].requires_grad
    loss = out["y"].mean() + (out["parts"][0].sum() if step else 0)  # means have expanded gradients
    loss.backward()
    assert other.grad is None
    return loss.detach(), torch.rand(1)


def expected():
    net = build()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    ranks, found = [(*begin(rank), torch.get_rng_state()) for rank in range(RANKS)], []
    for step in range(3):
        for rank, (own, optimizer_of_own, state) in enumerate(ranks):
            torch.set_rng_state(state)
            result = losses_of(net, own, step)
            optimizer_of_own.step()
            optimizer_of_own.zero_grad()
            ranks[rank] = own, optimizer_of_own, torch.get_rng_state()
            if rank == RANK:
                found.append(result)
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad /= RANKS
        optimizer.step()
        optimizer.zero_grad()
    return found, ranks[RANK][0].state_dict(), net.state_dict(), optimizer.state_dict()["state"]


def same(found, wanted):
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted), (found, wanted)
    elif isinstance(wanted, dict):
        assert [*found] == [*wanted]
        for key, value in wanted.items():
            same(found[key], value)
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            same(one, other)
    else:
        assert found == wanted


net = remote(build, on=OWNER)
assert not [*net.parameters()] and (net.module is None) == (RANK != OWNER)
optimizer = net.optimizer(torch.optim.Adam, lr=0.01)
own, optimizer_of_own = begin(RANK)
results = []
for step in range(3):
    results.append(losses_of(net, own, step))
    for each in (optimizer, optimizer_of_own):
        each.step()
        each.zero_grad()
losses, weights, owners, state = expected()
same(results, losses)
same(own.state_dict(), weights)
same(dict(net.state_dict()), dict(owners) if RANK == OWNER else {})
same(optimizer.state_dict()["state"], state if RANK == OWNER else {})

# Modes, and a state that is loaded where it belongs.
whole = nn.ModuleDict({"net": net, "own": own})
net.eval()
with torch.no_grad():
    found = net(torch.ones(5, 6), torch.ones(2), scale=1.0)["y"]
local = build()
local.load_state_dict(owners)
local.eval()
assert not found.requires_grad and torch.equal(found, local(torch.ones(5, 6), torch.ones(2), scale=1.0)["y"])
other = build().state_dict()
whole.load_state_dict(
    {**{f"net.{key}": value for key, value in other.items()}, **whole["own"].state_dict(prefix="own.")}
)
same(dict(net.state_dict()), dict(other) if RANK == OWNER else {})
assert RANK != OWNER or not net.module.training

# Sums, gradients that add up, frozen parameters, a graph that is kept, and a rank without inputs.
total = remote(lambda: nn.Linear(2, 1), on=OWNER, average=False)
kept = total.optimizer(torch.optim.SGD, lr=1.0)
x = torch.full((1, 2), RANK + 1.0, requires_grad=True)
out = total(x).sum()
out.backward(retain_graph=True)
out.backward()
if RANK == OWNER:
    assert total.module.weight.grad.tolist() == [[RANKS * (RANKS + 1.0)] * 2]
    assert torch.equal(x.grad, 2 * total.module.weight)
total.zero_grad()
(total.serve() if RANK else total(x).sum()).backward()
if RANK == OWNER:
    assert total.module.weight.grad.tolist() == [[1.0, 1.0]]
total.requires_grad_(False)
assert not total(torch.ones(1, 2)).requires_grad  # nothing to send back
total(x if RANK == 0 else x.detach()).sum().backward()  # and if one rank has something, all take part
mean = remote(lambda: nn.Linear(2, 1), on=OWNER)
mean.optimizer(torch.optim.SGD, lr=1.0)
(mean.serve() if RANK == 1 else mean(x).sum()).backward()
if RANK == OWNER:
    callers = [rank + 1.0 for rank in range(RANKS) if rank != 1]
    assert mean.module.weight.grad.tolist() == [[torch.tensor(sum(callers)).div(len(callers)).item()] * 2]
try:
    copy.deepcopy(whole)
except TypeError as error:
    assert "cannot be copied" in str(error)
else:
    raise AssertionError("a remote module was copied")
print("same")
