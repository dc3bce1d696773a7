"""Models that ranks build in parts: the values that one process draws, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "divided_built.py"
REFUSALS = PROGRAM.with_name("build_refusals.py")


@pytest.fixture(scope="module")
def whole(fork_python, tmp_path_factory):
    """What one process prints that builds the whole model, and its directory."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return fork_python(PROGRAM, folder, "whole"), folder


@pytest.fixture(scope="module")
def folder_in_parts(tmp_path_factory):
    """The directory of a run that builds parts, empty until a test needs it."""
    return tmp_path_factory.mktemp("in_parts") / "run"


@pytest.fixture
def in_parts(fork_ranks, folder_in_parts):
    """What each of 3 ranks prints that build parts of the model, and their directory."""
    printed = folder_in_parts.with_name("printed.json")
    if not printed.exists():
        job = fork_ranks(3, PROGRAM, folder_in_parts, "block")
        printed.write_text(json.dumps([job.lines(rank) for rank in range(3)]))
    return json.loads(printed.read_text()), folder_in_parts


def test_ranks_that_build_parts_have_the_bits_of_one_process(in_parts, whole):
    assert in_parts[0] == [whole[0]] * 3


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "how"), [(2, "size"), (4, "replicas"), (2, "zero1"), (1, "block")])
def test_they_have_them_in_each_division(fork_ranks, whole, tmp_path, ranks, how):
    job = fork_ranks(ranks, PROGRAM, tmp_path / "run", how)
    assert [job.lines(rank) for rank in range(ranks)] == [whole[0]] * ranks


@pytest.mark.soak
@pytest.mark.parametrize("option", ["llama", "by_numpy"])
def test_models_of_others_and_memory_that_others_see_have_them_too(fork_ranks, fork_python, tmp_path, option):
    expected = fork_python(PROGRAM, tmp_path / "whole" / "run", "whole", option)
    job = fork_ranks(2, PROGRAM, tmp_path / "parts" / "run", "block", option)
    assert [job.lines(rank) for rank in range(2)] == [expected] * 2


def test_a_model_that_was_built_in_parts_goes_on_from_a_checkpoint(fork_ranks, in_parts, whole, tmp_path):
    folder = shutil.copytree(in_parts[1], tmp_path / "run")
    shutil.rmtree(folder / "checkpoints" / "step-000000003")
    _check_rest(fork_ranks(2, PROGRAM, folder, "size"), whole)


@pytest.mark.soak
def test_it_goes_on_where_a_rank_does_not_see_the_files(fork_ranks, whole, tmp_path):
    fork_ranks(1, PROGRAM, tmp_path / "run", "whole", "max_steps=2")
    _check_rest(fork_ranks(2, PROGRAM, tmp_path / "run", "block", "apart=1"), whole)


def _check_rest(job, whole):
    """Check what 2 ranks print that have gone on from step 2."""
    for rank in range(2):
        lines = job.lines(rank)
        assert lines[0].startswith("from 2 to 3: ")
        assert lines[0].endswith(whole[0][0].split(", ", 4)[4])
        assert _tensors(lines) == _tensors(whole[0])


def _tensors(lines):
    """The hashes of the files with tensors of the last checkpoint; the others have the history of evaluations."""
    return [line for line in lines[2:] if not line.startswith("tag-start") and "state.json" not in line]


@pytest.mark.soak
def test_weights_are_loaded_before_the_first_step(fork_ranks, fork_python, whole, tmp_path):
    found = []
    for ranks, how in [(1, "whole"), (2, "block")]:
        folder = tmp_path / how / "run"
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints" / "tag-given").symlink_to(whole[1] / "checkpoints" / "step-000000002")
        found.append(fork_ranks(ranks, PROGRAM, folder, how, "load").lines(0))
    assert found[0] == found[1] != whole[0]


MESSAGES = {
    "a module": "TypeError: make_model is a Sequential, which each rank has built as a whole: give build the function",
    "no settings": "TypeError: parallel is a str; expected unisono.parallel.Shard(...)",
    "no model": "TypeError: make_model returned an int; expected a torch.nn.Module",
    "a failure": "ZeroDivisionError: division by zero",
    "unknown name": "ValueError: by= names '9', which is not a submodule of the model",
    "too many replicas": "ValueError: replicas=3 cannot share 2 ranks evenly",
    "sharing": "ValueError: Shard gives back the memory of parameters, and '0.weight' shares its memory "
    "with '1.weight'",
    "by rank": "RankMismatchError: the model differs between ranks: '0.weight' of rank 1 is not that of rank 0 (2 of 8 "
    "parameters differ). Every rank must build the same model: call torch.manual_seed",
    "uninitialised": "RankMismatchError: the model differs between ranks: '2.weight' of rank 1",
    "within": "ValueError: a part of the model was built by unisono.parallel.build itself",
    "a call": "UnisonoError: Sequential was built by unisono.parallel.build, so each rank has a part of its parameters",
    "a copy": "UnisonoError: a model that was built by unisono.parallel.build cannot be copied or pickled",
    "a write": "ValueError: parameter '1.weight' was added or changed after unisono.parallel.build",
    "without parallel": "so each rank has the part of it that this needs, and Trainer was given parallel=None: give",
    "other settings": "and Trainer was given parallel=Shard(by=('1',)",
    "changed": "ValueError: parameter '4.weight' was added or changed after unisono.parallel.build",
    "digest at the end": "UnisonoError: trainer.digest needs the whole model, and one that was built by",
    "a call at the end": "UnisonoError: Sequential was called outside of trainer.step",
    "reads by rank": "RankMismatchError: ranks read different parameters, or different values, while they build "
    "the model (rank 0: Linear.weight",
}


def test_each_mistake_is_told_on_all_ranks(fork_ranks):
    job = fork_ranks(2, REFUSALS)
    for rank in range(2):
        told = dict(line.split(": ", 1) for line in job.lines(rank))
        assert told.keys() == MESSAGES.keys()
        assert not {name: told[name] for name, message in MESSAGES.items() if message not in told[name]}
