"""Tables in files in a Trainer: the bits of memory, on several ranks, with servers, after kills and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "table_files.py"
STEPS = 6


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()


@pytest.fixture(scope="module")
def in_memory(fork_python):
    return fork_python(PROGRAM, "-", STEPS, "-", "-")[0].split()[-1]


@pytest.mark.usefixtures("here")
def test_one_rank_gives_the_bits_of_memory(fork_python, in_memory):
    assert fork_python(PROGRAM, "rows", STEPS, "-", "-")[0].split()[-1] == in_memory


@pytest.mark.usefixtures("here")
def test_ranks_that_are_killed_are_replaced_by_some_that_map_the_same_rows(run_ranks, in_memory):
    job = run_ranks(2, PROGRAM, "rows", STEPS, "-", "0:2,1:4")
    assert job.sha() == in_memory
    assert "rank 0 was killed by SIGKILL" in job.said and "rank 1 was killed by SIGKILL" in job.said


@pytest.mark.usefixtures("here")
def test_servers_that_are_killed_go_on_with_the_rows(run_ranks, in_memory):
    job = run_ranks(2, PROGRAM, "rows", STEPS, "2,4", "1:3", flags=["--servers", "1"])
    assert job.sha() == in_memory
    assert job.said.count("it is started anew with its rows") == 2


@pytest.mark.usefixtures("here")
def test_a_run_goes_on_with_another_number_of_ranks(run_ranks, fork_python, in_memory):
    fork_python(PROGRAM, "rows", 3, "-", "-", "run")
    job = run_ranks(2, PROGRAM, "rows", STEPS - 1, "-", "-", "run")
    assert job.sha() != in_memory
    assert fork_python(PROGRAM, "-", STEPS, "-", "-", "run")[0].split()[-1] == in_memory
