"""A run that was stopped anywhere goes on with another number of ranks, to the same bits."""

from __future__ import annotations

import ast
import json
import random
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

PROGRAM = Path(__file__).parent / "programs" / "resumable.py"


@pytest.fixture(scope="module")
def expected(fork_python, tmp_path_factory) -> list[str]:
    """The last two lines of a run that nobody stopped, for 4 virtual ranks."""
    return fork_python(PROGRAM, tmp_path_factory.mktemp("calm"), "--virtual-ranks", 4, "--every", 5)[-2:]


def finish(fork_ranks, directory: Path, n: int, *args: object) -> list[str]:
    return fork_ranks(n, PROGRAM, directory, "--virtual-ranks", 4, "--every", 5, *args).lines()[-2:]


@pytest.mark.parametrize(
    ("die_at", "phase", "before", "after"),
    [
        (4, "loss", 2, 3),
        (10, "save", 4, 2),
        (14, "after", 2, 1),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in [(3, "after", 3, 1), (7, "loss", 1, 4)]),
    ],
)
def test_killed_run_goes_on_to_the_same_bits(fork_ranks, tmp_path, expected, die_at, phase, before, after):
    args = ["--virtual-ranks", 4, "--every", 3, "--die-at", die_at, "--phase", phase]
    hurt = fork_ranks(before, PROGRAM, tmp_path, *args, code=137)
    assert "weights sha256" not in hurt.out
    assert finish(fork_ranks, tmp_path, after) == expected
    assert_each_sample_once(tmp_path / "dealt.txt")


@pytest.mark.parametrize(
    ("phase", "code", "saved"),
    [
        ("error", 1, 7),
        pytest.param("update", 1, None, marks=pytest.mark.soak),
        ("term", 143, 7),
        pytest.param("interrupt", 130, 7, marks=pytest.mark.soak),
        pytest.param("late-term", 143, 8, marks=pytest.mark.soak),
    ],
)
def test_an_error_ctrl_c_or_sigterm_loses_no_step(run_ranks, fork_ranks, tmp_path, expected, phase, code, saved):
    """The last step that was done is saved when the process ends; but not a state that is being written."""
    args = ["--virtual-ranks", 4, "--every", 1000, "--die-at", 7, "--phase", phase]
    run_ranks(2, PROGRAM, tmp_path, *args, code=code)
    assert finish(fork_ranks, tmp_path, 3) == expected
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    resumed = [event["total_steps"] for event in events if event["event"] == "resume"]
    assert resumed == [saved or 5]  # the end of the first epoch has been saved before


