"""With --max-restarts, jobs on several hosts start the ranks of all hosts anew after a failure."""

import os
import re
import signal
import subprocess
import sys

import pytest
from host_network import Hosts, finish

MEET = """
import os, signal, sys, time
import torch, torch.distributed as dist
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
dist.init_process_group("gloo")
total = torch.tensor([rank + 10.0 * attempt])
dist.all_reduce(total)
print("met:", rank, attempt, os.environ["TORCHELASTIC_MAX_RESTARTS"], total.item(), flush=True)
FAULT
dist.barrier()
"""


def write(hosts: Hosts, fault: str) -> str:
    (hosts.folder / "script.py").write_text(MEET.replace("FAULT", fault))
    return "script.py"


def test_ranks_of_all_hosts_start_again_so_many_times_for_the_whole_job(hosts):
    """Ranks fail on one host and then on the other: the third failure is one too many."""
    script = write(hosts, "if rank == (1, 0, 1)[attempt]: raise ValueError(f'bad batch {attempt}')\ntime.sleep(60)")
    jobs = hosts.run(script, ranks=1, flags=("--max-restarts", "2"))
    told = [job.stderr for job in jobs]
    assert [job.returncode for job in jobs] == [1, 1], told
    for job in jobs:
        again = [line for line in job.stderr.splitlines() if "again" in line]
        assert again == [
            "unisono: host 1, host1 (10.97.0.2): rank 1 failed: ValueError: bad batch 0; starting all 2 ranks again "
            "(restart 1 of 2)",
            "unisono: host 0, host0 (10.97.0.1): rank 0 failed: ValueError: bad batch 1; starting all 2 ranks again "
            "(restart 2 of 2)",
        ]
    assert "unisono: rank 1 failed: ValueError: bad batch 2" in told[1]
    assert "unisono: host 1, host1 (10.97.0.2): rank 1 failed: ValueError: bad batch 2" in told[0]
    for rank, job in enumerate(jobs):
        met = re.findall(r"met: (.*)", job.stdout)
        assert met == [f"{rank} 0 2 1.0", f"{rank} 1 2 21.0", f"{rank} 2 2 41.0"]


def test_hosts_with_different_flags_are_refused_and_the_host_that_differs_is_named(hosts):
    script = write(hosts, "")
    flags = [("--max-restarts", "1", "--hang-report", "9"), ("--max-restarts", "2", "--hang-report", "9")]
    started = [hosts.start_rank(host, script, ranks=1, flags=flags[host]) for host in range(2)]
    jobs = [finish(process) for process in started]
    for job in jobs:
        told = "hosts were started with different --max-restarts: 1 on host0 (10.97.0.1), 2 on host1 (10.97.0.2)"
        assert job.returncode == 2 and f"{told}; start all with the same" in job.stderr, job.stderr
        assert "met:" not in job.stdout


@pytest.mark.soak
@pytest.mark.parametrize("host", [0, 1])
def test_a_host_whose_ranks_were_done_starts_them_again(hosts, host):
    fault = f"""
if rank == {host} and attempt == 0:
    dist.destroy_process_group()
    sys.exit(0)
time.sleep(1)
if attempt == 0:
    os.kill(os.getpid(), signal.SIGKILL)
"""
    jobs = hosts.run(write(hosts, fault), ranks=1, flags=("--max-restarts", "1"))
    assert [job.returncode for job in jobs] == [0, 0], jobs[0].stderr + jobs[1].stderr
    for rank, job in enumerate(jobs):
        assert f"rank {1 - host} was killed by SIGKILL; starting all 2 ranks again (restart 1 of 1)" in job.stderr
        assert re.findall(r"met: (.*)", job.stdout) == [f"{rank} 0 1 1.0", f"{rank} 1 1 21.0"]


@pytest.mark.soak
def test_the_same_error_twice_before_any_collective_ends_the_job(hosts):
    (hosts.folder / "script.py").write_text("import os\nif os.environ['RANK'] == '1': raise ValueError('typo')\n")
    jobs = hosts.run("script.py", ranks=1, flags=("--max-restarts", "3"))
    assert [job.returncode for job in jobs] == [1, 1]
    assert "the same error twice before any collective: not restarted again (2 of 3 left)" in " ".join(
        jobs[1].stderr.split()
    )
    assert all(job.stderr.count("starting all 2 ranks again") == 1 for job in jobs)


