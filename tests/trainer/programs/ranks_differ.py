"""Rank 1 does something else than the others, in many ways; each rank prints what it is told.

Arguments: "start", or an engine, "large" for a model whose gradients travel during backward, and "hosts" to compare by
messages, as ranks of several hosts do.
"""

import os
import sys
from contextlib import suppress

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR
from torch.utils.data import TensorDataset

import unisono
from unisono.engine import selection
from unisono.errors import RankMismatchError

RANK = int(os.environ["RANK"])
FOLDER = sys.argv[2]
data = TensorDataset(torch.arange(1800.0).view(300, 6).sin(), torch.arange(300) % 3)  # one epoch is enough


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, width), nn.BatchNorm1d(width), nn.Linear(width, 3)
        self.table = nn.Embedding(5, 4)
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("offset", torch.zeros(2))

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x)))) + self.table.weight.sum()


def say(name, error):
    print(f"{name} -> {type(error).__name__}: {error}", flush=True)


# --- What the Trainer is given ---

STARTS = {}


def start(function):
    STARTS[function.__name__] = function
    return function


def argument(name, value):
    STARTS[f"argument {name}"] = lambda given: given.update({name: value})


for name, value in {
    "seed": 1,
    "virtual_ranks": 8,
    "directory": f"{FOLDER}/run",
    "clip_grad_norm": 1.0,
    "autocast": "bf16",
    "ema_decay": 0.9,
    "engine": "collective",
    "overlap": False,
    "threads": 2,
    "scheduler_interval": "epoch",
    "checkpoints": unisono.Checkpoints(keep=7),
    "resume": "never",
    "stateful": {"counter": nn.Linear(1, 1)},
}.items():
    argument(name, value)


@start
def another_directory(given):
    given["directory"] = f"{FOLDER}/rank{RANK}"


@start
def another_division(given):
    given["parallel"] = unisono.parallel.Shard(by="size" if RANK else "block")


@start
def another_place_of_sums(given):
    given["parallel"] = unisono.parallel.Shard(sums="divided" if RANK else "whole")


@start
def another_learning_rate(given):
    given["optimizer"].param_groups[0]["lr"] = 0.02


@start
def another_optimizer(given):
    given["optimizer"] = torch.optim.SGD(given["model"].parameters(), lr=0.01)


@start
def another_order(given):
    given["optimizer"] = torch.optim.AdamW(reversed(list(given["model"].parameters())), lr=0.01)


@start
def fewer_parameters(given):
    given["optimizer"] = torch.optim.AdamW(given["model"].first.parameters(), lr=0.01)


@start
def more_groups(given):
    first, *others = given["model"].parameters()
    given["optimizer"] = torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=0.01)


@start
def state_of_the_optimizer(given):
    given["model"](data.tensors[0]).sum().backward()
    given["optimizer"].step()
    given["model"].load_state_dict(make_model().state_dict())


@start
def another_scheduler(given):
    given["scheduler"] = ExponentialLR(given["optimizer"], 0.5)


@start
def another_step_size(given):
    given["scheduler"] = StepLR(given["optimizer"], 3)


@start
def frozen_parameter(given):
    given["model"].first.bias.requires_grad_(False)


@start
def frozen_norm(given):
    given["model"].norm.eval()


@start
def another_momentum(given):
    given["model"].norm.momentum = 0.5


@start
def another_padding(given):
    given["model"].table.padding_idx = 2


@start
def another_dtype(given):
    given["model"].last.double()


@start
def other_strides(given):
    weight = given["model"].first.weight
    weight.data = weight.data.t().contiguous().t()


@start
def sparse_table(given):
    given["model"].table.sparse = True


@start
def another_width(given):
    given["model"] = Model(9)
    given["optimizer"] = torch.optim.AdamW(given["model"].parameters(), lr=0.01)


@start
def another_weight(given):
    with torch.no_grad():
        given["model"].first.weight[0, 0] += 1


@start
def another_hidden_buffer(given):
    given["model"].hidden += 1


@start
def several_models(given):
    given["model"] = {"net": given["model"]}


