"""Trains, and dies at the places that it is told: `recovering.py JSON`. Each rank prints what it has come to.

A death is [rank, place, number, how]: the rank, or -1 for any; a name given to `at`, and the number there, or null for
the first time; and "SIGKILL", another signal, "all" for a SIGKILL of all ranks, "kill 2" for one of rank 2, "error",
"soon 0.5" for a SIGKILL after these seconds, or for no death "scale 4", a change to 4 ranks, which comes after the next
step, or "late 0.5", a sleep in seconds. Each happens once in a run, whatever process comes there.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, WeightedRandomSampler

import unisono
from unisono.engine import selection
from unisono.engine.buffer_transaction import BufferTransaction
from unisono.engine.consistency import GroupConsistencyCheck
from unisono.engine.shared.update_progress import UpdateProgress
from unisono.engine.shared.update_protection import UpdateProtection
from unisono.engine.staged import SharedParameterCopies, StagedEngine
from unisono.engine.staged.state_slots import StateSlots
from unisono.engine.tree_all_reduce import TreeAllReduce
from unisono.job import group_watch
from unisono.launch.control import ask, running_jobs
from unisono.launch.recovery_page import RankLink
from unisono.shm.process_group import ProcessGroupShm
from unisono.state.checkpoint_work import CheckpointWork
from unisono.state.digest import digest
from unisono.trainer import rank_meeting
from unisono.trainer.loop import Loop
from unisono.trainer.pipeline_gradients import PipelineGradients
from unisono.trainer.recoverable_run import RecoverableRun
from unisono.trainer.save_points import SavePoints
from unisono.trainer.stage_commits import StageCommits
from unisono.trainer.stage_gathering import StageGathering

ASKED = json.loads(sys.argv[1])
FOLDER = Path(ASKED["folder"])
RANK, PROCESS = int(os.environ.get("RANK", "0")), os.getpid()
(FOLDER / f"process.{RANK}").write_text(str(PROCESS))


def at(place, number=None):
    """Die here, if this is asked for and has not happened yet."""
    for i, (rank, name, when, how) in enumerate(ASKED.get("deaths", [])):
        if rank not in (RANK, -1) or name != place or when not in (number, None):
            continue
        try:
            (FOLDER / f"died{i}").touch(exist_ok=False)
        except FileExistsError:
            continue
        if how.startswith("late "):
            time.sleep(float(how.removeprefix("late ")))
            continue
        if how.startswith("soon "):
            threading.Thread(target=explode_later, args=(float(how.removeprefix("soon ")),), daemon=True).start()
            continue
        if how.startswith("scale "):
            scale(int(how.removeprefix("scale ")), FOLDER / f"asked{i}")
            continue
        # A change of size that was to come before is asked for. (In one that goes on, another may have to wait for it.)
        for j, event in enumerate(ASKED["deaths"][:i] if when is not None else ()):
            while event[3].startswith("scale ") and not (FOLDER / f"asked{j}").exists():
                time.sleep(0.005)
        if how.startswith("kill "):
            other = how.removeprefix("kill ")
            while not (FOLDER / f"armed.{other}").exists():  # before that, it cannot be replaced
                time.sleep(0.005)
            os.kill(int((FOLDER / f"process.{other}").read_text()), signal.SIGKILL)
            time.sleep(0.3)
            continue
        if how == "error":
            raise RuntimeError("a cosmic ray")
        if how == "all":
            for process in sorted(FOLDER.glob("process.*"), reverse=True):
                os.kill(int(process.read_text()), signal.SIGKILL)
        else:
            os.kill(PROCESS, getattr(signal, how))  # the rank, also from one of its data workers
        time.sleep(60)


def scale(ranks, asked):
    """Ask for another number of ranks, and hold this one until the others can come."""
    for agent in running_jobs():
        if (ask(agent, {"ask": "job"}) or {}).get("run_id") == os.environ["TORCHELASTIC_RUN_ID"]:
            answer = ask(agent, {"ask": "scale", "ranks": ranks})
            assert answer is not None and not answer["problem"], answer
            asked.touch()
            while ask(agent, {"ask": "scaling"})["state"] in ("ending", "starting"):
                time.sleep(0.005)


def surround(owner, name, number=lambda *_, **__: trainer.steps_done):
    """Make the beginning and the end of a function of ours places to die at: "before NAME" and "after NAME"."""
    function = getattr(owner, name)

    def surrounded(*args, **options):
        at(f"before {name}", number(*args, **options))
        result = function(*args, **options)
        at(f"after {name}", number(*args, **options))
        return result

    setattr(owner, name, surrounded)


class Noisy(Dataset):
    def __init__(self, length):
        self.x = torch.randn(length, 16, generator=torch.Generator().manual_seed(1))
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        at("read", index)
        return self.x[index] + 0.1 * torch.randn(16) + 0.01 * random.random(), self.y[index]


class Diary:
    """State of the loop: what it has seen, and drawn."""

    def __init__(self):
        self.count, self.total = 0, 0.0

    def add(self, value):
        self.count, self.total = self.count + 1, self.total + float(value) + torch.rand(()).item()

    def state_dict(self):
        return {"count": self.count, "total": self.total}

    def load_state_dict(self, state):
        self.count, self.total = state["count"], state["total"]


diary = Diary()


class Tied(nn.Module):
    """Layers of which the first and the last one have the same weights, so that two stages use them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)
        )
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.calls += 1
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)[:, :2]


