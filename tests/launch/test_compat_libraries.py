"""Scripts of libraries that are started by torchrun otherwise. They come with the extra `compat`."""

from pathlib import Path

import pytest

from printed import printed

PROGRAMS = Path(__file__).with_name("programs")


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("accelerate_script.py", {0: ["trained on 2"]}),
        # It imports for longer than all the others together.
        pytest.param("fabric_script.py", {0: ["trained as 0"], 1: ["trained as 1"]}, marks=pytest.mark.soak),
    ],
)
def test_a_training_script(warm_launcher, name, lines):
    result = warm_launcher.run("run", "-n", "2", str(PROGRAMS / name))
    assert result.returncode == 0, result.stderr
    assert printed(result.stdout) == lines
