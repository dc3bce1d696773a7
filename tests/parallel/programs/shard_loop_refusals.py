"""What shards in a loop of a user refuse, one after the other: prints each case with the error that it raised."""

import copy
from contextlib import suppress

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import unisono
import unisono.comm
from unisono.parallel import Shard, build, replicate, shard

unisono.init()
RANK = unisono.rank()
IS_LAST = unisono.world_size() - 1 == RANK
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(RANK))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


class Elsewhere(Net):
    def forward(self, x):
        return super().forward(x) * self.layers[1].weight.mean()


def make(model=None, optimizer=torch.optim.AdamW, **options):
    model = Net() if model is None else model
    return model, shard(model, optimizer(model.parameters()), **options)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def two(model=None, **options):
    """Divide a model with two optimizers."""
    model = Net() if model is None else model
    optimizers = {"body": optimizer_of(model.layers), "head": torch.optim.AdamW(model.head.parameters())}
    return model, shard(model, optimizers, **options)


def in_step_of(optimizer):
    def enter(model, sharded):
        with sharded.step(optimizer):
            pass

    return enter


def in_common():
    model = Net()
    shard(model, {"body": optimizer_of(model), "head": optimizer_of(model.head)})


def frozen_head():
    model, sharded = two()
    model.head.requires_grad_(False)
    with sharded.step("head"):
        pass


def scaler(**options):
    return torch.amp.GradScaler("cpu", **options)


def scaled(model, sharded):
    sharded.backward(sharded._steps._scaler.scale(model(X).mean()))


def other_scale():
    model, sharded = make(scaler=(own := scaler()))
    own.update(1024.0 * (1 + RANK))
    step(model, sharded)


def other_optimizers():
    """Load the parts of a loop with two optimizers into one with one."""
    _, sharded = two()
    parts = unisono.comm.all_gather(sharded.state_dict())
    make()[1].load_state_dict(parts)


def step(model, sharded, loss=lambda model: model(X).square().mean()):
    with sharded.step():
        sharded.backward(loss(model))


def in_step(function, model=None, **options):
    """Call a function of the model and its handle within a step."""
    model, sharded = make(model, **options)
    with sharded.step():
        function(model, sharded)


def outside(function):
    """Call a function of the model and its handle between two steps."""
    model, sharded = make()
    step(model, sharded)
    function(model, sharded)


def twice(_, sharded):
    loss = torch.zeros((), requires_grad=True)
    sharded.backward(loss)
    sharded.backward(loss)


def after_clipping(model, sharded):
    loss = model(X).mean()
    sharded.backward(loss)
    sharded.clip_grad_norm_(1.0)
    sharded.backward(loss)


def call_after_clipping(model, sharded):
    sharded.backward(model(X).mean())
    sharded.clip_grad_norm_(1.0)
    model(X)


def clip_twice(model, sharded):
    sharded.backward(model(X).mean())
    sharded.clip_grad_norm_(1.0)
    sharded.clip_grad_norm_(1.0)


def caught(model, sharded):
    sharded.backward(model(X).mean() * torch.nan)
    with suppress(unisono.errors.NonFiniteLossError):
        sharded.clip_grad_norm_(1.0)


def within(outer, inner):
    def enter(_, sharded):
        with getattr(sharded, outer)(), getattr(sharded, inner)():
            pass

    return enter


def apart():
    model = Net()
    lone = nn.Parameter(torch.zeros(3))
    shard(model, torch.optim.SGD([*model.parameters(), lone], lr=0.1))


def frozen():
    model = Net().requires_grad_(False)
    make(model)


def meta():
    with torch.device("meta"):
        model = Net()
    make(model)


def replicated():
    model = Net()
    handle = replicate(model)
    try:
        make(model)
    finally:
        handle.close()


def parallelized():
    """A model whose matrices torch has divided; one process has no mesh."""
    model = Net()
    if unisono.world_size() > 1:
        mesh = init_device_mesh("cpu", (unisono.world_size(),))
        parallelize_module(model, mesh, {"layers.0": ColwiseParallel()})
    return model


