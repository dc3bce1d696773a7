"""The shared-memory engine: what is shared, what is refused, and what happens when a rank fails."""

from __future__ import annotations

import ast

import pytest

PREAMBLE = """
import os, signal, sys, time
from functools import partial
from pathlib import Path
import torch, unisono
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from unisono.errors import LossError, NonFiniteLossError, UnisonoError

R = int(os.environ["RANK"])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
data = TensorDataset(torch.randn(60, 6), torch.arange(60) % 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

def make_trainer(**options):
    return unisono.Trainer(model, optimizer, **{"virtual_ranks": 4, "engine": "shared", "progress": False, **options})

def say(*values):
    print(*values, flush=True)
"""


@pytest.fixture
def run_alone(rank_host, tmp_path):
    """Run a script on N ranks that nobody watches over: no launcher ends the others when one fails."""

    def run(n: int, script: str, *, codes: dict[int, int] | None = None) -> list[str]:
        (tmp_path / "meet").unlink(missing_ok=True)
        start = f'dist.init_process_group("gloo", init_method="file://{tmp_path}/meet", rank=R, world_size={n})'
        (tmp_path / "script.py").write_text(f"{PREAMBLE}\n{start}\n{script}")
        ends, _ = rank_host.run(n, tmp_path / "script.py", folder=tmp_path, watched=False)
        said = [(tmp_path / f"out{r}").read_text() for r in range(n)]
        for r, code in enumerate(ends):
            error = (tmp_path / f"err{r}").read_text()
            assert code == (codes or {}).get(r, 0), f"rank {r}: {code}\n{said[r]}\n{error[-4000:]}"
        return said

    return run


def test_there_is_one_copy_and_all_see_it(run_alone):
    said = run_alone(
        3,
        """
trainer = make_trainer(clip_grad_norm=0.5)
for batch in trainer.batches(data, batch_size=12):
    trainer.step(loss, batch)
dist.barrier()
maps = Path("/proc/self/maps").read_text()
say([maps.count(f"memfd:unisono {what}") > 0 for what in ("weights", "gradients", "optimizer state")])
gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
state = optimizer.state_dict()["state"]
say(f"{gradient.norm():.4f}", optimizer.state[model[0].weight]["exp_avg"].shape, state[3]["step"])
say(trainer.digest())
dist.barrier()
if R == 1:
    with torch.no_grad():
        model[0].weight[3, 4] = 77
        optimizer.state[model[0].bias]["exp_avg"][2] = 78
dist.barrier()
say(model[0].weight[3, 4].item(), optimizer.state[model[0].bias]["exp_avg"][2].item())
""",
    )
    assert said[0] == said[1] == said[2]
    assert "[True, True, True]\n0.5000 torch.Size([8, 6]) tensor(5.)" in said[0]
    assert said[0].endswith("77.0 78.0\n")


def test_a_saved_state_holds_no_more_than_it_names(run_alone):
    """torch.save writes the whole storage under a tensor, so each has one of its own."""
    run_alone(
        2,
        """
import io
trainer = make_trainer()
trainer.step(loss, next(trainer.batches(data, batch_size=12)))
for state in (model[2].state_dict(), optimizer.state[model[2].bias]):
    for value in state.values():
        assert value.untyped_storage().nbytes() <= 256
torch.save(model, io.BytesIO())
""",
    )


def test_one_rank_may_load_other_weights_after_training_without_the_others(run_alone):
    said = run_alone(
        2,
        """
trainer = make_trainer()
for batch in trainer.batches(data, batch_size=12):
    trainer.step(loss, batch)
trained = trainer.digest()
dist.barrier()
if R == 1:
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    assert not any(p.any() for p in model.parameters())
dist.barrier()
say(trainer.digest() == trained)
""",
    )
    assert said == ["True\n", "False\n"]


