"""Jobs on a Ray cluster of several nodes on this machine: placement, bits, failures, lost nodes, mistakes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: `make ray` installs it")

from ray_cluster import RayCluster

TRAIN = """
import os, sys, time, torch, unisono
from torch import nn
from torch.nn import functional as F

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 2))
trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=4, seed=5)
data = torch.utils.data.TensorDataset(torch.randn(480, 8), torch.randint(0, 2, (480,)))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


for _ in trainer.epochs(int(sys.argv[1]) if len(sys.argv) > 1 else 2):
    for batch in trainer.batches(data, batch_size=24):
        trainer.step(loss, batch)
        open(f"step.{unisono.rank()}", "w").write(str(trainer.steps_done))
        time.sleep(float(os.path.exists("slowly")) / 10)
        while os.path.exists("hold") and trainer.steps_done == 5:
            time.sleep(0.01)
        if os.path.exists("fail") and trainer.steps_done == 3 and unisono.rank() == 1:
            raise ValueError("bad batch")
print("digest", trainer.digest(), unisono.rank(), os.environ["UNISONO_HOST"], flush=True)
"""


@pytest.fixture(scope="module")
def cluster():
    with tempfile.TemporaryDirectory(prefix="r") as folder, RayCluster(Path(folder), [2, 1]) as cluster:
        yield cluster


@pytest.fixture
def program(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def command(cluster, *words):
    return [sys.executable, "-m", "unisono", "run", "--on", "ray", "--ray-address", cluster.address, *words]


def run(cluster, *words, timeout=150):
    return subprocess.run(command(cluster, *words), capture_output=True, text=True, timeout=timeout, check=False)


def digests(out):
    return {(int(rank), host): digest for digest, rank, host in re.findall(r"digest (\S+) (\d+) (\S+)", out)}


def test_ranks_are_placed_over_nodes_and_have_the_bits_of_one_process(cluster, program):
    done = run(cluster, "--num-workers", "3", "train.py")
    assert done.returncode == 0, done.stderr
    environment = {**os.environ, "UNISONO_HOST": "x"}
    alone = subprocess.check_output([sys.executable, "train.py"], text=True, timeout=60, env=environment)
    found = digests(done.stdout)
    assert {rank for rank, _ in found} == {0, 1, 2} and len({host for _, host in found}) == 2
    assert set(found.values()) == set(digests(alone).values())


def test_a_rank_that_fails_ends_the_job_with_its_report(cluster, program):
    (program / "fail").touch()
    done = run(cluster, "--num-workers", "3", "--recover", "off", "train.py")
    assert done.returncode == 1, done.stderr
    assert "rank 1 failed: ValueError: bad batch" in done.stderr and "train.py:" in done.stderr
    assert "Traceback (most recent call last)" not in done.stderr.replace("[1] Traceback", "")


def test_ctrl_c_ends_the_ranks_of_all_nodes(cluster, program):
    (program / "hold").touch()
    job = subprocess.Popen(command(cluster, "--num-workers", "3", "train.py"), stderr=subprocess.PIPE, text=True)
    await_steps(program, 3, 5)
    job.send_signal(signal.SIGINT)
    assert job.wait(timeout=60) == 130
    job.stderr.close()
    assert_free(cluster, 3)


def test_when_the_driver_is_killed_nothing_is_left(cluster, program):
    (program / "hold").touch()
    job = subprocess.Popen(command(cluster, "--num-workers", "3", "train.py"), stderr=subprocess.DEVNULL)
    await_steps(program, 3, 5)
    job.kill()
    job.wait()
    assert_free(cluster, 3)


def await_steps(folder, ranks, step):
    end_s = time.monotonic() + 90
    while time.monotonic() < end_s:
        files = [*folder.glob("step.*")]
        if len(files) == ranks and all((file.read_text() or "0") == str(step) for file in files):
            return
        time.sleep(0.05)
    raise TimeoutError([file.read_text() for file in folder.glob("step.*")])


def assert_free(cluster, cpus):
    """Ray has its cores back, and no rank is left."""
    code = f"""
import ray, time
ray.init({cluster.address!r}, log_to_driver=False, logging_level=50)
end_s = time.monotonic() + 40
while ray.available_resources().get("CPU", 0) < {cpus} and time.monotonic() < end_s:
    time.sleep(0.1)
assert ray.available_resources()["CPU"] == {cpus}, ray.available_resources()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=80)
    end_s = time.monotonic() + 40
    while subprocess.run(["pgrep", "-f", str(Path.cwd())], capture_output=True, check=False).stdout:
        assert time.monotonic() < end_s, "ranks are left"
        time.sleep(0.1)


FUNCTION = """
import sys, torch, unisono, unisono.ray


class Found:
    def __init__(self, rank):
        self.rank = rank


def sum_of(values, fail):
    import unisono.comm as comm
    unisono.init()
    if fail and unisono.rank() == 1:
        raise ValueError("bad value")
    return Found(unisono.rank()), float(comm.all_reduce(torch.tensor(float(values[unisono.rank()]))))


if __name__ == "__main__":
    try:
        found = unisono.ray.run(sum_of, ([1, 2, 3], len(sys.argv) > 2), num_workers=3, address=sys.argv[1])
    except unisono.errors.LaunchError as error:
        print("refused:", error)
    else:
        print([(each.rank, total) for each, total in found])
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_function_is_called_on_all_ranks_and_its_results_are_returned(cluster, program, fails):
    (program / "driver.py").write_text(FUNCTION)
    words = [sys.executable, "driver.py", cluster.address, *(["fail"] if fails else [])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    if fails:
        assert "refused: the ranks were ended, with exit code 1; the reason is above" in done.stdout
        assert "rank 1 failed: ValueError: bad value" in done.stderr
    else:
        assert "[(0, 6.0), (1, 6.0), (2, 6.0)]" in done.stdout, done.stderr


def test_a_job_waits_for_room_and_says_so(cluster, program):
    job = subprocess.Popen(command(cluster, "--num-workers", "5", "train.py"), stderr=subprocess.PIPE, text=True)
    assert (
        "waiting for Ray to place 5 ranks of 1 CPU each: the cluster has 3 CPUs, 3 of them free."
        in job.stderr.readline()
    )
    job.send_signal(signal.SIGINT)
    assert job.wait(timeout=30) == 130
    job.stderr.close()


def test_a_lost_node_is_replaced_by_one_that_ray_finds(program):
    for name in ("hold", "slowly"):
        (program / name).touch()
    with tempfile.TemporaryDirectory(prefix="r") as folder, RayCluster(Path(folder), [1, 1, 1]) as cluster:
        words = command(cluster, "--num-workers", "2", "train.py", "100")
        job = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        await_steps(program, 2, 5)
        cluster.kill(next(number for number in (1, 2) if cluster.runs(number, "train.py")))
        (program / "hold").unlink()
        told = ""
        while "has joined with rank" not in told:  # the time limit of tests bounds this
            line = job.stderr.readline()
            assert line, told
            told += line
        (program / "slowly").unlink()
        out, err = job.communicate(timeout=100)
    assert job.returncode == 0, told + err
    assert "Ray has lost node" in told and "a launcher starts there" in told
    assert len(set(digests(out).values())) == 1
