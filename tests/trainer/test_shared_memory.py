"""The shared-memory engine: what is shared, and what is refused."""

from __future__ import annotations

import ast

import pytest


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


CONNECTS = """
import os, resource, sys, torch, torch.distributed as dist, unisono
if "gloo" in sys.argv:
    os.environ["UNISONO_CPU_BACKEND"] = "gloo"
if "limit" in sys.argv and os.environ["RANK"] == "1":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
model = torch.nn.Linear(4, 3)
trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.5), virtual_ranks=4, progress=False)
print(dist.get_backend())
"""


def test_ranks_of_one_host_send_through_shared_memory_unless_it_is_to_be_gloo(fork_ranks):
    assert fork_ranks(2, CONNECTS).out == "[0] shm\n[1] shm\n"
    assert fork_ranks(2, CONNECTS, "gloo").out == "[0] gloo\n[1] gloo\n"
    assert fork_ranks(2, CONNECTS, "limit").out == "[0] gloo\n[1] gloo\n"  # ulimit -f counts shared memory


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


@pytest.mark.parametrize("other", ["model[0].weight.requires_grad_(False)", "name = None", "name = 'late'"])
def test_so_is_one_before_a_step_that_trains_other_parameters(run_alone, other):
    said = run_alone(
        2,
        f"""
optimizer = {{name: torch.optim.SGD(model[i].parameters(), lr=0.1) for name, i in (("early", 0), ("late", 2))}}
trainer, name = make_trainer(), "early"
for batch in trainer.batches(data, batch_size=12):
    dist.barrier()
    if batch.step == 2:
        model[0].bias.data.mul_(0.9)
        {other}
    dist.barrier()
    try:
        trainer.step(loss, batch, optimizer=name)
    except UnisonoError as error:
        say(batch.step, error)
        break
dist.barrier()
""",
    )
    assert all(text.startswith("2 parameter '0.bias' was written to between two steps") for text in said)


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
import socket
read_text = Path.read_text
def masked(path, *args, **kwargs):
    if path.name == "boot_id":  # some containers hide it
        raise PermissionError(path)
    return read_text(path, *args, **kwargs)
Path.read_text = masked
socket.gethostname = lambda: f"host{R}"
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


def test_the_bits_are_the_same_where_ranks_share_rows_of_large_gradients(run_alone, large_model):
    script = f"""
{large_model}
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
    time.sleep(0.002 * ((trainer.steps_done + R) % 2))  # ranks wait for each other in turn
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