@pytest.mark.soak
@pytest.mark.parametrize("host", [0, 1])
def test_a_signal_while_ranks_start_again_ends_the_job(hosts, host):
    fault = """
if attempt == 1:
    time.sleep(60)
def stay(signum, frame):
    print("stays", flush=True)
    time.sleep(2)
    sys.exit(0)
signal.signal(signal.SIGTERM, stay)
if rank == 1:
    raise ValueError("bad batch")
time.sleep(60)
"""
    script = write(hosts, fault)
    jobs = [hosts.start_rank(each, script, ranks=1, flags=("--max-restarts", "1")) for each in range(2)]
    for line in jobs[0].stdout:
        if b"stays" in line:
            break
    os.kill(jobs[host].pid, signal.SIGINT)
    done = [finish(job) for job in jobs]
    assert [job.returncode for job in done] == [130, 130], done[0].stderr + done[1].stderr
    assert not any("again" in job.stderr for job in done)
    assert "unisono: interrupted" in done[host].stderr
    assert f"unisono: host {host}, host{host} (10.97.0.{host + 1}): interrupted" in done[1 - host].stderr


@pytest.mark.soak
@pytest.mark.usefixtures("third_host")
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_without_a_lost_host_all_ranks_start_again_on_the_others(hosts, lost):
    fault = "if attempt == 0: print('waits', flush=True); time.sleep(60)"
    flags = ("--nnodes", "2:3", "--max-restarts", "1")
    jobs = [hosts.start_rank(host, write(hosts, fault), ranks=1, flags=flags) for host in range(3)]
    for job in jobs:
        while b"waits" not in job.stdout.readline():
            pass
    os.kill(jobs[lost].pid, signal.SIGKILL)
    done = [finish(job) for job in jobs]
    text = "".join(job.stderr for job in done)
    del done[lost]
    assert [job.returncode for job in done] == [0, 0], text
    name = f"host {lost}, host{lost} (10.97.0.{lost + 1}), its launcher was killed"
    for job in done:
        assert f"unisono: {name}; starting all 3 ranks again (restart 1 of 1)" in job.stderr
    met = re.findall(r"met: (.*)", "".join(job.stdout for job in done))
    assert sorted(met) == [f"{rank} 1 1 33.0" for rank in range(3)]


RESUMES = """
import os, sys, time
import torch, unisono
import torch.nn.functional as F
torch.manual_seed(3)
model = torch.nn.Linear(6, 3)
data = torch.utils.data.TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))
trainer = unisono.Trainer(
    model, torch.optim.AdamW(model.parameters()), virtual_ranks=6, seed=5, progress=False, directory="run"
)
attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")
for epoch in trainer.epochs(4):
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(loss, batch)
        if "calm" not in sys.argv:
            time.sleep(0.1)
            if (trainer.rank, attempt, trainer.steps_done) == (1, "0", 10):
                sys.exit(3)
        if trainer.steps_done == 2:
            print("working", flush=True)
trainer.print("weights sha256:", trainer.digest())
job = unisono.init()
print("place:", job.rank, job.world_size, job.num_nodes, job.local_world_size, attempt, flush=True)
"""


@pytest.mark.soak
@pytest.mark.usefixtures("third_host")
@pytest.mark.parametrize("lost", [None, 0, 2])
def test_a_run_resumes_where_its_ranks_are_by_then(hosts, run_ranks, lost):
    """A host is lost and its rank moves; then a rank ends in a way after which none is replaced."""
    (hosts.folder / "script.py").write_text(RESUMES)
    flags = ("--nnodes", "1:3", "--max-restarts", "1")
    jobs = [hosts.start_rank(host, "script.py", ranks=1, flags=flags) for host in range(3)]
    while b"working" not in jobs[2].stdout.readline():
        pass
    if lost is not None:
        os.kill(jobs[lost].pid, signal.SIGKILL)
    done = [finish(job) for job in jobs]
    text = "".join(job.stdout + job.stderr for job in done)
    assert [job.returncode for job in done if job.returncode >= 0] == [0] * (3 if lost is None else 2), text
    assert "starting all 3 ranks again (restart 1 of 1)" in text
    calm = run_ranks(1, RESUMES.replace('"run"', "None"), "calm").sha()
    assert f"weights sha256: {calm}" in text
    assert len(re.findall(r"place: \d 3 " + ("3 1 1" if lost is None else "2 [12] 1"), text)) == 3, text


