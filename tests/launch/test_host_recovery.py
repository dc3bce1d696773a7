"""Jobs on several hosts, which are network namespaces, go on after the loss of a rank or a host, with the same bits."""

import os
import re
import signal
import subprocess
import time

import pytest
from host_network import Hosts, finish

TRAIN = """
import os, sys, time
import torch
import torch.nn.functional as F
import unisono
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(6, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))
trainer = unisono.Trainer(model, optimizer, virtual_ranks=6, seed=5, progress=False)
steps, pause_s, wait = 0, float(sys.argv[1]), len(sys.argv) > 2
def loss(model, batch):
    if wait and not trainer.recovered and steps == 3 and trainer.rank == int(sys.argv[2]):
        os.kill(os.getpid(), 9)
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")
for epoch in trainer.epochs(3):
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(loss, batch)
        steps += 1
        if steps == 2 and trainer.rank == trainer.world_size - 1:
            print("working", flush=True)
        time.sleep(pause_s)
trainer.print("weights sha256:", trainer.digest())
job = unisono.init()
print("place:", job.rank, job.world_size, job.num_nodes, job.local_world_size, flush=True)
"""


def write(hosts: Hosts) -> str:
    (hosts.folder / "script.py").write_text(TRAIN)
    return "script.py"


def sha_of(text: str) -> str:
    found = re.search(r"weights sha256: (\w+)", text)
    assert found is not None, text
    return found[1]


@pytest.fixture
def calm_sha(run_ranks) -> str:
    """The digest of a run on one rank in which nothing happens."""
    return str(run_ranks(1, TRAIN.replace("float(sys.argv[1])", "0.0")).sha())


def test_a_killed_rank_is_replaced_on_its_host(hosts, calm_sha):
    jobs = hosts.run(write(hosts), "0.01", "1", ranks=1)
    assert [job.returncode for job in jobs] == [0, 0], jobs[0].stderr + jobs[1].stderr
    for job in jobs:
        assert re.search(r"unisono: rank 1 was killed by SIGKILL in forward of step 4; replaced, \d", job.stderr), job
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
