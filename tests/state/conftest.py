"""A store of checkpoints in a folder of the test's own."""

from pathlib import Path

import pytest

from unisono.state.checkpoint_store import CheckpointStore


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")
