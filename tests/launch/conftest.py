"""The launcher as a user runs it. A test that leaves a process behind fails."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import Fork, Launcher


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.check_nothing_is_left()


@pytest.fixture
def warm_launcher(tmp_path: Path, fork_launcher: Fork | None) -> Iterator[Launcher]:
    """A launcher whose `run` does not import torch anew; for tests that are about the ranks of a job."""
    launcher = Launcher(tmp_path, fork_launcher)
    yield launcher
    launcher.check_nothing_is_left()