@start
def another_default_dtype(given):
    torch.set_default_dtype(torch.float64)


def make_model():
    torch.manual_seed(0)
    return Model()


def try_starts():
    for name, change in STARTS.items():
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        given = {"model": model, "optimizer": optimizer, "virtual_ranks": 4, "progress": False}
        if "scheduler" in name or "step_size" in name:
            given["scheduler"] = StepLR(optimizer, 2)
        if name in ("another_directory", "another_division", "another_place_of_sums") or RANK == 1:
            change(given)
        try:
            unisono.Trainer(**given)
        except RankMismatchError as error:
            say(name, error)
        torch.set_default_dtype(torch.float32)


# --- What the loop does ---


class Run:
    """A training run with two optimizers, whose steps rank 1 disturbs."""

    def __init__(self, engine, *, width):
        torch.manual_seed(0)
        self.model, self.judge = Model(width), nn.Linear(6, 1)
        self.optimizers = {
            "net": torch.optim.AdamW(self.model.parameters(), lr=0.01),
            "judge": torch.optim.SGD([self.judge.weight], lr=torch.tensor(0.1), momentum=0.5),
        }
        models = {"net": self.model, "judge": self.judge}
        self.trainer = unisono.Trainer(models, self.optimizers, virtual_ranks=4, engine=engine, progress=False)
        self.batches = self.trainer.batches(data, batch_size=8)

    def loss(self, models, batch):
        return cross_entropy(models["net"], batch)

    def penalty(self, models, batch):
        return models["judge"](batch[0]).square().flatten()

    def step(self, name="net", batch=None):
        batch = next(self.batches) if batch is None else batch
        self.trainer.step(self.loss if name == "net" else self.penalty, batch, optimizer=name)

    @property
    def groups(self):
        return self.optimizers["net"].param_groups


CHANGES = {}


def change(*, optimizer="net"):
    """Note a change, which returns what undoes it. Args: the optimizer whose step comes next."""

    def note(function):
        CHANGES[function.__name__] = optimizer, function

    return note


def put(group, key, value):
    before, group[key] = group[key], value
    return lambda: group.update({key: before})


@change()
def learning_rate(run):
    return put(run.groups[0], "lr", 0.005)


@change(optimizer="judge")
def learning_rate_in_a_tensor(run):
    lr = run.optimizers["judge"].param_groups[0]["lr"]
    lr.mul_(0.5)
    return lambda: lr.mul_(2.0)


@change()
def plateau(run):
    undo = put(run.groups[0], "lr", 0.01)
    scheduler = ReduceLROnPlateau(run.optimizers["net"], factor=0.5, patience=0)
    scheduler.step(1.0)
    scheduler.step(2.0)
    return undo


@change()
def betas(run):
    return put(run.groups[0], "betas", (0.8, 0.9))


@change()
def frozen(run):
    run.model.first.weight.requires_grad_(False)
    return lambda: run.model.first.weight.requires_grad_(True)


@change()
def most_frozen(run):
    run.model.requires_grad_(False).last.bias.requires_grad_(True)
    return lambda: run.model.requires_grad_(True)


@change(optimizer="judge")
def added_group(run):
    groups = run.optimizers["judge"].param_groups
    run.optimizers["judge"].add_param_group({"params": [run.judge.bias], "lr": 0.2})
    return groups.pop


@change()
def norm_in_evaluation(run):
    run.model.norm.eval()
    return run.model.norm.train


@change()
def momentum(run):
    return put(vars(run.model.norm), "momentum", 0.5)


@change()
def running_mean(run):
    mean = run.model.norm.running_mean
    before = mean.clone()
    mean.add_(1.0)
    return lambda: mean.copy_(before)


@change()
def buffer_with_a_nan(run):
    run.model.offset[1] = torch.nan
    return lambda: run.model.offset.fill_(0.0)


@change()
def model_in_evaluation(run):
    run.model.eval()
    return run.model.train


