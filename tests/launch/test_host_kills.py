"""Processes of launchers on several hosts are killed at random moments, also while hosts meet.

A case is a seed: it draws the hosts, who is killed, and when. What is left must end properly, with the bits of an
undisturbed run where it goes on, and say which host was lost and why.
"""

import os
import random
import re
import signal
import time
from contextlib import suppress

import psutil
import pytest
from host_network import finish
from host_training import LARGE_TRAIN, await_line, write

CAUSES = {
    "launcher": "its launcher was killed",
    "store": "has closed its connection: its launcher has ended, or was killed",
    "fork server": "its fork server was killed by SIGKILL",
}
"""Which process of a launcher is killed, and how the other hosts call that."""
CONF = "last_call_timeout=0.5,keep_alive_interval=1,keep_alive_max_attempt=3"
MEETING_S, RUN_S = 15.0, 60.0
"""More than hosts need to notice that one has ended while they met, and to come to the end of a run."""


def kill(launcher: int, what: str) -> bool:
    """Kill a process of a launcher; return False if it does not run yet."""
    with suppress(psutil.NoSuchProcess, IndexError):
        process = psutil.Process(launcher)
        for _ in range(list(CAUSES).index(what)):
            process = process.children()[0]
        process.send_signal(signal.SIGKILL)
        return True
    return False


@pytest.mark.usefixtures("third_host")
@pytest.mark.parametrize("seed", [6, 9, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(100, 160))])
def test_a_host_of_which_a_process_is_killed_at_any_moment_is_named_and_the_others_end_or_go_on(hosts, calm_sha, seed):
    draw = random.Random(seed)
    count, ranks, token = draw.choice([2, 3]), draw.choice([1, 2]), draw.random() < 0.5
    is_range, meets = draw.random() < 0.6, draw.random() < 0.5
    lost, what, pause_s = draw.randrange(count), draw.choice(list(CAUSES)), draw.random()
    case = f"seed {seed}: {what} of host {lost} of {count}, range {is_range}, while they meet {meets}, {pause_s:.2f} s"
    flags = ("--nnodes", f"1:{count}" if is_range else str(count), "--rdzv-conf", CONF)
    if token:
        finish(hosts.start(0, "token", "token"))
        flags += ("--rdzv-token-file", "token")
    jobs = [hosts.start_rank(host, write(hosts), "0.1", ranks=ranks, flags=flags) for host in range(count)]
    if not meets:
        await_line(jobs[-1], "working", stream="stdout")
    time.sleep(pause_s)
    is_killed = kill(jobs[lost].pid, what)
    end_s = time.monotonic() + (MEETING_S if meets else RUN_S)
    while time.monotonic() < end_s and any(job.poll() is None for job in jobs):
        time.sleep(0.02)
    waiting = [host for host, job in enumerate(jobs) if job.poll() is None]
    for host in waiting:  # for another host, or the endpoint
        os.kill(jobs[host].pid, signal.SIGINT)
    done = [finish(job) for job in jobs]
    told = "\n".join([case, *(f"host {host}: {job.returncode}\n{job.stderr}" for host, job in enumerate(done))])
    assert "Traceback" not in told, told
    assert not waiting or (meets and (lost == 0 or not is_range)), told
    shas = {line.split()[-1] for job in done for line in job.stdout.splitlines() if "weights sha256" in line}
    assert shas <= {calm_sha}, told
    others = [job for host, job in enumerate(done) if host != lost]
    goes_on = not is_killed or (is_range and (lost > 0 or not meets))
    codes = {0} if goes_on else {0, 1, 2, 130} if meets else {1}
    assert {job.returncode for job in others} <= codes, told
    if is_killed and not meets:
        name = rf"unisono: host \d, {re.escape(f'host{lost} (10.97.0.{lost + 1}), {CAUSES[what]}')}"
        # On a busy machine, a host may come when the others have met, and perhaps after the loss.
        present = [job for job in others if "joins the running job" not in job.stderr]
        assert present and all(re.search(name, job.stderr) for job in present), told
        assert bool(shas) == is_range, told


@pytest.mark.usefixtures("third_host")
@pytest.mark.parametrize(
    ("seed", "is_killed"),
    [(0, True), *(pytest.param(seed, seed < 30, marks=pytest.mark.soak) for seed in range(1, 45))],
)
def test_a_host_that_is_lost_in_the_midst_of_a_large_sum_is_done_without(hosts, large_calm_sha, seed, is_killed):
    """Its launcher is killed, or it falls silent."""
    draw = random.Random(seed)
    ranks, lost, pause_s = draw.choice([1, 2]), draw.randrange(3), draw.uniform(0.0, 1.2)
    # All three begin together, also on a busy machine.
    flags = ("--nnodes", "1:3", "--rdzv-conf", CONF.replace("last_call_timeout=0.5", "last_call_timeout=30"))
    script = write(hosts, LARGE_TRAIN)
    jobs = [hosts.start_rank(host, script, "0.0", ranks=ranks, flags=flags) for host in range(3)]
    await_line(jobs[-1], "working", stream="stdout")
    time.sleep(pause_s)
    if is_killed:
        assert kill(jobs[lost].pid, "launcher")
    else:
        hosts.network.set_link(lost, "down")
    done = [finish(job) for host, job in enumerate(jobs) if host != lost]
    if not is_killed:
        hosts.network.set_link(lost, "up")
    finish(jobs[lost])
    told = "\n".join(f"{job.returncode}\n{job.stderr}" for job in done)
    assert [job.returncode for job in done] == [0, 0], told
    shas = {line.split()[-1] for job in done for line in job.stdout.splitlines() if "weights sha256" in line}
    assert shas == {large_calm_sha}, told
    assert all(f"host {lost}, host{lost} (10.97.0.{lost + 1}), " in job.stderr for job in done), told
