"""A name server that does not answer, as on a machine that is cut off, delays no job and is not worth a word."""

import subprocess
import sys

import pytest
from host_network import HostNetwork, Hosts, finish, obstacle

SILENT = """
import socket
server = socket.socket(type=socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
print(flush=True)
input()
"""
TRAIN = """
import os, signal, sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import unisono


def loss(model, batch):
    return model(batch[0]).square().mean(1)


torch.manual_seed(0)
model = nn.Linear(4, 2)
trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=4)
for batch in trainer.batches(TensorDataset(torch.randn(64, 4)), batch_size=8):
    trainer.step(loss, batch)
    if unisono.rank() == 1 and trainer.steps_done == 3 and not os.path.exists(sys.argv[1]):
        open(sys.argv[1], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
print("steps", trainer.steps_done)
"""


@pytest.fixture
def cut_off(tmp_path, tmp_path_factory, start_host):
    """A host whose name server receives questions, and does not answer."""
    if obstacle() is not None:
        pytest.skip(f"several hosts cannot be made here: {obstacle()}")
    network = HostNetwork(1)
    network.give_name_server(0, "127.0.0.1")
    command = network.command(0, sys.executable, "-c", SILENT)
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    hosts = Hosts(network, tmp_path, tmp_path_factory.mktemp, start_host)
    try:
        assert server.stdout.readline() == "\n"
        yield hosts
        for launcher in hosts.launchers:
            launcher.check_nothing_is_left()
    finally:
        hosts.close()
        server.communicate("\n", timeout=60)
        network.close()


def test_a_silent_name_server_delays_no_job_and_no_new_rank(cut_off, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    job = finish(cut_off.start(0, "run", "-n", "3", "train.py", str(tmp_path / "killed")))
    assert job.returncode == 0, job.stderr
    assert job.stdout == "[0-2] steps 8\n"
    *_, replaced, epoch = said = job.stderr.splitlines()
    assert len(said) == 3 and "rank 1 was killed by SIGKILL" in replaced and epoch.startswith("epoch 1"), job.stderr
    assert float(replaced.rpartition(", ")[2].removesuffix(" s")) < 5, job.stderr  # a question takes 10 s
