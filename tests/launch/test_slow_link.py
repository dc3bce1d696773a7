"""Jobs on two hosts whose link is slow: 100 Mbit/s, and 2 ms from one to the other."""

import re
from collections.abc import Iterator

import pytest
from host_network import HostNetwork, Hosts, NoSlowLinkError, SlowLink, obstacle
from host_training import sha_of

# 540 kB of gradient: above the size up to which all ranks send to all.
TRAIN = """
import os, socket, time
import torch
import torch.nn.functional as F
import unisono

def round_trip_s():
    # Of one byte between ranks 0 and 3, which are on different hosts.
    store = torch.distributed.distributed_c10d._get_default_store()
    if trainer.rank == 0:
        server = socket.create_server(("10.97.0.1", 0))
        store.set("port", str(server.getsockname()[1]))
        peer = server.accept()[0]
        for _ in range(5):
            peer.sendall(peer.recv(1))
    if trainer.rank == 3:
        peer = socket.create_connection(("10.97.0.1", int(store.get("port"))))
        times = []
        for _ in range(5):
            begun_s = time.monotonic()
            peer.sendall(b"x")
            peer.recv(1)
            times.append(time.monotonic() - begun_s)
        print("round trip:", min(times), flush=True)

torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Tanh(), torch.nn.Linear(400, 3))
data = torch.utils.data.TensorDataset(torch.randn(48, 300), torch.randint(0, 3, (48,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, seed=5, progress=False, sync=SYNC)
for epoch in trainer.epochs(2):
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"), batch)
trainer.print("weights sha256:", trainer.digest())
if trainer.world_size == 4:
    round_trip_s()
"""

DELAY_S = 0.002


@pytest.fixture(scope="module")
def slow_network(tmp_path_factory, start_host) -> Iterator[Hosts]:
    """Two hosts on a slow link; the tests are skipped where there can be none."""
    if (reason := obstacle()) is not None:
        pytest.skip(f"several hosts cannot be made here: {reason}")
    try:
        network = HostNetwork(2, link=SlowLink(bits_per_s=100_000_000, delay_s=DELAY_S))
    except NoSlowLinkError as error:
        pytest.skip(f"a slow link between hosts cannot be made here: {error}")
    hosts = Hosts(network, tmp_path_factory.mktemp("slow"), tmp_path_factory.mktemp, start_host)
    try:
        hosts._launch_host(0), hosts._launch_host(1)
        yield hosts
    finally:
        hosts.close()
        network.close()


@pytest.fixture
def slow_hosts(slow_network, tmp_path) -> Iterator[Hosts]:
    """Two hosts on a slow link. A test that leaves a process behind on one fails."""
    slow_network.folder, slow_network.launchers = tmp_path, []
    yield slow_network
    for launcher in slow_network.launchers:
        launcher.check_nothing_is_left()


@pytest.mark.parametrize(
    "sync",
    [
        pytest.param("None", id="each step"),
        pytest.param("unisono.DiLoCo(every=4)", id="DiLoCo", marks=pytest.mark.soak),
    ],
)
def test_a_slow_link_changes_no_bit(slow_hosts, run_ranks, sync):
    source = TRAIN.replace("SYNC", sync)
    (slow_hosts.folder / "script.py").write_text(source)
    two = slow_hosts.run("script.py")
    assert [job.returncode for job in two] == [0, 0], two[0].stderr + two[1].stderr
    assert sha_of(two[0].stdout) == run_ranks(1, source).sha()
    found = re.search(r"round trip: (\S+)", two[1].stdout)
    assert found is not None and float(found[1]) >= 2 * DELAY_S, two[1].stdout
