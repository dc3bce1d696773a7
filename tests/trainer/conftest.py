"""Reference runs that several tests compare with, each made once in a session and worker process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def plain_python(*command: object) -> list[str]:
    """Run a script without any launcher; return its lines of standard output."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=120, env=environ, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.fixture(scope="session")
def digits_on_one_rank() -> list[str]:
    return plain_python(ROOT / "examples" / "digits.py", "--epochs", 3)


@pytest.fixture(scope="session")
def language_model_on_one_rank() -> list[str]:
    return plain_python(ROOT / "examples" / "language_model.py", "--steps", 3)


@pytest.fixture(scope="session")
def variants_on_one_rank() -> dict[str, str]:
    return digests(plain_python(Path(__file__).parent / "programs" / "variants.py"))


@pytest.fixture(scope="session")
def optimizers_on_one_rank() -> dict[str, str]:
    return digests(plain_python(Path(__file__).parent / "programs" / "optimizers.py", "auto"))


@pytest.fixture(scope="session")
def sparse_on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder of a run that one rank has begun, and the digests."""
    folder = tmp_path_factory.mktemp("sparse")
    found = digests(plain_python(Path(__file__).parent / "programs" / "sparse.py", folder, "auto"), least=13)
    return folder / "begun", {name.removeprefix("auto: "): sha for name, sha in found.items()}


def digests(lines: list[str], *, least: int = 25) -> dict[str, str]:
    found = dict(re.findall(r"^(.+) = ([0-9a-f]{64})$", "\n".join(lines), re.MULTILINE))
    assert len(found) >= least
    return found
