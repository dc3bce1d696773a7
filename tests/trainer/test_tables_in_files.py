"""Tables in files in a Trainer: the bits of memory, on several ranks, with servers, after kills and resumes."""

from __future__ import annotations

import shutil
import subprocess
import sys
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
def test_a_rank_is_replaced_where_the_disk_has_room_for_the_rows_once(in_memory):
    on_small_disk = (
        "unshare",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o size=640k none rows && "$@"',
        "-",
    )
    if (
        not shutil.which("unshare")
        or subprocess.run([*on_small_disk, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this machine lets nobody mount a small file system")
    command = (sys.executable, "-m", "unisono", "run", "-n", "2", str(PROGRAM), "rows", str(STEPS), "-", "1:4")
    done = subprocess.run([*on_small_disk, *command], capture_output=True, text=True, timeout=120, check=False)
    assert in_memory in done.stdout, done.stderr
    assert "rank 1 was killed by SIGKILL" in done.stderr and "replaced" in done.stderr


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
