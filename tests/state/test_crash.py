"""A writer that is killed at any moment leaves a readable newest checkpoint; a full disk leaves the older ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unisono.state.checkpoint_store import CheckpointStore

CAMPAIGN = Path(__file__).with_name("crash_campaign.py")


def test_kills_at_random_moments_lose_nothing_committed(fork_python, tmp_path):
    assert json.loads("\n".join(fork_python(CAMPAIGN, tmp_path / "c", "random", 15, 1)))["kills"] == 15


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
def test_many_kills_at_random_moments_lose_nothing_committed(fork_python, tmp_path, seed):
    assert json.loads("\n".join(fork_python(CAMPAIGN, tmp_path / "c", "random", 500, seed)))["kills"] == 500


@pytest.mark.parametrize(
    ("kills", "seed"), [(5, 1), pytest.param(200, 2, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
def test_kills_lose_no_rows_of_tables_that_are_stored_by_their_changes(fork_python, tmp_path, kills, seed):
    found = json.loads("\n".join(fork_python(CAMPAIGN, tmp_path / "c", "increments", kills, seed)))
    assert found == {"kills": kills, "increments": kills}


def test_kills_before_every_call_that_changes_the_disk_lose_nothing_committed(fork_python, tmp_path):
    assert json.loads("\n".join(fork_python(CAMPAIGN, tmp_path / "c", "calls")))["kills"] > 40


LIMITED = """
import resource, sys, torch
from pathlib import Path
from unisono.errors import CheckpointError
from unisono.state.checkpoint_store import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]))
store.write(1, {"model": {"w": torch.ones(10)}}, {"step": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    store.write(2, {"model": {"w": torch.ones(100_000)}}, {"step": 2})
except CheckpointError as error:
    print(error)
"""


def test_a_full_disk_is_explained_and_leaves_the_older_checkpoints(fork_python, tmp_path):
    script = tmp_path / "limited.py"
    script.write_text(LIMITED)
    folder = tmp_path / "store"
    message = "\n".join(fork_python(script, folder))
    assert message.startswith(f"the checkpoint of step 2 was not written to {folder}: [Errno 27] File too large")
    assert "while writing model.safetensors. It needs 400," in message
    assert (
        "bytes are free there. Older checkpoints are untouched. Raise the limit on file sizes (`ulimit -f`)" in message
    )
    store = CheckpointStore(folder)
    assert [path.name for path in folder.iterdir()] == ["step-000000001"]
    found, errors = store.load_newest()
    assert errors == []
    assert torch.equal(found.groups["model"]["w"], torch.ones(10))


UNCLOSED = """
import sys, torch
from pathlib import Path
from unisono.state.checkpoint_store import CheckpointStore
from unisono.state.writer import BackgroundWriter
writer = BackgroundWriter(CheckpointStore(Path(sys.argv[1])), keep=2)
writer.submit(5, {"model": {"w": torch.ones(3_000_000)}}, {})  # for longer than the rest of the program takes
"""


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_an_interpreter_that_ends_finishes_the_checkpoint_and_ends(fork_python, tmp_path, fresh):
    (script := tmp_path / "unclosed.py").write_text(UNCLOSED)
    folder = tmp_path / "store"
    if fresh:
        subprocess.run([sys.executable, script, folder], check=True)
    else:
        fork_python(script, folder)
    found, errors = CheckpointStore(folder).load_newest()
    assert (found.info.step, errors) == (5, [])
