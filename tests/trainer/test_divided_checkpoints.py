"""Checkpoints that the ranks of a divided run write in parts, and of which each rank reads its own part."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "divided_saved.py"


@pytest.fixture(scope="module")
def undisturbed(fork_python, tmp_path_factory):
    (line,) = fork_python(PROGRAM, tmp_path_factory.mktemp("undisturbed"), "")
    return line.removeprefix("from 0 ")


@pytest.fixture(scope="module")
def run_until_5(tmp_path_factory):
    """The directory of that run, empty until a test needs it: each test has a copy, and goes on."""
    return tmp_path_factory.mktemp("until_5") / "run"


@pytest.fixture
def saved(fork_ranks, run_until_5, tmp_path):
    """The directory of a run of which 3 ranks have written the checkpoints of steps 3 and 5 in parts."""
    if not run_until_5.exists():
        fork_ranks(3, PROGRAM, run_until_5, "block", "compare", "max_steps=5")
        folder = run_until_5 / "checkpoints"
        shutil.rmtree(folder / "step-000000005")
        (folder / "tag-parts").rename(folder / "step-000000005")
    return Path(shutil.copytree(run_until_5, tmp_path / "run"))


def regions(folder, name):
    """Return the place and the writer of each region of a file."""
    (entry,) = (each for each in json.loads((folder / "manifest.json").read_text())["files"] if each["name"] == name)
    stops = [each.split(" ") for each in entry["regions"]]
    starts = [0, *(int(stop) for stop, *_ in stops)]
    return [(start, int(stop), int(rank)) for start, (stop, _, rank) in zip(starts, stops, strict=False)]


def test_every_rank_has_written_its_parts_of_the_files_that_one_rank_would_write(saved):
    """The run has compared them, byte for byte."""
    for file in ("model.safetensors", "optimizer.safetensors", "ema.safetensors"):
        assert {rank for *_, rank in regions(saved / "checkpoints" / "step-000000005", file)} == {0, 1, 2}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("ranks", "how"), [(3, "block"), (4, "size"), (3, "zero1"), (4, "replicas"), (2, "stages"), (4, "both")]
)
def test_parts_of_ranks_make_the_files_that_one_rank_would_write(fork_ranks, tmp_path, undisturbed, ranks, how):
    job = fork_ranks(ranks, PROGRAM, tmp_path, how, "compare")
    assert [job.lines(rank) for rank in range(ranks)] == [[f"from 0 {undisturbed}"]] * ranks
    folder = tmp_path / "checkpoints" / "tag-parts"
    averages = () if how == "zero1" else ("ema.safetensors",)  # with zero=1, each rank has the whole average
    for file in ("model.safetensors", "optimizer.safetensors", *averages):
        assert {rank for *_, rank in regions(folder, file)} == {*range(ranks)}


@pytest.mark.soak
def test_parts_of_two_optimizers_make_the_same_files_too(fork_ranks, fork_python, tmp_path):
    expected = fork_python(PROGRAM, tmp_path / "whole", "", "two")
    job = fork_ranks(3, PROGRAM, tmp_path / "divided", "block", "two", "compare")
    assert [job.lines(rank) for rank in range(3)] == [expected] * 3


@pytest.mark.parametrize(
    "later",
    [
        [(2, "zero1"), (4, "replicas")],
        pytest.param([(4, "size"), (1, ""), (2, "block")], marks=pytest.mark.soak),
        pytest.param([(2, "replicas"), (4, "block")], marks=pytest.mark.soak),
    ],
)
def test_each_rank_reads_its_part_whoever_wrote_it(fork_ranks, saved, undisturbed, later):
    begun = 5
    for ranks, how in later[:-1]:
        fork_ranks(ranks, PROGRAM, saved, how, f"max_steps={begun + 1}")
        begun += 1
    ranks, how = later[-1]
    job = fork_ranks(ranks, PROGRAM, saved, how)
    assert [job.lines(rank) for rank in range(ranks)] == [[f"from {begun} {undisturbed}"]] * ranks


def test_a_damaged_part_is_told_with_its_writer_and_an_older_checkpoint_taken(fork_ranks, saved, undisturbed):
    newest = saved / "checkpoints" / "step-000000005"
    file = newest / "optimizer.safetensors"
    start, stop, _ = next(each for each in regions(newest, file.name) if each[2] == 1)
    data = bytearray(file.read_bytes())
    data[(start + stop) // 2] ^= 1
    file.write_bytes(data)
    job = fork_ranks(2, PROGRAM, saved, "block")
    assert [job.lines(rank) for rank in range(2)] == [[f"from 4 {undisturbed}"]] * 2
    assert f"bytes {start:,} to {stop:,}, which rank 1 wrote" in job.err
    assert "optimizer.safetensors" in job.err
    assert "Resuming from step 4 instead" in job.err


def test_a_missing_file_and_a_checkpoint_of_another_model_are_named(fork_ranks, saved):
    newest = saved / "checkpoints" / "step-000000005"
    job = fork_ranks(2, PROGRAM, saved, "block", "width=128", code=1)
    assert f"{newest} is a checkpoint of another model" in job.err
    assert "embedding.weight is float32[300, 64] there and float32[300, 128] here" in job.err
    for folder in (saved / "checkpoints").glob("step-*"):
        (folder / "model.safetensors").unlink()
    job = fork_ranks(2, PROGRAM, saved, "block", code=1)
    assert "checkpoints in" in job.err
    assert "are damaged; the newest" in job.err
    assert "model.safetensors" in job.err


@pytest.mark.parametrize(("how", "flags"), [("block", []), ("stages", ["--recover", "off"])])
def test_a_rank_that_dies_while_it_writes_leaves_the_older_checkpoints(run_ranks, tmp_path, undisturbed, how, flags):
    job = run_ranks(2, PROGRAM, tmp_path, how, "die=7", flags=["--max-restarts", "1", *flags])
    assert [job.lines(rank)[-1] for rank in range(2)] == [f"from 4 {undisturbed}"] * 2
    assert not [*(tmp_path / "checkpoints").glob(".tmp-*")]


@pytest.mark.parametrize("how", ["block", "stages"])
def test_ranks_that_do_not_see_the_files_leave_them_to_rank_0(fork_ranks, tmp_path, undisturbed, how):
    fork_ranks(2, PROGRAM, tmp_path, how, "apart=1", "max_steps=5")
    manifest = (tmp_path / "checkpoints" / "step-000000003" / "manifest.json").read_text()
    assert not re.search(r'[0-9a-f]{64} [0-9]+"', manifest)  # a region with its writer
    job = fork_ranks(2, PROGRAM, tmp_path, how, "apart=1")
    assert [job.lines(rank) for rank in range(2)] == [[f"from 5 {undisturbed}"]] * 2


@pytest.mark.parametrize(("ranks", "how"), [(2, "zero1"), pytest.param(4, "replicas", marks=pytest.mark.soak)])
def test_weights_are_loaded_into_the_parts_of_ranks(fork_ranks, fork_python, tmp_path, undisturbed, ranks, how):
    (expected,) = fork_python(PROGRAM, tmp_path / "whole", "", "load")
    assert expected != f"from 0 {undisturbed}"
    job = fork_ranks(ranks, PROGRAM, tmp_path / "divided", how, "load")
    assert [job.lines(rank) for rank in range(ranks)] == [[expected]] * ranks
