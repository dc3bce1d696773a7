"""Kill a rank in the middle of an update, and let the others put the state back.

`killed_in_update.py CASE KIND MOMENT VICTIMS STEP FOLDER`: the victims kill themselves in the given step. KIND says
where: "line" before a line of the engine; "operation" in the middle of an operation of torch, of which the written
tensors are spoilt. MOMENT says how many such places are passed, or as 0.5 what part of those of the update before. With
"arrival", MOMENT is "gradients" or "weights", and a victim has told only the first of the other ranks that it is at the
barrier for these; or "state", which has been moved to shared memory.

Each survivor prints the number of steps that it has done, what `repair` returned, and whether its state is the one from
after these steps.
"""

import copy
import hashlib
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import unisono
from unisono import embedding
from unisono.engine.selection import EngineFactory, select_engines
from unisono.errors import UnisonoError
from unisono.trainer import step_runners

sys.path.insert(0, str(Path(__file__).parents[2] / "trainer" / "programs"))
from lamb import Lamb

CASE, KIND, MOMENT, STEP = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[5])
VICTIMS, FOLDER = {int(rank) for rank in sys.argv[4].split(",") if rank}, Path(sys.argv[6])
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Small(nn.Module):
    """A scalar, one parameter that some samples use, one that none uses, an empty one, and one with turned strides."""

    def __init__(self, features=6, width=20):
        super().__init__()
        self.first, self.last = nn.Linear(features, width), nn.Linear(width, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.never, self.empty = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(0))
        self.sometimes = nn.Parameter(torch.zeros(3))
        self.turned = nn.Parameter((torch.randn(width, width) / width).t())

    def forward(self, x):
        y = self.last(torch.tanh(torch.tanh(self.first(x)) @ self.turned)) * self.scale + self.empty.sum()
        return y + self.sometimes if x[0, 0] > 0.5 else y


class Large(Small):
    """So large that ranks copy a portion in each step, and cut parameters."""

    def __init__(self):
        super().__init__(width=600)


class One(nn.Module):
    def __init__(self):
        super().__init__()
        self.only = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x[:, :3] * self.only


class Table(nn.Module):
    """A table whose gradient is sparse."""

    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(50, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.table((x[:, 0].abs() * 10).long().clamp(max=49)))


class Tables(nn.Module):
    """Tables whose rows ranks divide, since batches name enough of them, and one that only some batches use."""

    def __init__(self):
        super().__init__()
        rules = {"rows": embedding.Adam(lr=0.1), "bags": embedding.RowwiseAdagrad(lr=0.1)}
        settings = {
            name: embedding.Table(rows=3000, dim=4, pooling="sum", optimizer=rule) for name, rule in rules.items()
        }
        settings["any"] = embedding.Table(
            capacity=2500, dim=4, pooling="sum", optimizer=rules["bags"], when_full="evict_oldest"
        )
        self.tables = embedding.Tables(settings)
        self.rows, self.bags, self.last = self.tables["rows"], self.tables["bags"], nn.Linear(4, 3)
        self.any = self.tables["any"]

    def forward(self, x):
        ids = (x.abs() * 500).long().repeat(1, 10) + torch.arange(10).repeat_interleave(6) ** 2
        y = self.rows(ids.clamp(max=2999)) + self.any((ids - 800) << 48)
        return self.last(y + self.bags(ids[:, :3].clamp(max=9)) if x[0, 0] > 0.5 else y)


OPTIMIZERS = {
    "sgd": partial(optim.SGD, lr=0.1),
    "momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": partial(optim.Adam, lr=0.01, amsgrad=True),
    "adamw-fused": partial(optim.AdamW, lr=0.01, fused=True),
    "adamw-foreach": partial(optim.AdamW, lr=0.01, foreach=True),
    "adamw-tensor": partial(optim.AdamW, lr=torch.tensor(0.01)),
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "adamax": optim.Adamax,
    "adagrad": optim.Adagrad,
    "adagrad-fused": partial(optim.Adagrad, fused=True),
    "adadelta": optim.Adadelta,
    "rmsprop": partial(optim.RMSprop, momentum=0.9, centered=True),
    "rprop": optim.Rprop,
    "asgd": partial(optim.ASGD, t0=2),
    "asgd-foreach": partial(optim.ASGD, t0=2, foreach=True),
    "adafactor": optim.Adafactor,
    "lamb": Lamb,
}
MODELS = {"small": Small, "large": Large, "one": One, "table": Table, "tables": Tables}