def test_stopping_after_any_step_changes_nothing(fork_ranks, tmp_path, expected):
    """Stopped on purpose, again and again, each time with another number of ranks or engine; saved at the end only.

    When it has ended, it does nothing more.
    """
    for n, steps, engine in [(4, 2, "shared"), (2, 2, "shared"), (1, 7, "auto"), (3, 11, "collective")]:
        args = ["--virtual-ranks", 4, "--steps", steps, "--every", 1000, "--engine", engine]
        job = fork_ranks(n, PROGRAM, tmp_path, *args)
        assert job.lines()[-2].startswith(f"total {steps} ")
    assert finish(fork_ranks, tmp_path, 2) == expected
    assert_each_sample_once(tmp_path / "dealt.txt")
    before = (tmp_path / "dealt.txt").read_text()
    assert finish(fork_ranks, tmp_path, 3) == expected
    assert (tmp_path / "dealt.txt").read_text() == before


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(fork_ranks, tmp_path, expected):
    fork_ranks(1, PROGRAM, tmp_path, "--virtual-ranks", 4, "--steps", 7)
    newest = sorted((tmp_path / "checkpoints").iterdir())[-1]
    assert newest.name == "step-000000007"
    content = bytearray((newest / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (newest / "model.safetensors").write_bytes(content)
    assert finish(fork_ranks, tmp_path, 2) == expected
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (warning,) = [event["message"] for event in events if event["event"] == "warning"]
    assert "step-000000007" in warning
    assert "model.safetensors" in warning
    assert [event["total_steps"] for event in events if event["event"] == "resume"] == [6]


def test_all_damaged_is_an_error_and_not_a_fresh_start(fork_ranks, tmp_path):
    fork_ranks(1, PROGRAM, tmp_path, "--virtual-ranks", 4, "--steps", 4)
    for folder in (tmp_path / "checkpoints").iterdir():
        (folder / "state.json").write_text("{")
    job = fork_ranks(2, PROGRAM, tmp_path, "--virtual-ranks", 4, code=1)
    assert "are damaged" in job.said
    assert "state.json" in job.said


def test_checkpoints_are_kept_to_the_last_two_and_have_plain_names(fork_ranks, tmp_path):
    job = fork_ranks(2, PROGRAM, tmp_path, "--virtual-ranks", 4, "--steps", 9)
    folders = sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir())
    assert folders == ["step-000000008", "step-000000009"]
    model = load_file(tmp_path / "checkpoints" / "step-000000009" / "model.safetensors")
    assert set(model) == {
        *("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"),
        *("1.running_mean", "1.running_var", "1.num_batches_tracked"),
    }
    optimizer = load_file(tmp_path / "checkpoints" / "step-000000009" / "optimizer.safetensors")
    assert optimizer["0.weight.exp_avg"].shape == torch.Size([16, 8])
    assert job.sha()


OTHERS = {
    "--width 17": ["another model", "0.weight is float32[16, 8] there and float32[17, 8] here"],
    "--virtual-ranks 2": ["virtual_ranks=2", "virtual_ranks=4", "give virtual_ranks=4", "another directory"],
    "--seed 5": ["seed=5", "seed=0"],
    "--batch-size 30": ["batch_size=20", "batch_size=30", "before step 3"],
    "--optimizer SGD": ["AdamW there", "SGD here"],
    "--resume never": ["already holds a run, up to step 3", "another directory"],
}
ALL_OTHERS = """
import json, runpy, sys
import unisono

program, directory, others = sys.argv[1:]
for other in json.loads(others):
    sys.argv = [program, directory, *other.split()]
    try:
        runpy.run_path(program, run_name="__main__")
    except (unisono.errors.UnisonoError, ValueError) as error:
        print(json.dumps([other, str(error)]), flush=True)
"""


def test_another_run_does_not_take_a_directory_over(fork_ranks, tmp_path):
    fork_ranks(1, PROGRAM, tmp_path, "--virtual-ranks", 4, "--steps", 3)
    job = fork_ranks(2, ALL_OTHERS, PROGRAM, tmp_path, json.dumps([*OTHERS]))
    for rank in range(2):
        told = dict(map(json.loads, job.lines(rank)))
        assert told.keys() == OTHERS.keys()
        assert not [(other, told[other]) for other, words in OTHERS.items() if not all(w in told[other] for w in words)]


def test_resume_must_needs_a_checkpoint(fork_ranks, tmp_path):
    job = fork_ranks(2, PROGRAM, tmp_path, "--resume", "must", code=1)
    assert "holds no checkpoint" in job.said


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(25))
def test_killed_again_and_again(run_ranks, fork_ranks, tmp_path, expected, seed):
    """Many deaths at random steps and phases, with a random number of ranks each time."""
    rng = random.Random(seed)
    for _ in range(6):
        die_at, phase = rng.randrange(1, 15), rng.choice(["loss", "after", "save"])
        n, every = rng.randint(1, 4), rng.choice([1, 2, 5])
        args = ["--virtual-ranks", 4, "--die-at", die_at, "--phase", phase, "--every", every]
        assert run_ranks(n, PROGRAM, tmp_path, *args, code=None).code in (0, 137)
    assert finish(fork_ranks, tmp_path, rng.randint(1, 4)) == expected
    assert_each_sample_once(tmp_path / "dealt.txt")


def assert_each_sample_once(dealt: Path) -> None:
    """Steps that were redone dealt the same samples as before, and each epoch has each sample in one step."""
    steps: dict[tuple[int, int], set[int]] = defaultdict(set)
    for line in dealt.read_text().splitlines():
        epoch, step, _, indices = line.split(" ", 3)
        steps[int(epoch), int(step)] |= set(ast.literal_eval(indices))
    for epoch in range(3):
        seen = [i for (e, _), indices in steps.items() if e == epoch for i in indices]
        assert sorted(seen) == list(range(90)), f"epoch {epoch}"
