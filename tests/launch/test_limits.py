"""A limit of the system is named, and the job ends: no rank is waited for that was never started."""

import shutil
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
REASON = "fork failed with EAGAIN (Resource temporarily unavailable): a limit of processes is reached"


@pytest.mark.parametrize(
    ("forks", "begin"),
    [
        (0, "unisono: the job's fork server could not be started: "),
        pytest.param(1, "unisono: rank 0 could not be started, 0 of 4 were: ", marks=pytest.mark.soak),
        (3, "unisono: rank 2 could not be started, 2 of 4 were: "),
    ],
)
def test_a_fork_that_fails_ends_the_job(warm_launcher, forks, begin):
    shutil.copy(PROGRAMS / "no_more_forks.py", warm_launcher.folder)
    warm_launcher.environment |= {"FORKS": str(forks), "PYTHONPATH": str(warm_launcher.folder)}
    script = warm_launcher.write("script.py", "import time\ntime.sleep(1000)")
    result = warm_launcher.run("run", "-n", "4", "--preload", "no_more_forks", script)
    assert result.returncode == 1
    assert result.stderr.startswith(f"{begin}{REASON}")
    assert result.stderr.endswith("; end other processes, raise the limit, or start fewer ranks; ending the job\n")
    assert len(result.stderr.splitlines()) == 1