def classifier():
    if "stages" in ASKED:
        return Tied()
    width = ASKED.get("width", 24)
    return nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 2))


def optimizer_of(model):
    if ASKED.get("optimizer") == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def first_of(batch):
    return batch["labelled"] if isinstance(batch, dict) else batch


def dying(value, name):
    """A value whose computation, and the backward pass to it, are places to die at."""
    at(name, trainer.steps_done)
    if "stages" not in ASKED and value.requires_grad:  # the value may be that of another stage
        value.register_hook(lambda _: at(f"backward of {name}", trainer.steps_done))
    return value


def loss(model, batch):
    x, y = first_of(batch)
    total = F.cross_entropy(dying(model(x), "loss"), y, reduction="none")
    if isinstance(batch, dict):
        more = model(batch["more"][0])
        return unisono.Sum(total.sum() + 0.1 * more.square().sum(), len(x))
    return total


def judge(models, batch):
    fake = models["generator"](torch.randn(len(batch[0]), 4)).detach()
    score = models["judge"]
    return dying(F.softplus(-score(batch[0])) + F.softplus(score(fake)), "judge").squeeze(1)


def forge(models, batch):
    fake = models["generator"](torch.randn(len(batch[0]), 4))
    return dying(F.softplus(-models["judge"](fake)), "forge").squeeze(1)


def accuracy(model, batch):
    at("evaluation", trainer.steps_done)
    x, y = first_of(batch)
    return (model(x).argmax(1) == y).float() + 0.001 * torch.randn(len(y), device=y.device)


def shape(models, batch):
    at("evaluation", trainer.steps_done)
    return models["generator"](torch.randn(len(batch[0]), 4)).mean(1)


def play(model):
    at("collect", trainer.steps_done)
    return float(torch.randn(()) + model(torch.randn(2, 16)).sum())


def make_group():
    """Begin the job with the backend that is asked for, if one is: otherwise the Trainer does."""
    if (backend := ASKED.get("backend")) is None:
        return
    if backend == "nccl" and torch.cuda.device_count() == 1:
        os.environ["NCCL_HOSTID"] = str(RANK)  # as on separate hosts, ranks may then share a GPU
    if backend == "unending":
        from unending_backend import register

        register()
        os.environ["UNENDING_FOLDER"] = str(FOLDER)
    unisono.init(backend, device=ASKED.get("device"))
    if ASKED.get("stuck") == RANK and torch.distributed.is_initialized():  # a new rank has no group yet
        torch.distributed.group.WORLD.hangs = True
        group_watch._ABORT_S = 0.2


def make_trainer():
    torch.manual_seed(0)
    common = {
        "virtual_ranks": 4 if "stages" in ASKED else 5,
        "engine": ASKED["engine"],
        "device": ASKED.get("device", "auto"),
        "directory": ASKED.get("directory"),
        "checkpoints": unisono.Checkpoints(every_steps=ASKED.get("every_steps", 5), keep=20),
        "stateful": {"diary": diary},
        "clip_grad_norm": ASKED.get("clip"),
        "ema_decay": 0.9,
        "autocast": ASKED.get("autocast"),
        "progress": False,
    }
    if "stages" in ASKED:
        common["parallel"] = unisono.parallel.Pipeline(stages=ASKED["stages"])
    if ASKED.get("kind") == "gan":
        models = {
            "generator": nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16)),
            "judge": nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.LeakyReLU(0.2), nn.Linear(16, 1)),
        }
        optimizers = {name: optimizer_of(m) for name, m in models.items()}
        return models, [*optimizers.values()], unisono.Trainer(models, optimizers, **common)
    model = classifier()
    optimizer = optimizer_of(model)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    if ASKED.get("kind") == "bare":
        common["scheduler_interval"] = "epoch"
    return {"": model}, [optimizer], unisono.Trainer(model, optimizer, scheduler=decay, **common)


def deal(data):
    kind, workers = ASKED.get("kind"), ASKED.get("workers", 0)
    if kind == "sampled":
        sampler = WeightedRandomSampler(torch.arange(1.0, len(data) + 1), 96)
        return trainer.batches(data, sampler=sampler, batch_size=24, workers=workers)
    if kind == "joined":
        datasets = {"labelled": data, "more": Noisy(40)}
        return trainer.batches(datasets, batch_size={"labelled": 32, "more": 16}, workers=workers)
    return trainer.batches(data, batch_size=32, workers=workers)