@pytest.mark.soak
def test_after_a_change_of_their_number_as_many_ranks_start_again(hosts, run_ranks):
    (hosts.folder / "script.py").write_text(RESUMES.replace("sleep(0.1)", "sleep(0.5)"))
    jobs = [hosts.start_rank(host, "script.py", ranks=1, flags=("--max-restarts", "1")) for host in range(2)]
    while b"working" not in jobs[1].stdout.readline():
        pass
    grown = finish(hosts.start(1, "scale", str(jobs[1].pid), "5"))
    assert grown.returncode == 0, grown.stderr
    done = [finish(job) for job in jobs]
    assert [job.returncode for job in done] == [0, 0], done[0].stderr + done[1].stderr
    assert all("starting all 5 ranks again (restart 1 of 1)" in job.stderr for job in done)
    calm = run_ranks(1, RESUMES.replace('"run"', "None"), "calm").sha()
    assert f"weights sha256: {calm}" in done[0].stdout
    assert [len(re.findall(r"place: \d 5 2 [23] 1", job.stdout)) for job in done] == [3, 2], done


@pytest.mark.soak
@pytest.mark.usefixtures("third_host")
@pytest.mark.parametrize("phase", ["ending", "starting"])
def test_the_leader_is_lost_while_ranks_start_again(hosts, phase):
    """While those of the first attempt take their time to end, or just after the next attempt has begun."""
    fault = """
if attempt == 0:
    def stay(signum, frame):
        print("stays", flush=True)
        time.sleep(1)
        sys.exit(0)
    signal.signal(signal.SIGTERM, stay)
    if rank == 1:
        raise ValueError("bad batch")
    time.sleep(60)
elif attempt == 1 and not os.path.exists("lost"):
    time.sleep(60)
"""
    flags = ("--nnodes", "2:3", "--max-restarts", "2")
    jobs = [hosts.start_rank(host, write(hosts, fault), ranks=1, flags=flags) for host in range(3)]
    awaited = b"stays" if phase == "ending" else b" 1 2 33.0"
    while awaited not in jobs[2].stdout.readline():
        pass
    (hosts.folder / "lost").touch()
    os.kill(jobs[0].pid, signal.SIGKILL)
    done = [finish(job) for job in jobs]
    text = "".join(job.stdout + job.stderr for job in done)
    assert [job.returncode for job in done] == [-signal.SIGKILL, 0, 0], text
    last = 1 if phase == "ending" else 2
    for job in done[1:]:
        assert f"starting all 3 ranks again (restart {last} of 2)" in job.stderr, text
    met = re.findall(rf"met: \d {last} 2 .*", "".join(job.stdout for job in done[1:]))
    assert len(met) == 3, text


@pytest.mark.soak
def test_a_host_that_has_not_started_its_ranks_yet_takes_part(hosts):
    (hosts.folder / "slow_module.py").write_text("import time\ntime.sleep(4)\n")
    fault = "if rank == 0 and attempt == 0: raise ValueError('early')\n"
    (hosts.folder / "script.py").write_text(MEET.replace("dist.init", fault + "dist.init", 1).replace("FAULT", ""))
    flags = ("--nnodes", "2", "--rdzv-endpoint", "host0:29500", "--max-restarts", "1", "--preload", "slow_module")
    command = hosts.network.command(1, sys.executable, "-m", "unisono", "run", *flags, "script.py")
    environment = {**os.environ, "PYTHONPATH": str(hosts.folder)}
    slow = subprocess.Popen(command, cwd=hosts.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    first = hosts.start_rank(0, "script.py", ranks=1, flags=("--max-restarts", "1"))
    done = [finish(first), finish(slow)]
    assert [job.returncode for job in done] == [0, 0], done[0].stderr + done[1].stderr
    for rank, job in enumerate(done):
        assert "rank 0 failed: ValueError: early; starting all 2 ranks again (restart 1 of 1)" in job.stderr
        assert re.findall(r"met: (.*)", job.stdout) == [f"{rank} 1 1 21.0"]
