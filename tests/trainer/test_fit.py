"""`fit`: callbacks, evaluation within epochs, and results that a resume completes."""

from __future__ import annotations

from pathlib import Path

import pytest

DAILY = Path(__file__).parent / "programs" / "daily.py"

FIT = """
validation = TensorDataset(*data[:10])
seen = []

def note(kind):
    def called(trainer, value):
        seen.append((kind, trainer.steps_done))
        return kind == stopper and trainer.steps_done == stop
    return called

torch.manual_seed(1)
trainer = make_trainer(directory=folder or None)
results = trainer.fit(
    loss, data, batch_size=12, epochs=3, validation=validation, validate_every=every,
    on_step=note("step"), on_epoch=note("epoch"), on_evaluation=note("evaluation"),
)
say([(r.epoch, r.loss, {k: (v.total, v.count) for k, v in r.validation.items()}) for r in results])
say(seen)
say(trainer.steps_done, trainer.digest())
"""


@pytest.fixture
def fit(run_alone, tmp_path):
    def run(ranks: int, folder: str = "", stop: int = 0, stopper: str = "step", every: int = 4) -> list[str]:
        values = (str(tmp_path / folder) if folder else "", stop, stopper, every)
        where = f"folder, stop, stopper, every = {values!r}"
        first, *others = run_alone(ranks, f"{where}\n{FIT}")
        assert all(said == first for said in others)
        return first.splitlines()

    return run


def test_callbacks_come_after_steps_epochs_and_evaluations(fit):
    results, seen, end = fit(2)
    assert [epoch for epoch, *_ in eval(results)] == [0, 1, 2]
    expected = [("step", 1), ("step", 2), ("step", 3), ("step", 4), ("evaluation", 4), ("step", 5), ("evaluation", 5)]
    assert eval(seen)[:8] == [*expected, ("epoch", 5)]
    assert end.startswith("15 ")


def test_a_callback_ends_the_training_and_a_resume_completes_results_and_bits(fit):
    results, _, end = fit(3)
    stopped = fit(2, "run", stop=7)
    assert [epoch for epoch, *_ in eval(stopped[0])] == [0] and stopped[2].startswith("7 ")
    resumed = fit(1, "run")
    assert (resumed[0], resumed[2]) == (results, end)
    again = fit(2, "run")
    assert (again[0], again[1], again[2]) == (results, "[]", end)


@pytest.fixture(scope="module")
def undisturbed(fork_python, tmp_path_factory) -> list[str]:
    said = fork_python(DAILY, tmp_path_factory.mktemp("alone"), "auto", 0)
    assert said[0].startswith("over 16 ") and said[3].startswith("step-000000008 ")
    return said


@pytest.mark.parametrize("engine", ["shared", pytest.param("collective", marks=pytest.mark.soak)])
def test_predictions_best_weights_and_early_stopping_are_alike_on_four_ranks(fork_ranks, tmp_path, undisturbed, engine):
    assert fork_ranks(4, DAILY, tmp_path, engine, 0).lines() == undisturbed


def test_predictions_best_weights_and_early_stopping_are_alike_after_stops(fork_ranks, tmp_path, undisturbed):
    """Stopped where an evaluation is due in mid-epoch, of which the second is the best, and before predictions."""
    for n, engine, stop in [(2, "collective", 4), (3, "shared", 8)]:
        assert fork_ranks(n, DAILY, tmp_path, engine, stop).lines()[0].startswith(f"over {stop} ")
    assert fork_ranks(2, DAILY, tmp_path, "collective", 0).lines() == undisturbed


@pytest.mark.parametrize(("stopper", "every"), [("epoch", 4), ("evaluation", 4), ("evaluation", 5)])
def test_an_epoch_after_which_a_callback_ends_the_training_is_not_evaluated_again(fit, stopper, every):
    """With every=5, the evaluation within the epoch is that of its end."""
    results, seen, end = fit(1, every=every)
    first = fit(2, "run", stop=5, stopper=stopper, every=every)
    assert [epoch for epoch, *_ in eval(first[0])] == [0] and first[2].startswith("5 ")
    second = fit(1, "run", stop=5, stopper=stopper, every=every)
    assert eval(first[1]) + eval(second[1]) == eval(seen)
    assert (second[0], second[2]) == (results, end)
