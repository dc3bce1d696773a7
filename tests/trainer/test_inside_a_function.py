"""What has no place inside a loss function is refused on every rank, before any rank waits for ever."""

from __future__ import annotations

import pytest

LOOK = """
from unisono import comm
from unisono.errors import GroupError
from unisono.metrics import Mean

trainer = make_trainer(virtual_ranks=4, engine="auto")

def with_ours(model, batch):
    comm.all_gather(model(batch[0]), concat=0)
    return loss(model, batch)

def with_torchs(model, batch):
    dist.all_reduce(torch.ones(1))
    return loss(model, batch)

def in_a_subgroup(model, batch):
    dist.broadcast(torch.ones(1), 0, group=other)
    return loss(model, batch)

def with_a_metric(model, batch):
    Mean().compute()
    return loss(model, batch)

def with_a_step(model, batch):
    trainer.step(loss, current)

def with_an_evaluation(model, batch):
    trainer.evaluate(loss, data)

def with_a_save(model, batch):
    trainer.save()

def with_a_prediction(model, batch):
    trainer.predict(loss, data)

def with_a_log(model, batch):
    trainer.log(loss=1.0)

other = dist.new_group(backend="shm")
before = trainer.digest()
for current in trainer.batches(data, batch_size=12):
    calls = with_ours, with_torchs, in_a_subgroup, with_a_metric, with_a_step, with_an_evaluation, with_a_save
    calls += with_a_prediction, with_a_log
    for function in calls:
        for run in (lambda: trainer.step(function, current), lambda: trainer.evaluate(function, data)):
            try:
                run()
            except (GroupError, RuntimeError) as error:
                say(function.__name__, "|", type(error).__name__, "|", error)
            else:
                say(function.__name__, "was let through")
    break
assert trainer.digest() == before
say("unchanged")
comm.all_reduce(1)  # and outside it is allowed, as ever
"""


LATE = """
from unisono.errors import GroupError

trainer = make_trainer(virtual_ranks=4, engine=ENGINE)

steps = 0

def late(model, batch):
    if steps == 4:
        dist.all_reduce(torch.ones(1))
    return loss(model, batch)

try:
    for _ in range(2):
        for batch in trainer.batches(data, batch_size=12):
            trainer.step(late, batch)
            steps += 1
except GroupError as error:
    say(steps, error)
"""


@pytest.mark.parametrize("engine", ["auto", "collective"])
def test_a_collective_that_a_loss_function_calls_first_in_a_later_step_is_refused(run_alone, engine):
    for said in run_alone(3, LATE.replace("ENGINE", repr(engine))):
        assert said.startswith("4 the loss function called 1 collective of torch.distributed. ")


@pytest.mark.parametrize("n", [1, 3])
def test_collectives_and_the_trainer_are_refused_inside_functions(run_alone, n):
    """With three ranks one of them has two of the four virtual ranks, and the others would wait for its second call."""
    for said in run_alone(n, LOOK):
        lines = [line for line in said.splitlines() if " | " in line]
        assert said.splitlines()[-1] == "unchanged"
        assert "let through" not in said
        assert len(lines) == 18
        for line in lines:
            name, kind, text = line.split(" | ")
            what = ("the loss function", "the evaluated function")[lines.index(line) % 2]
            methods = {"evaluation": "evaluate", "prediction": "predict"}
            last = name.rpartition("_")[2]
            if last in ("step", "evaluation", "save", "prediction", "log"):
                asked = methods.get(last, last)
                assert kind == "RuntimeError"
                assert text == (
                    f"{what} called trainer.{asked}, in the middle of a step or an evaluation: call it in your loop."
                )
            else:
                called = "1 collective of torch.distributed" if "torch" in name or "sub" in name else "a collective"
                assert kind == "GroupError"
                assert text.startswith(f"{what} called {called}. ")
                assert "call collectives in your loop" in text
