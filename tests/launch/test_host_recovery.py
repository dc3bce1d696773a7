"""Jobs on several hosts, which are network namespaces, go on after the loss of a rank or a host, with the same bits."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from host_network import Hosts, finish
from host_training import EARLY, await_line, go_on, hold, sha_of, write


@pytest.mark.soak  # as beside another rank, and as by a spare where each host has one rank
def test_a_killed_rank_is_replaced_on_its_host(hosts, calm_sha):
    jobs = hosts.run(write(hosts), "0.01", "1", ranks=1)
    assert [job.returncode for job in jobs] == [0, 0], jobs[0].stderr + jobs[1].stderr
    for job in jobs:
        assert re.search(r"unisono: rank 1 was killed by SIGKILL in forward of step 4; replaced, \d", job.stderr), job
    assert sha_of(jobs[0].stdout) == calm_sha
    assert "place: 1 2 2 1" in jobs[1].stdout


def test_a_killed_rank_is_replaced_beside_one_with_which_it_shares_memory(hosts, calm_sha):
    jobs = hosts.run(write(hosts), "0.01", "1", ranks=2)
    assert [job.returncode for job in jobs] == [0, 0], jobs[0].stderr + jobs[1].stderr
    for job in jobs:
        assert re.search(r"unisono: rank 1 was killed by SIGKILL in forward of step 4; replaced, \d", job.stderr), job
    assert sha_of(jobs[0].stdout) == calm_sha
    assert "place: 3 4 2 2" in jobs[1].stdout


def test_a_spare_process_takes_the_place_of_a_rank_of_its_host(hosts, calm_sha):
    jobs = hosts.run(write(hosts), "0.01", "1", "host1", ranks=1, flags=("--spares", "1"))
    assert [job.returncode for job in jobs] == [0, 0], jobs[0].stderr + jobs[1].stderr
    for job in jobs:
        assert "unisono: rank 1 was killed by SIGKILL in forward of step 4; replaced by a spare, " in job.stderr, (
            jobs[0].stderr,
            jobs[1],
        )
    assert sha_of(jobs[0].stdout) == calm_sha
    assert "place: 1 2 2 1" in jobs[1].stdout


def start(
    hosts: Hosts, count: int, *, least: int, pause_s: float = 0.1, flags: tuple[str, ...] = ()
) -> list[subprocess.Popen[bytes]]:
    """Start a job of one rank on each host, and wait until its last rank has done two steps."""
    flags = ("--nnodes", f"{least}:{count}", *flags)
    started = [hosts.start_rank(host, write(hosts), str(pause_s), ranks=1, flags=flags) for host in range(count)]
    last = started[-1].stdout
    assert last is not None
    assert b"working" in last.readline()
    return started


SOAK = pytest.mark.soak


@pytest.mark.usefixtures("third_host")
@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=SOAK), pytest.param(2, marks=SOAK)])
def test_the_run_goes_on_without_a_lost_host(hosts, calm_sha, lost):
    jobs = start(hosts, 3, least=2)
    os.kill(jobs[lost].pid, signal.SIGKILL)
    done = {host: finish(job) for host, job in enumerate(jobs) if host != lost}
    assert finish(jobs[lost]).returncode == -signal.SIGKILL
    text = "".join(job.stderr + job.stdout for job in done.values())
    assert [job.returncode for job in done.values()] == [0, 0], text
    assert sha_of(text) == calm_sha
    new_host = 1 if lost == 0 else 0
    name = f"host {lost}, host{lost} (10.97.0.{lost + 1})"
    for job in done.values():
        assert f"unisono: {name}, its launcher was killed: rank {lost} on host {new_host} now, " in job.stderr
    assert "place: 0 3 2 2" in text or lost == 1


@pytest.mark.parametrize("lost", [pytest.param(0, marks=SOAK), 1])
def test_a_host_that_loses_its_fork_server_says_so(hosts, calm_sha, lost):
    jobs = [start_one(hosts, host, "1:2", "0.1") for host in range(2)]
    await_line(jobs[1], "working", stream="stdout")
    (store_process,) = psutil.Process(jobs[lost].pid).children()
    (fork_server,) = store_process.children()
    fork_server.kill()
    gone, other = finish(jobs[lost]), finish(jobs[1 - lost])
    assert gone.returncode == 1 and "unisono: the fork server was killed by SIGKILL" in gone.stderr
    assert other.returncode == 0 and sha_of(gone.stdout + other.stdout) == calm_sha, other.stderr
    name = f"host {lost}, host{lost} (10.97.0.{lost + 1})"
    assert f"unisono: {name}, its fork server was killed by SIGKILL: rank {lost} on host " in other.stderr


@pytest.mark.soak
@pytest.mark.usefixtures("third_host")
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_spare_processes_take_the_ranks_of_a_lost_host(hosts, calm_sha, lost):
    jobs = start(hosts, 3, least=2, pause_s=0.3, flags=("--spares", "1"))
    deadline_s = time.monotonic() + 30
    while len([*hosts.folder.glob("spare.*")]) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    os.kill(jobs[lost].pid, signal.SIGKILL)
    done = [finish(job) for job in jobs]
    text = "".join(job.stderr + job.stdout for job in done)
    assert [job.returncode for job in done if job.returncode >= 0] == [0, 0], text
    assert sha_of(text) == calm_sha
    new_host = 1 if lost == 0 else 0
    assert text.count(f": rank {lost} on host {new_host} now, by a spare, ") == 2, text


@pytest.mark.soak
@pytest.mark.usefixtures("third_host")
@pytest.mark.parametrize("lost", [0, 2])
def test_hosts_go_on_without_one_that_is_cut_off_and_that_one_ends(hosts, calm_sha, lost):
    jobs = start(hosts, 3, least=1)
    try:
        hosts.network.set_link(lost, "down")
        done = {host: finish(job) for host, job in enumerate(jobs)}
    finally:
        hosts.network.set_link(lost, "up")
    cut = done.pop(lost)
    text = "".join(job.stderr + job.stdout for job in done.values())
    assert [job.returncode for job in done.values()] == [0, 0], text + cut.stderr
    assert sha_of(text) == calm_sha
    for job in done.values():
        assert f"(10.97.0.{lost + 1}), has not answered for 3 s" in job.stderr
    assert cut.returncode == 1
    assert re.search(r"does? not answer|do not answer|may go on without this side, which is 1 of ", cut.stderr), (
        cut.stderr
    )


@pytest.mark.soak
@pytest.mark.parametrize("lost", [0, 1])
def test_a_job_that_has_too_few_hosts_left_ends_and_says_so(hosts, lost):
    jobs = start(hosts, 2, least=2)
    os.kill(jobs[lost].pid, signal.SIGKILL)
    other = finish(jobs[1 - lost])
    assert finish(jobs[lost]).returncode == -signal.SIGKILL
    assert other.returncode == 1
    assert f"host {lost}, host{lost} (10.97.0.{lost + 1}), its launcher was killed; 1 rank ended" in other.stderr


@pytest.mark.soak
@pytest.mark.usefixtures("third_host")
def test_hosts_are_lost_one_after_the_other(hosts, calm_sha):
    jobs = start(hosts, 3, least=1, pause_s=0.3)
    os.kill(jobs[0].pid, signal.SIGKILL)
    time.sleep(0.2)  # the second one is lost while the run recovers from the loss of the first
    os.kill(jobs[1].pid, signal.SIGKILL)
    last = finish(jobs[2])
    for job in jobs[:2]:
        finish(job)
    assert last.returncode == 0, last.stderr
    assert sha_of(last.stdout) == calm_sha
    assert "place: 0 3 1 3" in last.stdout


@pytest.mark.soak
@pytest.mark.usefixtures("third_host")
def test_of_two_jobs_on_the_same_hosts_only_the_one_that_loses_a_launcher_changes(hosts, calm_sha):
    calm = [
        hosts.start_rank(host, write(hosts), "0.1", ranks=1, flags=("--rdzv-endpoint", "host1:29600"))
        for host in range(2)
    ]
    jobs = start(hosts, 3, least=2)
    os.kill(jobs[0].pid, signal.SIGKILL)
    finish(jobs[0])
    for job, lost in [(finish(jobs[1]), True), (finish(jobs[2]), True), *((finish(each), False) for each in calm)]:
        assert job.returncode == 0, job.stderr
        assert ("its launcher was killed" in job.stderr) == lost
        assert "weights" not in job.stdout or sha_of(job.stdout) == calm_sha


@pytest.mark.soak
@pytest.mark.usefixtures("third_host")
def test_with_a_token_the_run_goes_on_as_well(hosts, calm_sha):
    finish(hosts.start(0, "token", "token"))
    jobs = start(hosts, 3, least=2, flags=("--rdzv-token-file", "token"))
    os.kill(jobs[0].pid, signal.SIGKILL)
    finish(jobs[0])
    done = [finish(job) for job in jobs[1:]]
    assert [job.returncode for job in done] == [0, 0], done[0].stderr + done[1].stderr
    assert sha_of(done[0].stdout + done[1].stdout) == calm_sha


def start_one(
    hosts: Hosts, host: int, nnodes: str, *arguments: str, ranks: int = 1, flags: tuple[str, ...] = ()
) -> subprocess.Popen[bytes]:
    return hosts.start_rank(host, write(hosts), *arguments, ranks=ranks, flags=(*EARLY, nnodes, *flags))


def test_a_host_that_comes_late_brings_ranks_and_one_that_dies_meanwhile_changes_nothing(hosts, calm_sha):
    finish(hosts.start(0, "token", "token"))
    token = ("--rdzv-token-file", "token")
    hold(hosts)
    first = start_one(hosts, 0, "1:2", "0.25", ranks=2, flags=token)
    await_line(first, "working", stream="stdout")
    lost = start_one(hosts, 1, "1:2", "0.25", ranks=2, flags=token)
    told = await_line(first, "unisono: host 1, host1 (10.97.0.2), joins with ranks 2-3, which start now")
    await_line(lost, "joins the running job as host 1")  # before that, it cannot say what happens to it
    os.kill(lost.pid, signal.SIGKILL)
    finish(lost)
    hold(hosts)
    late = start_one(hosts, 1, "1:2", "0.25", ranks=2, flags=token)
    go_on(hosts, new=2)
    told += await_line(first, "has joined")
    done = [finish(first), finish(late)]
    assert [job.returncode for job in done] == [0, 0], told + done[0].stderr + done[1].stderr
    said = told + done[0].stderr
    assert "unisono: host 1, host1 (10.97.0.2), its launcher was killed; it had not joined yet" in said, said
    assert re.search(r"host 2, host1 \(10.97.0.2\), has joined with ranks 2-3, \d", told)
    assert "joins the running job as host 2: ranks 2-3 of 4" in done[1].stderr
    assert sha_of(done[0].stdout) == calm_sha
    assert "place: 3 4 2 2" in done[1].stdout
    assert "does not know the token" not in told + done[0].stderr + done[1].stderr


@pytest.mark.soak
@pytest.mark.usefixtures("third_host")
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("token", [False, True])
def test_a_lost_host_comes_back_and_takes_ranks_from_the_others(hosts, calm_sha, lost, token):
    finish(hosts.start(0, "token", "token"))
    flags = ("--rdzv-token-file", "token") if token else ()
    jobs = start(hosts, 2, least=1, pause_s=0.8, flags=flags)
    os.kill(jobs[lost].pid, signal.SIGKILL)
    finish(jobs[lost])
    other = jobs[1 - lost]
    told = await_line(other, "its launcher was killed")
    if lost == 0:
        told += await_line(other, "hosts can join at 10.97.0.2:29500 now")
    hold(hosts)
    # The host of the endpoint hears of the job once a second, and would begin one of its own before that.
    back = start_one(hosts, lost, "1:2", "0.8", flags=("--rdzv-conf", "last_call_timeout=30", *flags))
    go_on(hosts, new=1)
    told += await_line(other, "has joined")
    done = [finish(other), finish(back)]
    assert [job.returncode for job in done] == [0, 0], told + done[0].stderr + done[1].stderr
    assert re.search(rf"host 2, host{lost} \(10.97.0.{lost + 1}\), has joined with rank 1, \d", told)
    assert sha_of(done[0].stdout) == calm_sha
    assert "place: 1 2 2 1" in done[1].stdout


@pytest.mark.soak
@pytest.mark.usefixtures("third_host")
def test_a_host_that_cannot_join_is_told_why_and_the_run_goes_on(hosts, calm_sha):
    jobs = start(hosts, 2, least=1, pause_s=1.5)
    full = finish(start_one(hosts, 2, "1:2", "0.1"))
    assert full.returncode == 2
    assert "this host cannot join it: it has 2 hosts, which is all that its --nnodes allows" in full.stderr
    done = [finish(job) for job in jobs]
    assert [job.returncode for job in done] == [0, 0], done[0].stderr + done[1].stderr
    assert sha_of(done[0].stdout) == calm_sha


@pytest.mark.soak
def test_a_host_with_another_version_is_refused_by_a_running_job(hosts):
    folder = hosts.folder / "other" / "unisono-99.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: unisono\nVersion: 99\n")
    first = start_one(hosts, 0, "1:2", "0.8", ranks=2)
    await_line(first, "working", stream="stdout")
    where = ("--nnodes", "1:2", "--rdzv-endpoint", "host0:29500", "script.py", "0.1")
    command = hosts.network.command(1, sys.executable, "-m", "unisono", "run", *where)
    environment = {**os.environ, "PYTHONPATH": str(folder.parent)}
    late = subprocess.run(
        command, cwd=hosts.folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    reason = "hosts have different versions of unisono, and bits may depend on it"
    assert late.returncode == 2 and reason in late.stderr, late.stderr
    done = finish(first)
    assert done.returncode == 0
    assert f"unisono: refused host1 (10.97.0.2), which wants to join: {reason}" in done.stderr


@pytest.mark.soak
def test_a_host_is_turned_away_where_no_rank_is_left_for_it(hosts, calm_sha):
    first = start_one(hosts, 0, "1:2", "0.8", ranks=6)
    await_line(first, "working", stream="stdout")
    late = finish(start_one(hosts, 1, "1:2", "0.1"))
    reason = "it has 6 ranks for 6 virtual ranks, so none is left for another host"
    assert late.returncode == 2 and reason in late.stderr, late.stderr
    done = finish(first)
    assert done.returncode == 0 and sha_of(done.stdout) == calm_sha
    assert f"unisono: host 1, host1 (10.97.0.2), cannot join: {reason}" in done.stderr
    assert "it had not joined yet" not in done.stderr
