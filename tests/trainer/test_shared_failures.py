"""The shared-memory engine: what happens when a rank fails, dies or is interrupted, or a step cannot be taken."""

from __future__ import annotations

import re

import pytest


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
    lambda m, b: unisono.Sum(loss(m, b).sum(), 0),
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


def test_a_rank_that_dies_while_it_writes_what_two_ranks_share_is_named(run_alone, large_model):
    said = run_alone(
        4,
        f"""
{large_model}
from unisono.engine.shared import paired_rows
def dies(do, *args):
    if trainer.steps_done == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    do(*args)
if R == 2:  # which may come first or second
    paired_rows._write, paired_rows._add = partial(dies, paired_rows._write), partial(dies, paired_rows._add)
trainer = make_trainer()
try:
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(loss, batch)
except UnisonoError as error:
    say(trainer.steps_done, error)
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
    if R == 1 and trainer.steps_done == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return loss(model, batch)
try:
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(dies, batch)
except UnisonoError as error:
    say(trainer.steps_done, error)
say([line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line])
os._exit(0)  # gloo would wait for the dead
""",
        codes={1: -9},
    )
    for rank in (0, 2):
        assert said[rank].startswith("3 ")
        assert "the process of rank 1 has ended" in said[rank]
        assert said[rank].splitlines()[-1] == "[]"  # nothing that they share has a name that could be left


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
        assert said[rank].startswith("PeerError")
        assert "rank 1 failed while weights were written: ZeroDivisionError" in said[rank]
    assert all("an earlier step broke off" in text for text in said)


def test_a_step_that_one_rank_alone_gives_up_is_noticed(run_alone):
    said = run_alone(
        2,
        """
trainer = make_trainer()
def fails(model, batch):
    if R == 1 and trainer.steps_done == 2:
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
        assert "ranks are at different steps: they have begun [4, 5] calls" in text


def test_ctrl_c_at_a_barrier_comes_after_the_step(run_alone, tmp_path):
    said = run_alone(
        2,
        f"""
from unisono.activity import observers
flag = Path("{tmp_path}/waits")
def tell(wait):
    if R == 0 and trainer.steps_done == 2 and wait.name == "Trainer.step":
        flag.touch()
    return lambda failed: None
observers.append(tell)
pids = [None, None]
dist.all_gather_object(pids, os.getpid())
trainer = make_trainer()
def interrupts(model, batch):
    if R == 1 and trainer.steps_done == 2 and pids:
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
        if trainer.steps_done == 3:
            break
except KeyboardInterrupt:
    say("interrupted")
say(trainer.steps_done, trainer.digest())
os._exit(0)
""",
    )
    assert said[0] == "interrupted\n" + said[1]
    assert said[1].startswith("3 ")


def test_a_rank_that_dies_while_ranks_meet_to_share_memory_is_named(run_alone):
    """When the Trainer is made, and in the first step, which makes more shared memory. Nobody waits for a timeout."""
    first = """
from unisono.engine import selection
if R == 1:
    selection.SharedRuntime = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""
    second = """
from unisono.engine.shared import work_division
if R == 1:
    work_division.partition = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
"""
    for prepare in (first, second):
        said = run_alone(
            3,
            f"""
{prepare}
try:
    trainer = make_trainer()
    trainer.step(loss, next(trainer.batches(data, batch_size=12)))
except UnisonoError as error:
    say(type(error).__name__, error)
said = str(Path(__file__).parent / os.environ["MASTER_PORT"])
Path(f"{{said}}-{{R}}").touch()
# Rank 2 asks the store of rank 0, and rank 0 looks at all processes: none ends before both have said it.
while not all(Path(f"{{said}}-{{rank}}").exists() for rank in (0, 2)):
    time.sleep(0.01)
os._exit(0)  # gloo would wait for the dead
""",
            codes={1: -9},
        )
        for rank in (0, 2):
            assert said[rank].startswith("PeerError ")
            assert re.search(r"the process(es)? of ranks? (0-)?1 (has|have) ended", said[rank])


def test_ranks_wait_for_each_other_as_long_as_the_group_says(run_alone):
    said = run_alone(
        2,
        """
from datetime import timedelta
folder = Path(__file__).parent
dist.barrier()
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=7), dist.group.WORLD)
trainer = make_trainer()
batches = trainer.batches(data, batch_size=12)
trainer.step(loss, next(batches))
while R == 1 and not (folder / "over").exists():
    time.sleep(0.01)
try:
    if R == 0:
        trainer.step(loss, next(batches))
except UnisonoError as error:
    say(error)
(folder / "over").touch()
os._exit(0)
""",
    )
    assert "rank 1 did not" in said[0]


@pytest.mark.parametrize("call", ["trainer.step(loss, batch)", "trainer.evaluate(loss, data)"])
@pytest.mark.parametrize("check", ["shared memory", "messages"])
def test_a_rank_that_fails_alone_in_its_last_backward_cannot_go_on_alone(run_alone, call, check):
    said = run_alone(
        2,
        f"check, call = {check!r}, {call!r}"
        """
if check == "messages":  # as on several hosts
    from unisono.engine import selection
    selection._obstacle = lambda: "not here"
trainer = make_trainer(engine="collective")
calls = 0
def fails(model, batch):
    global calls
    calls += 1
    if R == 1 and calls == 6:  # of its two virtual ranks the second, in the third step
        return F.embedding(batch[1], model[2].weight, sparse=True).sum(1)
    return loss(model, batch)
try:
    for batch in trainer.batches(data, batch_size=12):
        try:
            trainer.step(fails, batch)
        except LossError as error:
            say(trainer.steps_done, error)
            began = time.monotonic()
            try:
                exec(call)  # the other rank waits for gradients of the step before
            finally:
                say(f"after {time.monotonic() - began:.1f} s")
except Exception as error:
    say(trainer.steps_done, type(error).__name__, error)
os._exit(0)
""",
    )
    assert "got a sparse gradient" in said[1]
    assert "after 0.0 s" in said[1]
    assert "2 UnisonoError an earlier step failed while its gradients were on their way" in said[1]
    assert said[0].startswith("2 ")
