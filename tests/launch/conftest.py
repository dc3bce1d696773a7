"""The launcher as a user runs it. A test that leaves a process behind fails."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import Launcher, LaunchHost


@pytest.fixture
def fresh_launcher(tmp_path: Path) -> Iterator[Launcher]:
    """A launcher whose processes are what a user's are."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.check_nothing_is_left()


@pytest.fixture
def launcher(fresh_launcher: Launcher) -> Launcher:
    """The fresh one, where a file of tests does not say otherwise."""
    return fresh_launcher


@pytest.fixture
def warm_launcher(tmp_path: Path, launch_host: LaunchHost | None) -> Iterator[Launcher]:
    """A launcher that does not import torch anew; for tests that are not about how a job starts."""
    launcher = Launcher(tmp_path, launch_host)
    yield launcher
    launcher.check_nothing_is_left()
