"""A store of checkpoints in a folder of the test's own."""

from pathlib import Path

import pytest

from unisono.state.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "checkpoints")