def train_bare(data, held_out):
    """Change a number after each step, and make no call between the last one of an epoch and the next epoch."""
    for _ in trainer.epochs(2):
        for batch in deal(data):
            diary.add(trainer.step(loss, batch))
            optimizers[0].param_groups[0]["weight_decay"] *= 0.9
    return float(trainer.evaluate(accuracy, held_out, name="final"))


def train(data, held_out):
    function = shape if ASKED.get("kind") == "gan" else accuracy
    at("begin")
    for epoch in trainer.epochs(ASKED.get("epochs", 2), max_steps=ASKED.get("max_steps")):
        at("epoch", epoch)
        for batch in deal(data):
            at("batch", trainer.steps_done)
            if ASKED.get("kind") == "gan":
                diary.add(trainer.step(judge, batch, optimizer="judge"))
                at("between", trainer.steps_done)
                value = trainer.step(forge, batch, optimizer="generator")
            else:
                value = trainer.step(loss, batch)
            at("stepped", trainer.steps_done)
            diary.add(value)
            if trainer.steps_done % 4 == 0:
                diary.add(trainer.evaluate(function, held_out))
            if ASKED.get("kind") == "sampled":
                diary.add(sum(trainer.collect(play)))
            at("body", trainer.steps_done)
            time.sleep(ASKED.get("pause_s", 0))
        diary.add(trainer.evaluate(function, held_out, name="averaged", ema=True))
        at("end", epoch)
    at("over")
    return float(trainer.evaluate(function, held_out, name="final"))


def fit(data, held_out):
    def on_step(_trainer, result):
        diary.add(result)
        at("stepped", trainer.steps_done)

    results = trainer.fit(
        loss,
        data,
        batch_size=32,
        epochs=2,
        validation=held_out,
        metrics={"accuracy": accuracy},
        validate_every=3,
        on_step=on_step,
        on_epoch=lambda _trainer, result: at("end", result.epoch),
    )
    at("over")
    return [str(result) for result in results]


def explode_later(delay_s):
    time.sleep(delay_s)
    os.kill(PROCESS, signal.SIGKILL)


def light_fuses():
    """Let this rank die at a moment: [rank, seconds, True in a process that takes the place of another]."""
    for i, (rank, delay_s, recovered) in enumerate(ASKED.get("fuses", [])):
        mark = FOLDER / f"fuse{i}"
        if rank == RANK and recovered == trainer.recovered and not mark.exists():
            mark.touch()
            threading.Thread(target=explode_later, args=(delay_s,), daemon=True).start()


class ComparedGroup:
    """A process group whose sends are places to die at."""

    def __init__(self, group):
        self.group = group

    def __getattr__(self, name):
        return getattr(self.group, name)

    def send(self, tensors, peer, tag):
        at("before number", [trainer.steps_done if "trainer" in globals() else None, peer])
        return self.group.send(tensors, peer, tag)


def compare_by(check, world, tag=None, init=GroupConsistencyCheck.__init__):
    init(check, world, tag)
    check._group = ComparedGroup(check._group)


surround(RankLink, "arm", number=lambda *_, **__: 0)
GroupConsistencyCheck.__init__ = compare_by
if ASKED.get("apart"):  # as on hosts of their own
    selection.host_id = lambda **_: str(RANK)
make_group()
models, optimizers, trainer = make_trainer()
(FOLDER / f"armed.{RANK}").touch()
for stage in ("repair", "connect", "send_state", "has_joined"):
    surround(RecoverableRun, stage)
surround(rank_meeting, "rejoin")
for stage in ("launch", "advance", "finish"):
    surround(TreeAllReduce, stage)
surround(ProcessGroupShm, "send", number=lambda _, sent, to, __: [trainer.steps_done, to, sent[0].numel()])
surround(BufferTransaction, "_agree")
surround(Loop, "_tell_epoch")
surround(SavePoints, "release")
surround(CheckpointWork, "_rename_durably", lambda work: int(work._final.name.removeprefix("step-")))
for moment in ("begin", "end", "settle", "commit"):
    surround(UpdateProtection, moment)
for moment in ("begin_forward", "begin_backward", "end_backward"):
    surround(PipelineGradients, moment)
for moment in ("update", "_unscale"):
    surround(StagedEngine, moment)
surround(SharedParameterCopies, "send")
surround(StageCommits, "commit")
surround(StateSlots, "write")
surround(UpdateProgress, "end")
surround(StageGathering, "gather")
light_fuses()
with unisono.main_first():  # as for files that rank 0 downloads
    at("turn")
    # To a model that is cut, each number of samples of a virtual rank is another path.
    data, test = Noisy(160), Noisy(64 if "stages" in ASKED else 60)
came_to = {"fit": fit, "bare": train_bare}.get(ASKED.get("kind"), train)(data, test)
weights = digest({name: dict(model.state_dict()) for name, model in models.items()})
rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
print(trainer.digest(), weights, came_to, diary.state_dict(), rates, flush=True)
if trainer.recovered:
    (FOLDER / f"recovered.{RANK}").touch()