@pytest.mark.parametrize(
    ("write", "name"),
    [
        ("with torch.no_grad(): model[2].weight.mul_(0.9)", "2.weight"),
        ("model[0].bias.data.mul_(0.9)", "0.bias"),
        ("if R == 0: model[0].weight.data.zero_()", "0.weight"),
    ],
)
def test_a_write_between_steps_is_an_error_that_names_the_parameter(run_alone, write, name):
    said = run_alone(
        2,
        f"""
trainer = make_trainer()
for batch in trainer.batches(data, batch_size=12):
    dist.barrier()
    if batch.step == 2:
        {write}
    dist.barrier()
    try:
        trainer.step(loss, batch)
    except UnisonoError as error:
        say(batch.step, error)
        break
dist.barrier()
""",
    )
    for text in said:
        assert text.startswith(f"2 parameter {name!r} was written to between two steps")
        assert 'engine="collective"' in text


def test_a_write_between_steps_is_a_ranks_own_affair_with_copies(run_alone):
    said = run_alone(
        2,
        """
trainer = make_trainer(engine="collective")
for batch in trainer.batches(data, batch_size=12):
    with torch.no_grad():
        model[2].weight.mul_(0.9)
    trainer.step(loss, batch)
say(trainer.digest())
""",
    )
    assert said[0] == said[1]


def test_shared_is_refused_where_it_cannot_serve_and_auto_does_without(run_alone):
    said = run_alone(
        2,
        """
import unisono.engine.choose
unisono.engine.choose._host = lambda: f"host {R}"
try:
    make_trainer()
except ValueError as error:
    say(error)
trainer = make_trainer(engine="auto")
for batch in trainer.batches(data, batch_size=12):
    trainer.step(loss, batch)
say("memfd" in Path("/proc/self/maps").read_text())
""",
    )
    for text in said:
        assert text.startswith('engine="shared" cannot serve here: the 2 ranks are on 2 hosts.')
        assert text.endswith("False\n")


def test_an_optimizer_that_is_not_torchs_is_not_divided_unless_that_is_asked_for(run_alone):
    # This one scales its steps by a number that it computes from all parameters.
    script = """
class Scaled(torch.optim.SGD):
    def step(self, closure=None):
        norm = sum(float(p.grad.square().sum()) for group in self.param_groups for p in group["params"]) ** 0.5
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + norm)
        return super().step(closure)

optimizer = Scaled(model.parameters(), lr=0.1)
trainer = make_trainer(engine="auto")
for batch in trainer.batches(data, batch_size=12):
    trainer.step(loss, batch)
say(trainer.digest())
"""
    assert len({*run_alone(2, script), *run_alone(1, script)}) == 1


def test_a_loss_or_gradient_that_is_not_finite_leaves_the_shared_weights_alone(run_alone):
    said = run_alone(
        3,
        """
trainer = make_trainer(clip_grad_norm=1.0)
batches = trainer.batches(data, batch_size=12)
trainer.step(loss, next(batches))
before = trainer.digest()
batch = next(batches)
bad = [
    lambda m, b: loss(m, b) * (torch.nan if R == 1 else 1),
    lambda m, b: (m(b[0]) * 0).sum(1).sqrt() if R == 1 else loss(m, b),
    lambda m, b: (loss(m, b).sum(), 0),
]
for function in bad:
    try:
        trainer.step(function, batch)
    except LossError as error:
        say(str(error)[:40], trainer.digest() == before, all(p.grad is None for p in model.parameters()))
    dist.barrier()
trainer.step(loss, batch)
say(trainer.digest() != before, trainer.digest())
""",
    )
    assert said[0] == said[1] == said[2]
    assert said[0].count("True True") == 3
    assert "norm of the gradient" in said[0]


LARGE = """
class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 900), nn.Linear(900, 3)
        self.turned = nn.Parameter((torch.randn(500, 900) / 30).t())
        self.empty, self.unused, self.seldom = (nn.Parameter(torch.zeros(n)) for n in (0, 7, 3))

    def forward(self, x):
        y = self.last(torch.tanh(torch.tanh(self.first(x)) @ self.turned) @ self.turned.t()) + self.empty.sum()
        return y + self.seldom if x[0, 0] > 0.5 else y

model = Large()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
"""


