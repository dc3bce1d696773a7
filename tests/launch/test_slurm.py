"""Jobs under a real Slurm, whose nodes are hosts with a network between them. `make schedulers` runs them all."""

import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import host_network
import pytest
import slurm_cluster
from host_network import HostNetwork
from slurm_cluster import SlurmCluster

UNISONO = (sys.executable, "-m", "unisono")
TRAIN = """
import sys, time
import torch
import torch.nn.functional as F
import unisono
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(6, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))
directory, epochs, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, seed=5, directory=directory or None)
for epoch in trainer.epochs(epochs):
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"), batch)
        time.sleep(pause_s)
trainer.print("weights sha256:", trainer.digest())
job = unisono.init()
trainer.print("place:", job.num_nodes, job.world_size)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Slurm on two hosts; the tests are skipped where it cannot run."""
    for reason in (host_network.obstacle(), slurm_cluster.obstacle()):
        if reason is not None:
            pytest.skip(f"Slurm cannot be started here: {reason}")
    network = HostNetwork(2)
    try:
        started = SlurmCluster(network, 2, tmp_path_factory.mktemp("slurm"))
        yield started
        started.close()
    finally:
        network.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that all hosts share, with a script."""
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def await_text(cluster: SlurmCluster, path: Path, pattern: str, *, poke: Callable[[], object] = bool) -> str:
    """Wait until a log matches; return it."""
    end_s = time.monotonic() + 90
    while not re.search(pattern, text := path.read_text() if path.exists() else ""):
        assert time.monotonic() < end_s, f"{pattern!r} did not come:\n{text}\n{cluster.call('squeue')}"
        time.sleep(0.3)
        poke()
    return text


def alone(epochs: int) -> str:
    """The script with arguments in place of those of the command line."""
    return TRAIN.replace("sys.argv[1], int(sys.argv[2]), float(sys.argv[3])", f"'', {epochs}, 0.0")


def submit(cluster: SlurmCluster, folder: Path, *words: str) -> tuple[str, Path]:
    """Submit a job that needs its nodes alone; return its number and its log."""
    said = cluster.call(
        *UNISONO, "run", "--on", "slurm", "--sbatch=--exclusive", "--save-time", "20", *words, folder=folder
    )
    found = re.fullmatch(r"unisono: submitted job (\d+); its output goes to (\S+), and `squeue -j \1` shows it\n", said)
    assert found is not None, said
    return found[1], folder / found[2]


def test_a_submitted_job_on_two_nodes_has_the_bits_of_one_process(cluster, folder, run_ranks):
    _, log = submit(cluster, folder, "--nnodes", "2", "-n", "1", "train.py", "", "2", "0")
    text = await_text(cluster, log, r"place: 2 2\n|error")
    one = run_ranks(1, alone(2))
    assert f"weights sha256: {one.sha()}" in text
    assert "unisono: host 0 of 2, rank 0 of 2" in text and "unisono: host 1 of 2, rank 1 of 2" in text


@pytest.mark.soak
@pytest.mark.parametrize(
    ("flags", "program", "place"),
    [
        (["-N", "2", "--ntasks-per-node", "1"], [*UNISONO, "run", "-n", "2"], "2 4"),
        (["-N", "2", "--ntasks-per-node", "2"], [sys.executable], "2 4"),
        (["-N", "1", "-n", "3"], [sys.executable], "1 3"),
    ],
)
def test_srun_starts_launchers_or_ranks(cluster, folder, run_ranks, flags, program, place):
    said = cluster.call("srun", *flags, *program, "train.py", "", "2", "0", folder=folder)
    one = run_ranks(1, alone(2))
    assert f"weights sha256: {one.sha()}" in said
    assert f"place: {place}\n" in said


@pytest.mark.soak
def test_several_launchers_on_a_machine_are_refused(cluster, folder):
    done = cluster.run("srun", "-N", "1", "-n", "2", *UNISONO, "run", "-n", "2", "train.py", folder=folder)
    assert done.returncode == 2
    assert (
        "srun has started 2 launchers on 1 machine, and each starts all ranks of its machine: use srun" in done.stdout
    )


@pytest.mark.soak
def test_srun_checks_its_hosts(cluster, folder):
    done = cluster.run("srun", "-N", "2", "--ntasks-per-node", "1", *UNISONO, "hosts", "check", folder=folder)
    assert done.returncode == 0
    assert done.stdout.count("2 hosts can form a job") == 2


@pytest.mark.soak
def test_a_preempted_job_saves_is_requeued_and_ends_with_the_bits_of_an_undisturbed_one(cluster, folder, run_ranks):
    number, log = submit(cluster, folder, "--nnodes", "2", "-n", "1", "train.py", "run", "12", "0.1")
    await_text(cluster, log, "epoch +2/12")
    cluster.call("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1")
    await_text(cluster, log, "unisono: requeued to go on from the newest checkpoint")
    # Slurm waits two minutes before it starts a requeued job.
    text = await_text(
        cluster,
        log,
        r"place: 2 2\n",
        poke=lambda: cluster.call("scontrol", "update", f"JobId={number}", "StartTime=now"),
    )
    assert re.search(r"resumed after step \d", text)
    one = run_ranks(1, alone(12))
    assert f"weights sha256: {one.sha()}" in text


@pytest.mark.soak
def test_a_cancelled_job_is_not_requeued(cluster, folder):
    number, log = submit(cluster, folder, "-n", "1", "train.py", "run", "100", "0.1")
    await_text(cluster, log, "epoch +1/100")
    cluster.call("scancel", number)
    end_s = time.monotonic() + 60
    while number in (queue := cluster.call("squeue", "-h", "-o", "%i").split()):
        assert time.monotonic() < end_s, queue
        time.sleep(0.3)
    assert "SIGTERM received" in log.read_text() and "requeued" not in log.read_text()
    assert "JobState=CANCELLED" in cluster.call("scontrol", "show", "job", number)