def again():
    model, _ = make()
    make(model)


def other_settings():
    make(build(Net, parallel=Shard(by=["layers.0"])), parallel=Shard())


def written():
    model = build(Net, parallel=Shard())
    model.head.weight.data.zero_()
    make(model)


def of_rank():
    """A model of another size on the second rank."""
    model = Net()
    model.head = nn.Linear(16, 2 + RANK)
    make(model)


def wrong_here():
    """A wrong argument on the second rank alone."""
    make(optimizer=torch.optim.LBFGS if RANK else torch.optim.AdamW)


def other_state():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(X).mean().backward()
    optimizer.step()
    shard(model, optimizer)


def other_rate():
    model = Net()
    optimizer = optimizer_of(model)
    sharded = shard(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.1 + RANK
    step(model, sharded)


def other_calls():
    _, sharded = make()
    with sharded.step() if RANK else sharded.no_grad():
        pass


def clips_alone():
    model, sharded = make()
    with sharded.step():
        sharded.backward(model(X).mean())
        if RANK:
            sharded.clip_grad_norm_(1.0)


def fails_late():
    """After clipping, the other rank has no way to learn of the error: the next step says so."""
    model, sharded = make()
    try:
        with sharded.step():
            sharded.backward(model(X).mean())
            sharded.clip_grad_norm_(1.0)
            raise OSError("a file is missing")
    except OSError:
        step(model, sharded)


def write(change):
    """Write to a parameter between steps. The next step says so, and the one after it has the values from before."""
    model, sharded = make()
    step(model, sharded)
    with sharded.whole():
        before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        change(model.layers[1].weight)
    try:
        step(model, sharded)
    finally:
        with sharded.whole():
            same = [torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
        assert all(same) or unisono.world_size() == 1, same
        step(model, sharded)


def load(change, model=None):
    """Load the parts of all ranks, after a change of their list."""
    _, sharded = make()
    parts = unisono.comm.all_gather(sharded.state_dict())
    other, sharded = make(model)
    try:
        sharded.load_state_dict(change(parts))
    except unisono.errors.UnisonoError:
        if change is step_after:
            step(other, sharded)
        raise
    step(other, sharded)


def step_after(parts):
    return [*parts, {}]


def unreadable(parts):
    yield parts[0]
    if IS_LAST:
        raise OSError("a file is missing")
    yield from parts[1:]


def wide():
    model = Net()
    model.head = nn.Linear(16, 3)
    return model


CASES = {
    "no model": lambda: shard([Net()], None),
    "no optimizer": lambda: shard(Net(), torch.optim.AdamW),
    "no optimizers": lambda: shard(Net(), {}),
    "no optimizer of a name": lambda: shard(Net(), {"body": None}),
    "no name": lambda: shard(Net(), {0: optimizer_of(Net())}),
    "a parameter in common": in_common,
    "unknown optimizer": lambda: in_step_of("haed")(*two()),
    "an optimizer": lambda: in_step_of(optimizer_of(Net()))(*two()),
    "a name for one": lambda: in_step_of("head")(*make()),
    "a frozen optimizer": frozen_head,
    "no scaler": lambda: make(scaler=1024.0),
    "a scaler elsewhere": lambda: make(scaler=torch.amp.GradScaler("xpu")),
    "float16 weights": lambda: make(Net().half(), scaler=scaler()),
    "a disabled scaler": lambda: make(Net().half(), scaler=scaler(enabled=False)),
    "a scaled loss": lambda: in_step(scaled, scaler=scaler()),
    "other scale": other_scale,
    "another scaler": lambda: make(scaler=scaler(init_scale=4.0 + RANK)),
    "other optimizers": other_optimizers,
    "no settings": lambda: make(parallel="block"),
    "unknown name": lambda: make(parallel=Shard(by=["layer.1"])),
    "LBFGS": lambda: make(optimizer=torch.optim.LBFGS),
    "compiled": lambda: make(torch.compile(Net())),
    "wrapped": lambda: make(nn.DataParallel(Net())),
    "too many replicas": lambda: make(parallel=Shard(replicas=3)),
    "apart": apart,
    "frozen": frozen,
    "meta": meta,
    "lazy": lambda: make(nn.LazyLinear(2)),
    "replicated": replicated,
    "again": again,
    "parallelized": lambda: make(parallelized()),
    "parallelized and replicated": lambda: replicate(parallelized()).close(),
    "other settings": other_settings,
    "written": written,
    "a call of the handle": lambda: make()[1](X),
    "no backward": lambda: in_step(lambda model, sharded: model(X)),
    "loss.backward": lambda: in_step(lambda model, sharded: model(X).mean().backward()),
    "a number": lambda: in_step(lambda model, sharded: sharded.backward(0.5)),
    "several losses": lambda: in_step(lambda model, sharded: sharded.backward(model(X).sum(1))),
    "twice": lambda: in_step(twice),
    "after clipping": lambda: in_step(after_clipping),
    "a call after clipping": lambda: in_step(call_after_clipping),
    "clip twice": lambda: in_step(clip_twice),
    "caught": lambda: in_step(caught),
    "clip at zero": lambda: in_step(lambda model, sharded: sharded.clip_grad_norm_(0)),
    "nan": lambda: in_step(lambda model, sharded: sharded.backward(model(X).mean() * (torch.nan if IS_LAST else 1))),
    "elsewhere": lambda: in_step(
        lambda model, sharded: sharded.backward(model(X).mean()), Elsewhere(), parallel=Shard(unit_bytes=1)
    ),
    "optimizer.step": lambda: outside(lambda model, sharded: sharded._optimizers[""].step()),
    "backward outside": lambda: outside(lambda model, sharded: sharded.backward(torch.zeros((), requires_grad=True))),
    "clip outside": lambda: outside(lambda model, sharded: sharded.clip_grad_norm_(1.0)),
    "a call": lambda: outside(lambda model, sharded: model(X)),
    "state_dict": lambda: outside(lambda model, sharded: model.state_dict()),
    "load_state_dict": lambda: outside(lambda model, sharded: model.load_state_dict(Net().state_dict())),
    "optimizer.state_dict": lambda: outside(lambda model, sharded: sharded._optimizers[""].state_dict()),
    "step in whole": lambda: outside(within("whole", "step")),
    "whole in step": lambda: outside(within("step", "whole")),
    "everywhere": lambda: make()[1].whole(everywhere=1).__enter__(),
    "state_dict in step": lambda: in_step(lambda model, sharded: sharded.state_dict()),
    "one part": lambda: load(lambda parts: parts[0]),
    "no parts": lambda: load(lambda parts: []),
    "a part missing": lambda: load(lambda parts: parts[1:]),
    "a part twice": lambda: load(lambda parts: [*parts, parts[0]]),
    "no part": lambda: load(lambda parts: [*parts, {"weights": {}}]),
    "other moments": lambda: load(lambda parts: [*parts, parts[0] | {"steps": 7, "rank": 5}]),
    "another form": lambda: load(lambda parts: [parts[0] | {"version": 2}]),
    "another model": lambda: load(lambda parts: parts, wide()),
    "a step after": lambda: load(step_after),
    "unreadable": lambda: load(unreadable),
    "zero_": lambda: write(torch.Tensor.zero_),
    "data.fill_": lambda: write(lambda p: p.data.fill_(2.0)),
    "written on one rank": lambda: write(lambda p: p.zero_() if IS_LAST else p),
    "of rank": of_rank,
    "wrong here": wrong_here,
    "other state": other_state,
    "other rate": other_rate,
    "other calls": other_calls,
    "clips alone": clips_alone,
    "fails late": fails_late,
    "a copy": lambda: outside(lambda model, sharded: copy.deepcopy(model).state_dict()),
}
for name, case in CASES.items():
    try:
        case()
        print(f"{name}: not refused")
    except (TypeError, ValueError, OSError, unisono.errors.UnisonoError) as error:
        print(f"{name}: {type(error).__name__}: {error}".replace("\n", " "))