def test_the_bits_are_the_same_where_ranks_share_rows_of_large_gradients(run_alone):
    script = f"""
{LARGE}
trainer = make_trainer(virtual_ranks=7, engine="auto")
for batch in trainer.batches(data, batch_size=14):  # the last one is of four samples
    trainer.step(loss, batch)
say(trainer.digest(), model.unused.grad is None, model.turned.grad.norm().item() > 0)
"""
    alone = run_alone(1, script)
    assert alone[0].endswith(" True True\n")
    assert set(run_alone(3, script)) == set(alone)


def test_parameters_without_elements_have_their_state(run_alone):
    """Wherever they lie: before and behind the others, and where the parts of two ranks meet."""
    script = """
class Empty(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.only = nn.Parameter(torch.zeros(0, 4)), nn.Linear(6, 3, bias=False)
        self.middle, self.other = nn.Parameter(torch.zeros(0)), nn.Linear(6, 3, bias=False)
        self.last = nn.Parameter(torch.zeros(2, 0))

    def forward(self, x):
        return self.only(x) + self.other(x) + self.first.sum() + self.middle.sum() + self.last.sum()

model = Empty()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
trainer = make_trainer(engine="auto", clip_grad_norm=0.5)
for batch in trainer.batches(data, batch_size=12):
    trainer.step(loss, batch)
say(trainer.digest(), [tuple(optimizer.state[p]["exp_avg"].shape) for p in model.parameters()])
"""
    alone = run_alone(1, script)
    assert alone[0].endswith(" [(0, 4), (0,), (2, 0), (3, 6), (3, 6)]\n")
    assert set(run_alone(3, script)) == set(alone)


def test_a_rank_may_have_nothing_to_update(run_alone):
    said = run_alone(
        2,
        """
model[0].requires_grad_(False)
model[2].bias.requires_grad_(False)
optimizer = torch.optim.Adafactor(model.parameters())
trainer = make_trainer(virtual_ranks=2)
for batch in trainer.batches(data, batch_size=12):
    trainer.step(loss, batch)
say(trainer.digest(), optimizer.state[model[2].weight]["step"].item())
""",
    )
    assert said[0] == said[1]
    assert said[0].endswith(" 5.0\n")


def test_a_rank_that_dies_while_it_writes_what_two_ranks_share_is_named(run_alone):
    said = run_alone(
        4,
        f"""
{LARGE}
from unisono.engine.shared import pairs
def dies(do, *args):
    if trainer.steps == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    do(*args)
if R == 2:  # which may come first or second
    pairs._write, pairs._add = partial(dies, pairs._write), partial(dies, pairs._add)
trainer = make_trainer()
try:
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(loss, batch)
except UnisonoError as error:
    say(trainer.steps, error)
os._exit(0)  # gloo would wait for the dead
""",
        codes={2: -9},
    )
    for rank in (0, 1, 3):
        assert said[rank].startswith("2 ")
        assert "the process of rank 2 has ended" in said[rank]


def test_a_rank_that_dies_in_mid_step_is_named_by_the_others_and_nothing_is_left(run_alone):
    said = run_alone(
        3,
        """
trainer = make_trainer()
def dies(model, batch):
    if R == 1 and trainer.steps == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return loss(model, batch)
try:
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(dies, batch)
except UnisonoError as error:
    say(trainer.steps, error)
say([line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line])
os._exit(0)  # gloo would wait for the dead
""",
        codes={1: -9},
    )
    for rank in (0, 2):
        assert said[rank].startswith("3 ")
        assert "the process of rank 1 has ended" in said[rank]
        assert said[rank].splitlines()[-1] == "[]"  # nothing that they share has a name that could be left


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_the_loop_and_step_hooks_draw_the_same_on_every_rank_and_number_of_ranks(run_alone, name):
    """Generators are set for the loop at a time that depends on who waits for whom; never after they may be used."""
    script = f"""
import random, time
import numpy as np
model = nn.Sequential(nn.Linear(6, 16, bias=False), nn.Dropout(0.3), nn.Linear(16, 3, bias=False))
optimizer = torch.optim.{name}(model.parameters(), lr=0.01)
def draw(*_):
    drawn.append((torch.rand(()).item(), random.random(), float(np.random.rand())))
def late(model, batch):
    time.sleep(0.002 * ((trainer.steps + R) % 2))  # ranks wait for each other in turn
    return loss(model, batch)
trainer, drawn = make_trainer(engine="auto"), []
for epoch in trainer.epochs(4):
    if epoch == 2:
        optimizer.register_step_pre_hook(draw)
        optimizer.register_step_post_hook(draw)
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(late, batch)
        draw()
say(drawn, trainer.digest())
"""
    (alone,) = run_alone(1, script)
    assert len(set(ast.literal_eval(alone.rsplit(" ", 1)[0]))) > 10
    assert run_alone(2, script) == [alone] * 2


