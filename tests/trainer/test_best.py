"""The best checkpoint and those with a tag stay, a run ends early alike after a resume, and break saves."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.errors import CheckpointError
from unisono.state.best import read_best

DATA = TensorDataset(torch.randn(20, 6, generator=torch.Generator().manual_seed(0)))
NAN = math.nan


def loss(model, batch):
    return model(batch[0]).square().sum(1)


def make_trainer(directory, *, checkpoints=None, **options):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    events = []
    options = {"virtual_ranks": 2, "progress": False, "directory": directory, "listeners": [events.append], **options}
    trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), checkpoints=checkpoints, **options)
    trainer.seen = events
    return trainer


def best(**options):
    return unisono.Checkpoints(**{"best": "score", "mode": "max", "keep": 1, **options})


def report(trainer, value, *, name="score"):
    return trainer.evaluate(lambda model, batch: torch.full((len(batch[0]),), value), DATA, name=name)


def run(trainer, values, *, epochs=None):
    """One epoch of two steps for each value, which is reported at its end. Returns: weights by steps done."""
    weights = {}
    for epoch in trainer.epochs(len(values) if epochs is None else epochs):
        for batch in trainer.batches(DATA, batch_size=10):
            trainer.step(loss, batch)
        report(trainer, values[epoch])
        weights[trainer.steps_done] = trainer.model.weight.detach().clone()
    return weights


def folders(directory):
    return sorted(path.name for path in (directory / "checkpoints").iterdir() if not path.is_symlink())


def warnings_of(trainer):
    return [event["message"] for event in trainer.seen if event["event"] == "warning"]


@pytest.mark.parametrize(
    ("values", "mode", "step"),
    [
        ([1.0, 3.0, 2.0, 3.0, NAN], "max", 4),
        ([NAN, 2.0, -math.inf, 1.0], "min", 6),
        ([5.0, 6.0, 7.0], "max", 6),
        ([5.0, 6.0, 7.0], "min", 2),
    ],
)
def test_the_best_checkpoint_stays_beside_the_newest(tmp_path, values, mode, step):
    """NaN is never the best, and of equal values the earlier one is."""
    trainer = make_trainer(tmp_path, checkpoints=best(mode=mode))
    weights = run(trainer, values)
    last = 2 * len(values)
    assert folders(tmp_path) == ["best.json", *sorted({f"step-{step:09d}", f"step-{last:09d}"})]
    assert (tmp_path / "checkpoints" / "best").resolve().name == f"step-{step:09d}"
    record = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
    assert (record["step"], record["metric"], record["value"]) == (step, "score", values[step // 2 - 1])
    loaded = trainer.load("best")
    assert loaded.source.endswith(f"step-{step:09d}")
    assert torch.equal(trainer.model.weight, weights[step])
    assert trainer.steps_done == last
    assert warnings_of(trainer) == []


def test_the_best_one_survives_resumes_until_a_better_one_is_on_disk(tmp_path):
    values = [1.0, 3.0, 2.0, 2.5, 2.9, 4.0, 3.9]
    for epochs in range(1, 6):
        run(make_trainer(tmp_path, checkpoints=best()), values, epochs=epochs)
    assert folders(tmp_path) == ["best.json", "step-000000004", "step-000000010"]
    run(make_trainer(tmp_path), values, epochs=5)  # without best=, it stays as it is
    run(make_trainer(tmp_path, checkpoints=best()), values)
    assert folders(tmp_path) == ["best.json", "step-000000012", "step-000000014"]


def test_the_record_is_made_anew_from_the_history(tmp_path):
    """If it is lost, damaged, of another metric, or of a checkpoint that is gone."""
    folder = tmp_path / "checkpoints"
    run(make_trainer(tmp_path, checkpoints=unisono.Checkpoints(keep=3)), [1.0, 5.0, 3.0, 2.0, 4.0])
    make_trainer(tmp_path, checkpoints=best())
    assert read_best(folder).step == 10  # that of step 4 is gone already
    make_trainer(tmp_path, checkpoints=best(mode="min"))
    assert (read_best(folder).step, read_best(folder).value) == (8, 2.0)
    (folder / "best.json").write_text("{")
    damaged = make_trainer(tmp_path, checkpoints=best())
    assert read_best(folder).step == 10
    assert ["is no record of a best checkpoint" in message for message in warnings_of(damaged)] == [True]
    (folder / "best.json").unlink()
    (folder / "best").unlink()
    make_trainer(tmp_path, checkpoints=best())
    assert (folder / "best").resolve().name == "step-000000010"


@pytest.mark.parametrize("before", [False, True], ids=["after-the-step", "before-the-step"])
def test_a_new_best_makes_a_checkpoint_due(tmp_path, before):
    """Of the very state that was evaluated, in mid-epoch too, and also of the one before the first step."""
    values = {0: 1.0, 3: 7.0, 5: 2.0, 6: 7.0}
    rules = {"every_epoch": False, "every_minutes": None}
    trainer = make_trainer(tmp_path, checkpoints=best(**rules))
    weights = {}

    def look():
        if trainer.steps_done in values:
            weights[trainer.steps_done] = trainer.model.weight.detach().clone()
            report(trainer, values.pop(trainer.steps_done))

    for _ in trainer.epochs(4):
        for batch in trainer.batches(DATA, batch_size=10):
            if before:
                look()
            trainer.step(loss, batch)
            if not before:
                look()
    written = [event["total_steps"] for event in trainer.seen if event["event"] == "checkpoint"]
    assert written == ([0, 3, 8] if before else [3, 8])
    trainer.load("best")
    assert torch.equal(trainer.model.weight, weights[3])
    assert warnings_of(trainer) == []
    resumed = make_trainer(tmp_path, checkpoints=best(**rules))
    assert resumed.steps_done == 8


def test_the_end_of_a_run_counts_and_an_unfinished_epoch_too(tmp_path):
    trainer = make_trainer(tmp_path, checkpoints=best())
    for _ in trainer.epochs(3, max_steps=3):
        for batch in trainer.batches(DATA, batch_size=10):
            trainer.step(loss, batch)
        report(trainer, trainer.steps_done)
    assert read_best(tmp_path / "checkpoints").step == 3


def test_loading_the_best_while_it_is_the_present_one_changes_nothing(tmp_path):
    trainer = make_trainer(tmp_path, checkpoints=best(every_epoch=False))
    for _ in trainer.epochs(1):
        for batch in trainer.batches(DATA, batch_size=10):
            trainer.step(loss, batch)
            report(trainer, trainer.steps_done)
            digest = trainer.digest()
            assert trainer.load("best").source == "the present weights"
            assert trainer.digest() == digest
    assert read_best(tmp_path / "checkpoints").value == 2.0
    assert warnings_of(trainer) == []


def test_a_best_state_that_is_changed_before_it_is_saved_is_told_of(tmp_path):
    trainer = make_trainer(tmp_path, checkpoints=best())
    torch.save({"weight": torch.zeros(3, 6), "bias": torch.zeros(3)}, tmp_path / "zeros.pt")
    for epoch in trainer.epochs(2):
        for batch in trainer.batches(DATA, batch_size=10):
            trainer.step(loss, batch)
            if epoch == 1 and batch.step == 0:
                report(trainer, 100.0)
                trainer.load(tmp_path / "zeros.pt")
        report(trainer, trainer.steps_done)
        if epoch == 1:
            trainer.save()
            report(trainer, 50.0)  # the checkpoint of this step is there, and becomes the best one
            trainer.load(tmp_path / "zeros.pt")
            assert read_best(tmp_path / "checkpoints").value == 50.0
            trainer.save()  # and is replaced
    assert read_best(tmp_path / "checkpoints") is None
    make_trainer(tmp_path, checkpoints=best())  # nor does the history take what is there now for what was evaluated
    assert read_best(tmp_path / "checkpoints") is None
    first, second = warnings_of(trainer)
    assert "the state of step 3, the best so far (score=100), is not kept: other weights were loaded" in first
    assert "the best checkpoint, of step 4, is replaced: other weights were loaded at that step" in second


def test_a_metric_that_never_comes_is_told_of_at_the_end(tmp_path):
    trainer = make_trainer(tmp_path / "a", checkpoints=best(best="acuracy"))
    run(trainer, [1.0])
    (warning,) = warnings_of(trainer)
    assert "no evaluation reported 'acuracy'. They reported 'score'." in warning
    with pytest.raises(CheckpointError, match="is recorded as the best one"):
        trainer.load("best")
    trainer = make_trainer(tmp_path / "b", checkpoints=best())
    run(trainer, [NAN, NAN])
    (warning,) = warnings_of(trainer)
    assert "'score' was NaN in all evaluations" in warning


def test_one_name_of_two_evaluations_is_refused_and_can_be_made_clear(tmp_path):
    def both(model, batch):
        return {"score": batch[0].sum(1), "other": batch[0].sum(1)}

    trainer = make_trainer(None, checkpoints=best())
    trainer.evaluate(both, DATA, name="train")
    with pytest.raises(
        ValueError, match=r"'score' was reported by the evaluations 'test', 'train': name one of them, "
    ):
        trainer.evaluate(both, DATA, name="test")
    clear = make_trainer(tmp_path, checkpoints=best(best="test/score"))
    for _ in clear.epochs(1):
        for batch in clear.batches(DATA, batch_size=10):
            clear.step(loss, batch)
        clear.evaluate(both, DATA, name="train")
        clear.evaluate(both, DATA, name="test")
    assert read_best(tmp_path / "checkpoints").metric == "test/score"
    with pytest.raises(ValueError, match="'score' was reported by"):
        clear.stalled("score", patience=1)
    assert clear.stalled("test/score", patience=1) is False


# Early stopping.


def early(directory, values, *, patience=2):
    trainer = make_trainer(directory, checkpoints=best(mode="min", keep=2))
    for epoch in trainer.epochs(len(values)):
        for batch in trainer.batches(DATA, batch_size=10):
            trainer.step(loss, batch)
        report(trainer, values[epoch])
        if trainer.stalled("score", patience=patience):
            break
    return trainer


def test_break_saves_and_a_resumed_run_breaks_at_the_same_place(tmp_path):
    values = [3.0, 2.0, 2.5, 2.0, 1.0, 0.0, 1.0, 1.0]
    trainer = early(tmp_path, values)
    assert trainer.steps_done == 8
    digest = trainer.digest()
    again = early(tmp_path, values)
    assert again.steps_done == 8
    assert [event["total_steps"] for event in again.seen if event["event"] == "resume"] == [8]
    assert again.digest() == digest
    # With more patience it goes on as a run that had it from the beginning.
    patient = early(tmp_path, values, patience=3)
    assert patient.steps_done == 16
    calm = early(tmp_path / "calm", values, patience=3)
    assert calm.digest() == patient.digest()
    assert len(calm._loop.history) == len(patient._loop.history)
    assert read_best(tmp_path / "checkpoints").step == read_best(tmp_path / "calm" / "checkpoints").step == 12
    assert [warnings_of(each) for each in (trainer, again, patient, calm)] == [[]] * 4


def test_break_after_a_new_best_keeps_it(tmp_path):
    trainer = make_trainer(tmp_path, checkpoints=best())
    for _ in trainer.epochs(9):
        for batch in trainer.batches(DATA, batch_size=10):
            trainer.step(loss, batch)
        if report(trainer, trainer.steps_done) > 3:
            break
    trainer.load("best")
    assert folders(tmp_path) == ["best.json", "step-000000004"]
    assert read_best(tmp_path / "checkpoints").value == 4.0


def test_a_failed_write_at_a_break_is_told_of_and_tried_again(tmp_path):
    trainer = make_trainer(tmp_path)
    folder = tmp_path / "checkpoints" / "step-000000002"
    for _ in trainer.epochs(9):
        for batch in trainer.batches(DATA, batch_size=10):
            trainer.step(loss, batch)
        folder.write_text("a file where the folder must be")
        break
    trainer._loop._saves._keeper.settle()
    folder.unlink()
    trainer._loop._saves._asked.rescue()  # what the end of the process does
    (warning,) = warnings_of(trainer)
    assert "checkpoint not written: the checkpoint of step 2 was not written" in warning
    assert make_trainer(tmp_path).steps_done == 2


def test_stalled_is_a_function_of_the_history():
    trainer = make_trainer(None)
    assert trainer.stalled("score", patience=1) is False
    found = []
    values = iter((3.0, 2.0, NAN, 2.0, 1.99, 1.98))
    for batch in itertools.chain.from_iterable(trainer.batches(DATA, batch_size=10) for _ in range(3)):
        trainer.step(loss, batch)
        report(trainer, -9.0)
        report(trainer, next(values))  # of one step the last one counts
        found.append((trainer.stalled("score", patience=2), trainer.stalled("score", patience=2, min_delta=0.1)))
    assert found == [(False, False)] * 3 + [(True, True), (False, True), (False, True)]
    report(trainer, 5.0)
    assert trainer.stalled("score", patience=1, mode="max") is False
    assert trainer.stalled("scores", patience=1) is trainer.stalled("scores", patience=1) is False
    (warning,) = warnings_of(trainer)
    assert "no evaluation has reported 'scores' so far, but 'score'" in warning


# Tags.


def test_a_tag_is_kept_replaced_and_not_resumed_from(tmp_path):
    trainer = make_trainer(tmp_path, checkpoints=best(best=None, mode=None))
    kept = {}
    for _ in trainer.epochs(4):
        for batch in trainer.batches(DATA, batch_size=10):
            trainer.step(loss, batch)
        name = "early" if trainer.steps_done < 6 else "late.2"
        trainer.save(tag=name)
        kept[name] = trainer.model.weight.detach().clone()
    assert folders(tmp_path) == ["step-000000008", "tag-early", "tag-late.2"]
    for name, weight in kept.items():
        trainer.load(tmp_path / "checkpoints" / f"tag-{name}")
        assert torch.equal(trainer.model.weight, weight)
    for path in (tmp_path / "checkpoints" / "step-000000008").iterdir():
        path.unlink()
    (tmp_path / "checkpoints" / "step-000000008").rmdir()
    assert make_trainer(tmp_path).steps_done == 0
    assert folders(tmp_path) == ["tag-early", "tag-late.2"]


# Ranks, engines and kills.

PROGRAM = Path(__file__).parent / "programs" / "early.py"


@pytest.fixture(scope="module")
def calm(fork_python, tmp_path_factory):
    """The last lines of a run of one rank that nobody disturbed, and the weights under its tag."""
    folder = tmp_path_factory.mktemp("calm")
    lines = fork_python(PROGRAM, folder, "auto")
    assert re.match(r"stopped \d+ [0-9a-f]{64}$", lines[0])
    assert len(list((folder / "checkpoints").glob("step-*"))) == 2
    return lines, (folder / "checkpoints" / "tag-six" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("n", "engine", "phases"),
    [
        (2, "shared", ["evaluated", "saving", "recorded"]),
        (3, "collective", ["tagging"]),
        (1, "auto", ["saving"]),
    ],
)
def test_a_run_that_is_killed_stops_at_the_same_step_with_the_same_best(fork_ranks, tmp_path, calm, n, engine, phases):
    lines, tagged = calm
    best_step = int(lines[1].split()[0].removeprefix("step-"))
    for phase in phases:
        at = 6 if phase == "tagging" else best_step
        assert fork_ranks(n, PROGRAM, tmp_path, engine, at, phase, code=None).code == 137
    assert fork_ranks(n, PROGRAM, tmp_path, engine).lines()[-2:] == lines
    folder = tmp_path / "checkpoints"
    assert (folder / "tag-six" / "model.safetensors").read_bytes() == tagged
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith("step-")) == sorted(
        {lines[1].split()[0], f"step-{int(lines[0].split()[1]):09d}"}
    )
