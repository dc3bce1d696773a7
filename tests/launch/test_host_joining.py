"""What happens to a host that joins a running job may not disturb the others, and the other way round."""

import os
import signal
import subprocess
import time

import pytest
from host_network import Hosts, finish
from host_training import EARLY, TRAIN, await_line, sha_of

SLOW_NEWCOMER = TRAIN.replace("torch.manual_seed(3)", 'time.sleep(2 * os.path.exists("slow"))\ntorch.manual_seed(3)')


def start_joining(hosts: Hosts, *, stayers: int, pause_s: str) -> tuple[list[subprocess.Popen[bytes]], str]:
    """Start a job, and a host that joins it, whose rank takes two seconds to its Trainer; return both in this order.

    The text is what the last host of the job has printed.
    """
    (hosts.folder / "script.py").write_text(SLOW_NEWCOMER)
    flags = (*EARLY, f"1:{stayers + 1}")
    jobs = [hosts.start_rank(host, "script.py", pause_s, ranks=1, flags=flags) for host in range(stayers)]
    await_line(jobs[-1], "working", stream="stdout")
    (hosts.folder / "slow").touch()
    jobs.append(hosts.start_rank(stayers, "script.py", pause_s, ranks=1, flags=flags))
    told = await_line(jobs[-2], "which start now")
    return jobs, told


@pytest.mark.soak
@pytest.mark.usefixtures("third_host")
@pytest.mark.parametrize("delay_s", [0.0, 1.0])
def test_the_leader_is_lost_while_a_host_joins(hosts, calm_sha, delay_s):
    jobs, told = start_joining(hosts, stayers=2, pause_s="0.5")
    time.sleep(delay_s)
    os.kill(jobs[0].pid, signal.SIGKILL)
    (hosts.folder / "slow").unlink()
    lost, stayer, newcomer = [finish(job) for job in jobs]
    assert (lost.returncode, stayer.returncode) == (-signal.SIGKILL, 0), told + stayer.stderr
    assert sha_of(stayer.stdout) == calm_sha
    assert "its launcher was killed: rank 0 on host 1 now" in stayer.stderr
    assert newcomer.returncode == 1
    assert "this host has not joined the job: " in newcomer.stderr
    assert "leads the job now; start this host again" in newcomer.stderr


@pytest.mark.usefixtures("third_host")
@pytest.mark.parametrize(
    ("delay_s", "stayers"),
    [(0.0, 1), *(pytest.param(*each, marks=pytest.mark.soak) for each in [(0.0, 2), (1.0, 1), (1.0, 2)])],
)
def test_ctrl_c_on_a_host_that_joins_ends_that_host_alone(hosts, calm_sha, stayers, delay_s):
    jobs, told = start_joining(hosts, stayers=stayers, pause_s="0.5")
    time.sleep(delay_s)
    os.kill(jobs[-1].pid, signal.SIGINT)
    *stay, newcomer = [finish(job) for job in jobs]
    assert newcomer.returncode == 130, newcomer.stderr
    assert "unisono: interrupted" in newcomer.stderr
    assert [job.returncode for job in stay] == [0] * stayers, told + stay[-1].stderr + newcomer.stderr
    assert sha_of(stay[0].stdout) == calm_sha
    assert "has given up joining: interrupted; it had not joined yet" in stay[-1].stderr


@pytest.mark.soak
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_host_waits_for_its_place_ends_that_host_alone(hosts, calm_sha, signum):
    """The job has no Trainer yet, before which no host gets ranks."""
    (hosts.folder / "script.py").write_text(SLOW_NEWCOMER.replace("2 *", "4 *"))
    (hosts.folder / "slow").touch()
    first = hosts.start_rank(0, "script.py", "0.1", ranks=2, flags=(*EARLY, "1:2"))
    await_line(first, "host 0 of 1")
    late = hosts.start_rank(1, "script.py", "0.1", ranks=1, flags=(*EARLY, "1:2"))
    time.sleep(2)
    os.kill(late.pid, signum)
    done, ended = finish(first), finish(late)
    assert ended.returncode == 128 + signum, ended.stderr
    assert done.returncode == 0, done.stderr
    assert sha_of(done.stdout) == calm_sha
    assert "joins with" not in done.stderr
