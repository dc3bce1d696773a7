"""Loops that cannot be meant are refused, with what to do; loops that are left can be taken up again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, IterableDataset, TensorDataset

import unisono
from unisono.engine.optimizer_hooks import is_hooked

DATA = TensorDataset(torch.randn(24, 6, generator=torch.Generator().manual_seed(0)))
SCHEDULER = torch.optim.lr_scheduler.StepLR


def loss(model, batch):
    return model(batch[0]).square().sum(1)


def make_trainer(*, scheduler=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if scheduler is not None:
        options["scheduler"] = scheduler(optimizer)
    return unisono.Trainer(model, optimizer, virtual_ranks=2, progress=False, **options)


def deal(trainer, data=DATA, *, most=99, **options):
    """Step through batches, leave the loop after some, and return the steps' numbers."""
    seen = []
    for batch in trainer.batches(data, batch_size=8, **options):
        trainer.step(loss, batch)
        seen.append(batch.step)
        if len(seen) == most:
            break
    return seen


@pytest.mark.parametrize(
    ("began", "goes_on", "words"),
    [
        ({}, {"shuffle": False}, r"with shuffle=True; the epoch cannot go on with shuffle=False"),
        ({}, {"drop_last": True}, r"with drop_last=False; the epoch cannot go on with drop_last=True"),
        ({}, {"data": ConcatDataset([DATA, DATA])}, r"with num_samples=24; .* with num_samples=48"),
    ],
)
def test_an_epoch_that_is_dealt_otherwise_after_a_resume_is_refused(tmp_path, began, goes_on, words):
    first = make_trainer(directory=tmp_path)
    for _ in first.epochs(1, max_steps=1):
        deal(first, **began)
    second = make_trainer(directory=tmp_path)
    with pytest.raises(ValueError, match=words):
        deal(second, **goes_on)
    assert deal(second, **began) == [1, 2]
    assert deal(second, **goes_on)[0] == 0


def test_the_kind_of_dataset_may_not_change_in_mid_epoch():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(torch.ones(24, 6).unsqueeze(1))

    trainer = make_trainer()
    deal(trainer, most=1)
    with pytest.raises(ValueError, match="num_samples=24, shuffle=True"):
        trainer.batches(Stream(), batch_size=8)


def test_a_schedule_by_epochs_goes_on_without_a_loop_over_epochs():
    trainer = make_trainer(scheduler=lambda o: SCHEDULER(o, 1, gamma=0.5), scheduler_interval="epoch")
    for expected in (0.5, 0.25):
        deal(trainer)
        assert trainer.optimizer.param_groups[0]["lr"] == expected


def test_batches_that_nobody_iterates_over_change_nothing():
    trainer = make_trainer(scheduler=lambda o: SCHEDULER(o, 1, gamma=0.5), scheduler_interval="epoch")
    for _ in trainer.epochs(5):
        deal(trainer)
        break
    trainer.batches(DATA, batch_size=8)
    with pytest.raises(ValueError, match="batch_size=1"):
        trainer.batches(DATA, batch_size=1)
    assert (trainer.epoch, trainer.optimizer.param_groups[0]["lr"]) == (0, 1.0)
    assert deal(trainer) == [0, 1, 2]
    assert (trainer.epoch, trainer.optimizer.param_groups[0]["lr"]) == (2, 0.25)


def test_schedulers_of_another_optimizer_are_refused():
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    with pytest.raises(ValueError, match="the scheduler, a StepLR, was built with another optimizer"):
        make_trainer(scheduler=lambda _: SCHEDULER(other, 1))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(other)
    with pytest.raises(ValueError, match=r"stateful\['plateau'\], a ReduceLROnPlateau, was built with another"):
        make_trainer(stateful={"plateau": plateau})
    with pytest.raises(TypeError, match="scheduler is an int"):
        make_trainer(scheduler=lambda _: 3)


def test_batches_go_on_after_a_break_out_of_epochs():
    trainer = make_trainer()
    for _ in trainer.epochs(5):
        deal(trainer, most=2)
        break
    assert deal(trainer) == [2]
    for _ in trainer.epochs(5):
        deal(trainer)
        break
    assert (trainer.epoch, deal(trainer)) == (1, [0, 1, 2])
    assert trainer.epoch == 3