WAITS = {"late", "wait", "barrier", "_wait", "observed", "run_deferred", "wait_for_semaphore", "sleep"}
"""Functions that take more lines in one step than in the next, by how late the other ranks are."""


class Killer(TorchDispatchMode):
    """Counts the moments of an update, and kills this process at one of them."""

    def __init__(self):
        super().__init__()
        self.count, self.last, self.at = 0, 0, -1.0

    def passes(self):
        self.count += 1
        return self.count > self.at >= 0

    def trace(self, frame, event, _):
        name = frame.f_code.co_filename
        if "unisono/engine/" not in name or frame.f_code.co_name in WAITS:
            return None
        if event == "line" and self.passes():
            os.kill(os.getpid(), signal.SIGKILL)
        return self.trace

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.passes():
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in value if isinstance(value, (list, tuple)) else [value]:
                        if func is torch.ops.aten.index_copy_.default:  # it writes some rows only
                            tensor[args[2][len(args[2]) // 2 :]] = 7.0
                        else:
                            tensor.view(-1)[tensor.numel() // 2 :].fill_(7.0)
            os.kill(os.getpid(), signal.SIGKILL)
        return func(*args, **(kwargs or {}))

    def run(self, update, scaler):
        """Run an update; the one before the last tells how many moments there are."""
        self.count = 0
        try:
            if KIND == "line":
                sys.settrace(self.trace)
                update(scaler)
            else:
                with self:
                    update(scaler)
        finally:
            sys.settrace(None)
            self.last = self.count


engines, make = [], EngineFactory.engine


def make_engine(self, optimizer):
    engine = make(self, optimizer)
    engines.append(engine)
    return engine


EngineFactory.engine = make_engine
step_runners.select_engines = lambda *given, **options: select_engines(*given, **{**options, "protect": True})

dist.init_process_group("gloo", init_method=f"file://{FOLDER}/group", rank=RANK, world_size=SIZE)
torch.manual_seed(0)
parts = CASE.split("+")
model = MODELS[parts[0]]()
kind = parts[1]
parameters = [(name, p) for name, p in model.named_parameters() if p.numel() or kind != "adafactor"]
if kind == "adafactor":  # it divides by the number of elements
    model.empty.requires_grad_(False)
if kind == "joint":
    given = {
        "a": optim.AdamW([p for name, p in parameters if "first" in name], lr=0.01),
        "b": optim.SGD([p for name, p in parameters if "first" not in name], lr=0.01, momentum=0.9),
    }
    every = [*given.values()]
elif isinstance(model, Tables):
    given = {"a": OPTIMIZERS[kind](model.last.parameters()), "b": model.tables.optimizer}
    every = [*given.values()]
elif kind == "muon":
    given = {
        "a": optim.Muon([p for name, p in parameters if p.dim() == 2], lr=0.01),
        "b": optim.AdamW([p for name, p in parameters if p.dim() != 2], lr=0.01),
    }
    every = [*given.values()]
else:
    half = len(parameters) // 2
    groups = [{"params": [p for _, p in parameters[half:]]}, {"params": [p for _, p in parameters[:half]]}]
    given = OPTIMIZERS[kind](groups if half else model.parameters())
    every = [given]
options = {"virtual_ranks": 5}
extras = parts[2:]
if "overflow" in extras:
    for group in (group for optimizer in every for group in optimizer.param_groups):
        group["lr"] = group["lr"] / 300.0  # so that the larger loss below does not diverge
if "clip" in extras:
    options["clip_grad_norm"] = 0.1
if "fp16" in extras:
    options["autocast"] = "fp16"
if "schedule" in extras:
    options["scheduler"] = optim.lr_scheduler.LambdaLR(given, lambda step: 1.0 / (1 + step % 3))
    options["scheduler_interval"] = "step"
if "hook" in extras:
    given.register_step_post_hook(lambda *_: None)

data = TensorDataset(torch.randn(200, 6), torch.arange(200) % 3)


def loss(model, batch):
    loss = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return loss * 300.0 if "overflow" in extras else loss


def halve(model):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def bits(value):
    return value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def digest():
    """The digest of all that a step may change and the survivors must have as before."""
    sha = hashlib.sha256()
    for p in model.parameters():
        sha.update(bits(p))
    for optimizer in every:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            for key, value in sorted(optimizer.state.get(p, {}).items()):
                sha.update(key.encode() + (bits(value) if isinstance(value, torch.Tensor) else repr(value).encode()))
        for group in optimizer.param_groups:
            sha.update(repr([(k, v) for k, v in sorted(group.items()) if k != "params"]).encode())
    return sha.hexdigest()


def meet(what):
    """Wait for the other survivors; their barriers cannot be used any more."""
    (FOLDER / f"{what}{RANK}").touch()
    while not all((FOLDER / f"{what}{rank}").exists() for rank in {*range(SIZE)} - VICTIMS):
        time.sleep(0.002)


trainer = unisono.Trainer(model, given, engine="shared", progress=False, **options)
killer = Killer()
steps = 0
before = [digest()]


def arrive_at_first():
    """Arrive at a barrier for one of the other ranks only."""
    engine._runtime._barrier._outgoing[0].post()
    os.kill(os.getpid(), signal.SIGKILL)


def finish(plain_finish):
    if RANK in VICTIMS and steps == STEP and MOMENT == "gradients":
        engine._runtime._barrier.arrive = arrive_at_first
    return plain_finish()


def update(plain_update, scaler):
    if RANK in VICTIMS and steps == STEP and MOMENT == "weights":
        engine._runtime._barrier.arrive = arrive_at_first
    if RANK in VICTIMS and steps == STEP and MOMENT == "state":
        engine._protection.settle = partial(os.kill, os.getpid(), signal.SIGKILL)
    if RANK in VICTIMS and KIND != "arrival" and steps in (STEP - 1, STEP):
        if steps == STEP:
            killer.at = float(MOMENT) * killer.last if "." in MOMENT else int(MOMENT)
        killer.run(plain_update, scaler)
        if steps == STEP:
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        plain_update(scaler)


for engine in engines:
    engine.update, engine.finish = partial(update, engine.update), partial(finish, engine.finish)
error = None
try:
    for _ in trainer.epochs(9):
        for batch in trainer.batches(data, batch_size=20):
            trainer.step(loss, batch, **({"on_gradients": halve} if "change" in extras else {}))
            steps += 1
            if "zero" in extras:
                given.zero_grad(set_to_none=False)
            if "freeze" in extras and steps % 3 == 0:
                model.last.weight.requires_grad_(not model.last.weight.requires_grad)
            if "load" in extras and steps % 4 == 3:
                for optimizer in every:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            before.append(digest())
except (UnisonoError, RuntimeError) as raised:  # the latter from the group, through which descriptions of state go
    error = raised
assert error is not None
if RANK in VICTIMS:  # another victim was faster
    os.kill(os.getpid(), signal.SIGKILL)
meet("ended")
while not VICTIMS.issubset(engines[0]._runtime.dead()):  # one that still writes would spoil what is repaired
    time.sleep(0.002)
if "dies" in extras:
    first = min({*range(SIZE)} - VICTIMS)
    if first == RANK:
        killer.count, killer.at = 0, 9
        with killer:
            engines[0].repair(VICTIMS)
    assert engines[0].repair(VICTIMS)
    while first not in engines[0]._runtime.dead():
        time.sleep(0.002)
    VICTIMS.add(first)
results = [engine.repair(VICTIMS) for engine in engines]
repaired = all(results)
meet("repaired")
print(steps, repaired, digest() == before[steps], flush=True)
meet("compared")
os._exit(0)
