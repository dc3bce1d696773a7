"""The kernel may take seconds to end a rank that crashed: others lose their connections, and are not the cause."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from unisono.launch.job_shutdown import JobShutdown

CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")
CRASH = """
    import os, resource, torch, torch.distributed as dist
    limit = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (limit, limit))
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        memory = bytearray(b"x") * 2**30
        os.abort()
    dist.all_reduce(torch.ones(1))
"""


class Ranks:
    """Rank 0 has lost a connection; rank 1 runs, or is being ended by the kernel."""

    running, failed = {0, 1}, {0}

    def __init__(self):
        self.dying = {1}

    def judge(self):
        return SimpleNamespace(sure=False, cause=SimpleNamespace(account={}))

    def look_at_leavers(self):
        pass

    def ends(self, *, failed):
        pass


def test_ranks_are_not_asked_to_end_while_the_kernel_ends_one():
    said, signals = [], []
    job = SimpleNamespace(shutdown_timeout_s=3.0, python=True)
    server = SimpleNamespace(resume=lambda: None, signal=lambda number, ranks, group: signals.append({*ranks}))
    shutdown = JobShutdown(job, relay=SimpleNamespace(say=said.append), server=server)
    ranks = Ranks()
    shutdown.cover(ranks, SimpleNamespace(end=lambda: None))
    began_s = time.monotonic()
    shutdown.begin_for_failure()
    while not said:
        time.sleep(0.01)
        shutdown.advance()
        assert time.monotonic() < began_s + 2.9
    told = "the job has failed; the cause is told when the kernel has ended rank 1; it may be writing a core dump"
    assert said == [told]
    assert not signals
    ranks.dying = set()
    while not signals:
        time.sleep(0.01)
        shutdown.advance()
        assert time.monotonic() < began_s + 2.9
    assert {1} in signals


def test_an_end_that_does_not_come_is_waited_for_as_long_as_other_ranks_are():
    signals = []
    job = SimpleNamespace(shutdown_timeout_s=0.8, python=True)
    server = SimpleNamespace(resume=lambda: None, signal=lambda number, ranks, group: signals.append({*ranks}))
    shutdown = JobShutdown(job, relay=SimpleNamespace(say=lambda text: None), server=server)
    shutdown.cover(Ranks(), SimpleNamespace(end=lambda: None))
    began_s = time.monotonic()
    shutdown.begin_for_failure()
    while not signals:
        time.sleep(0.01)
        shutdown.advance()
    assert time.monotonic() > began_s + 0.8


@pytest.mark.soak
@pytest.mark.skipif(
    not CORE_PATTERN.read_text().startswith("core") or not resource.getrlimit(resource.RLIMIT_CORE)[1],
    reason="core files are not written here, or not into the folder of the process",
)
def test_a_rank_that_crashes_with_a_large_core_dump_is_the_cause(warm_launcher):
    result = warm_launcher.run_script(CRASH, ranks=3)
    assert result.returncode == 134, result.stderr
    cores = [*warm_launcher.folder.glob("core*")]
    for core in cores:
        core.unlink()
    assert "unisono: rank 1 was killed by SIGABRT" in result.stderr
    assert cores