@pytest.mark.parametrize("parts", [[2], [3], [1, 2, 4, 5], [2, 4]])
def test_an_epoch_that_the_loop_leaves_is_over_also_where_the_run_stops_there(tmp_path, parts):
    """What comes after it is done once, as in a run that does not stop: an evaluation, and another learning rate."""

    def run(folder, max_steps):
        trainer, done = make_trainer(directory=folder), []
        for epoch in trainer.epochs(3, max_steps=max_steps):
            for batch in trainer.batches(DATA, batch_size=8):
                trainer.step(loss, batch)
                if batch.step == 1:  # one batch is left
                    trainer.optimizer.param_groups[0]["lr"] *= 0.5
                    break
            else:
                continue
            done.append((epoch, str(trainer.evaluate(loss, DATA))))
        return done, trainer.digest(), trainer.steps_done

    whole = run(tmp_path / "whole", None)
    assert len(whole[0]) == 3 and whole[2] == 6
    done = [each for steps in [*parts, None] for each in run(tmp_path / "parts", steps)[0]]
    assert done == whole[0]
    assert run(tmp_path / "parts", None)[1] == whole[1]


def test_a_loop_that_was_run_already_is_refused():
    trainer = make_trainer()
    assert len(trainer.fit(loss, DATA, batch_size=8, epochs=2)) == 2
    with pytest.raises(ValueError, match=r"epochs=2 is done: this Trainer is at epoch 2, after 6 steps.* epochs=4"):
        trainer.fit(loss, DATA, batch_size=8, epochs=2)
    assert [result.epoch for result in trainer.fit(loss, DATA, batch_size=8, epochs=4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("arguments", [(2.5,), ("3",), (None,), (2, 1.5)])
def test_epochs_and_steps_are_whole_numbers(arguments):
    with pytest.raises(TypeError, match=r"=.* must be a whole number, and is a "):
        make_trainer().epochs(arguments[0], max_steps=arguments[-1] if len(arguments) > 1 else None)


def test_two_loops_at_once_are_refused():
    trainer = make_trainer()
    for _ in trainer.epochs(1):
        with pytest.raises(ValueError, match=r"a loop over trainer\.epochs is under way"):
            next(trainer.epochs(2))
        deal(trainer)
        words = r"the batches of epoch 0 have all been dealt.* batch_size=\{.*\}\), .* or join them by .*ConcatDataset"
        with pytest.raises(ValueError, match=words):
            deal(trainer)
    pairs = zip(trainer.batches(DATA, batch_size=8), trainer.batches(DATA, batch_size=8), strict=True)
    next(pairs)
    with pytest.raises(ValueError, match=r"another loop over trainer\.batches has begun since step 0 of epoch 1"):
        next(pairs)


def test_batches_that_the_loop_leaves_out_are_not_dealt_again(tmp_path):
    trainer = make_trainer(directory=tmp_path)
    batches = trainer.batches(DATA, batch_size=8)
    first = next(batches)
    trainer.step(loss, first)
    assert (next(batches).step, next(batches).step) == (1, 2)
    trainer.save()
    batches.close()
    resumed = make_trainer(directory=tmp_path)
    assert deal(resumed) == [2]


def warned(capfd, act, *, first=lambda trainer: None, **options):
    """Take three steps, and act after each; return what is warned of."""
    trainer = make_trainer(**options)
    first(trainer)
    for batch in trainer.batches(DATA, batch_size=8):
        trainer.step(loss, batch)
        act(trainer, next(iter(batch.micro_batches)))
    return capfd.readouterr().err


def step_by_hand(trainer, _=None):
    trainer.optimizer.step()


def go_backward(trainer, micro_batch):
    loss(trainer.model, micro_batch).sum().backward()


@pytest.mark.parametrize("engine", ["auto", "collective"])
def test_an_optimizer_step_that_was_left_in_the_loop_is_warned_of_once(capfd, engine):
    (line,) = warned(capfd, step_by_hand, engine=engine).splitlines()
    assert line.startswith("unisono: warning: optimizer.step() has been called since the last trainer.step(...), which")
    assert "Leave optimizer.step() and optimizer.zero_grad() out of the loop" in line


@pytest.mark.parametrize(
    "act",
    [go_backward, lambda trainer, _: nn.utils.clip_grad_norm_(trainer.model.parameters(), 1e-3)],
    ids=["backward", "clipping"],
)
def test_a_gradient_that_the_loop_changes_in_vain_is_warned_of_once(capfd, act):
    (line,) = warned(capfd, act).splitlines()
    assert line.startswith(
        "unisono: warning: the loop has changed the gradient of 'weight' since the last trainer.step"
    )


def test_a_schedule_that_the_loop_steps_as_well_is_warned_of_once(capfd):
    schedules = []

    def scheduler(optimizer):
        schedules.append(SCHEDULER(optimizer, 1))
        return schedules[-1]

    (line,) = warned(capfd, lambda trainer, _: schedules[-1].step(), scheduler=scheduler).splitlines()
    assert line.startswith(
        "unisono: warning: scheduler.step() has been called since the last trainer.step(...), and the"
    )
    assert warned(capfd, lambda trainer, _: None, scheduler=scheduler) == ""


QUIET = {
    "nothing": lambda trainer, _: None,
    "zero_grad": lambda trainer, _: trainer.model.zero_grad(),
    "zero_grad in place": lambda trainer, _: trainer.optimizer.zero_grad(set_to_none=False),
    "a gradient that is read": lambda trainer, _: [p.grad.norm() for p in trainer.model.parameters()],
    "another optimizer": lambda trainer, _: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0).step(),
    "an evaluation": lambda trainer, _: trainer.evaluate(loss, DATA),
}


@pytest.mark.parametrize("act", QUIET.values(), ids=QUIET)
def test_what_does_no_harm_between_two_steps_is_not_warned_of(capfd, act):
    assert warned(capfd, act) == ""


def step_in_turns(capfd, act, *turns):
    """Step two optimizers in turns, with what a loop does between them; return what is said."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizers = {
        "early": torch.optim.SGD(model[0].parameters(), lr=0.1),
        "late": torch.optim.AdamW(model[2].parameters()),
    }
    trainer = unisono.Trainer(model, optimizers, virtual_ranks=2, progress=False)
    for batch in trainer.batches(DATA, batch_size=6):
        for name in turns:
            trainer.step(loss, batch, optimizer=name)
            act(trainer, name)
    return capfd.readouterr().err


@pytest.mark.parametrize("turns", [("early", "late"), (None, "late"), ("late", None, "early", "early"), (None,)])
def test_steps_of_other_optimizers_are_not_the_loops_doing(capfd, turns):
    assert step_in_turns(capfd, lambda *_: None, *turns) == ""


@pytest.mark.parametrize("turns", [("early", "late"), (None, "late"), ("late", "late", "late", "early")])
def test_gradients_that_the_loop_changes_between_steps_of_several_optimizers_are_warned_of(capfd, turns):
    def clip(trainer, name):
        if name == turns[-1]:
            nn.utils.clip_grad_norm_(trainer.model.parameters(), 1e-3)

    (line,) = step_in_turns(capfd, clip, *turns).splitlines()
    assert "the loop has changed the gradient of" in line


def test_sparse_gradients_that_the_loop_sets_to_zero_are_not_warned_of(capfd):
    model = nn.EmbeddingBag(24, 3, sparse=True)
    trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=1.0), virtual_ranks=2, progress=False)
    for batch in trainer.batches(TensorDataset(torch.arange(24).view(12, 2)), batch_size=4):
        trainer.step(loss, batch)
        trainer.optimizer.zero_grad(set_to_none=False)
    assert capfd.readouterr().err == ""


def test_steps_by_hand_before_the_first_step_of_the_trainer_are_not_warned_of(capfd):
    def first(trainer):
        go_backward(trainer, [torch.ones(2, 6)])
        step_by_hand(trainer)

    assert warned(capfd, lambda trainer, _: None, first=first) == ""


def test_the_hook_that_counts_steps_is_none_of_the_users(capfd):
    """Nor are a second Trainer of the same optimizer, and a scheduler that counts steps, mistaken for the loop."""
    trainer = make_trainer(scheduler=lambda optimizer: SCHEDULER(optimizer, 2))
    again = unisono.Trainer(trainer.model, trainer.optimizer, virtual_ranks=2, progress=False)
    for batch in trainer.batches(DATA, batch_size=8):
        trainer.step(loss, batch)
    for batch in again.batches(DATA, batch_size=8):
        again.step(loss, batch)
    assert not is_hooked(trainer.optimizer)
    trainer.optimizer.register_step_pre_hook(lambda *_: None)
    assert is_hooked(trainer.optimizer)
    assert "optimizer.step() has been called" not in capfd.readouterr().err