def try_changes(engine, *, width):
    run = Run(engine, width=width)
    trainer = run.trainer
    batch = next(run.batches)
    run.model.requires_grad_(RANK != 1).last.requires_grad_(True)
    try:
        run.step("net", batch)
    except RankMismatchError as error:
        say("frozen before the first step", error)
    run.model.requires_grad_(True)
    run.step()
    run.step("judge")
    for name, (optimizer, do) in CHANGES.items():
        batch, before = next(run.batches), (trainer.digest(), trainer.steps_done)
        undo = do(run) if RANK == 1 else None
        try:
            run.step(optimizer, batch)
        except RankMismatchError as error:
            say(name, error)
        if undo is not None:
            undo()
        assert (trainer.digest(), trainer.steps_done) == before, name
        if name == "frozen":
            run.step()  # and it goes on
        if name == "running_mean":  # what all ranks write is no difference
            run.model.norm.running_mean.mul_(0.5)
            run.step()

    def evaluate(name="evaluation"):
        return trainer.evaluate(run.loss, data, name=name)

    calls = {
        "another optimizer": [lambda b: run.step("net", b), lambda b: run.step("judge", b)],
        "evaluation": [lambda b: run.step("net", b), lambda _: evaluate()],
        "evaluation by the others": [lambda _: evaluate(), lambda b: run.step("net", b)],
        "another evaluation": [lambda _: evaluate("a"), lambda _: evaluate("b")],
        "batches": [
            lambda b: run.step("net", b),
            lambda _: trainer.batches(TensorDataset(torch.ones(9)), batch_size=4),
        ],
    }
    for name, (most, one) in calls.items():
        batch = next(run.batches)
        try:
            (one if RANK == 1 else most)(batch)
        except RankMismatchError as error:
            say(name, error)
    run.step()
    evaluate()
    run.step("judge")
    if RANK == 1:  # a hook on one rank is no difference
        hook = run.optimizers["net"].register_step_pre_hook(lambda *_: None)
    run.step()
    run.step()
    if RANK == 1:
        hook.remove()
    # Equal weights on one rank make no difference where each has its own, but one copy for all cannot move so.
    loaded = {name: value.clone() for name, value in run.model.state_dict().items()}
    batch = next(run.batches)
    if RANK == 1:
        run.model.load_state_dict(loaded)
    try:
        run.step("net", batch)
    except RankMismatchError as error:
        say("load_state_dict", error)
        if RANK != 1:
            run.model.load_state_dict(loaded)
        run.step("net", batch)
    if engine == "collective":
        write_weights(run)
    print("weights sha256:", trainer.digest(), flush=True)

    batch = next(run.batches)
    if RANK == 1:
        if engine == "collective":  # begun, and given up
            with suppress(ZeroDivisionError):
                trainer.step(lambda *_: 1 / 0, batch, optimizer="net")
        batch = next(run.batches)
    try:
        run.step("net", batch)
    except RankMismatchError as error:
        say("a batch left out", error)


@torch.no_grad()
def write_weights(run):
    """Where each rank has weights of its own, what one of them alone writes is found, and what all write is none."""
    weight = run.model.last.weight
    middle = tuple(size // 2 for size in weight.shape)
    writes = {
        "a weight": lambda: weight.view(-1)[1:2].add_(1.0),
        "a weight by its data": lambda: weight.data[middle].add_(1.0),
        "all that is loaded": lambda: run.model.load_state_dict({k: v + 1 for k, v in run.model.state_dict().items()}),
    }
    for name, write in writes.items():
        before, batch = {k: v.clone() for k, v in run.model.state_dict().items()}, next(run.batches)
        for writers in ([1], [0, 1, 2]):
            if RANK in writers:
                write()
            try:
                with torch.enable_grad():
                    run.step("net", batch)
            except RankMismatchError as error:
                say(name, error)
                run.model.load_state_dict(before)


if __name__ == "__main__":
    if "hosts" in sys.argv:
        selection.host_id = lambda **_: str(RANK)
    if sys.argv[1] == "start":
        try_starts()
    else:
        try_changes(sys.argv[1], width=9000 if "large" in sys.argv else 8)