def test_a_rank_that_fails_in_the_update_makes_the_others_raise(run_alone):
    said = run_alone(
        3,
        """
trainer = make_trainer()
trainer.step(loss, next(trainer.batches(data, batch_size=12)))
if R == 1:
    optimizer.register_step_pre_hook(lambda *_: 1 / 0)
else:
    optimizer.register_step_pre_hook(lambda *_: None)
batch = next(trainer.batches(data, batch_size=12))
try:
    trainer.step(loss, batch)
except (UnisonoError, ZeroDivisionError) as error:
    say(type(error).__name__, error)
try:
    trainer.step(loss, batch)
except UnisonoError as error:
    say(error)
os._exit(0)
""",
    )
    assert said[1].startswith("ZeroDivisionError")
    for rank in (0, 2):
        assert said[rank].startswith("UnisonoError")
        assert "rank 1 failed while weights were written: ZeroDivisionError" in said[rank]
    assert all("an earlier step broke off" in text for text in said)


def test_a_step_that_one_rank_alone_gives_up_is_noticed(run_alone):
    said = run_alone(
        2,
        """
trainer = make_trainer()
def fails(model, batch):
    if R == 1 and trainer.steps == 2:
        raise KeyError("mine")
    return loss(model, batch)
for batch in trainer.batches(data, batch_size=12):
    try:
        trainer.step(fails, batch)
    except KeyError:
        trainer.step(loss, batch)  # the other rank is still at the step before
    except UnisonoError as error:
        say(error)
        break
os._exit(0)
""".replace(
            "        trainer.step(loss, batch)  #",
            "        try: trainer.step(loss, batch)\n        except UnisonoError as e: say(e); break  #",
        ),
    )
    for text in said:
        assert "ranks are at different steps: [3, 4]" in text


def test_ctrl_c_at_a_barrier_comes_after_the_step(run_alone, tmp_path):
    said = run_alone(
        2,
        f"""
from unisono.engine.shared import Hall
flag, wait = Path("{tmp_path}/waits"), Hall.wait
def tell(self, gate, *args):
    if R == 0 and trainer.steps == 2 and gate is self._barrier:
        flag.touch()
    return wait(self, gate, *args)
Hall.wait = tell
pids = [None, None]
dist.all_gather_object(pids, os.getpid())
trainer = make_trainer()
def interrupts(model, batch):
    if R == 1 and trainer.steps == 2 and pids:
        while not flag.exists():
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(pids[0], signal.SIGINT)
        pids.clear()
        time.sleep(0.1)
    return loss(model, batch)
try:
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(interrupts, batch)
        if trainer.steps == 3:
            break
except KeyboardInterrupt:
    say("interrupted")
say(trainer.steps, trainer.digest())
os._exit(0)
""",
    )
    assert said[0] == "interrupted\n" + said[1]
    assert said[1].startswith("3 ")


def test_several_trainers_one_after_the_other_share_a_model(run_alone):
    """Each moves the weights to memory of its own; going back to the first moves them again."""
    said = run_alone(
        2,
        """
first, second = make_trainer(), make_trainer(seed=5)
for trainer in (first, second, first):
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(loss, batch)
say(first.digest())
""",
    )
    assert said[0] == said[1]


def test_state_that_cannot_be_shared_is_refused_by_name(run_alone):
    said = run_alone(
        2,
        """
class Odd(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["history"] = [1, 2]
optimizer = Odd(model.parameters(), lr=0.1)
trainer = make_trainer()
try:
    trainer.step(loss, next(trainer.batches(data, batch_size=12)))
except UnisonoError as error:
    say(error)
os._exit(0)
""",
    )
    assert any("state 'history' of parameter" in text and 'engine="collective"' in text for text in said)
