"""Process groups find their members: again and again in one job, in every generation, at other addresses."""

import json
import os
import subprocess
import sys
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from ports import free_port
from printed import printed

TIMEOUT_S = 60
MEET = """
import os
from unisono.launch import rendezvous_patch
rendezvous_patch.install(os.environ)
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

def meet():
    dist.init_process_group("gloo", rank=0, world_size=1)
    seen = _get_default_store().check(["mark"])
    _get_default_store().set("mark", "here")
    dist.destroy_process_group()
    return seen
"""


@pytest.fixture
def store_port():
    """The port of a launcher's store; pytest would keep the store itself longer than the test."""
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=TIMEOUT_S), wait_for_workers=False)
    yield store.port
    del store


@pytest.fixture
def run(rank_host, tmp_path):
    """Run a program in a process of its own, where torch can be changed: one that has imported it."""

    def run(source, **variables):
        script = tmp_path / "script.py"
        script.write_text(source)
        variables |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "1"}
        codes, _ = rank_host.run(1, script, folder=tmp_path, environment=variables)
        assert (codes, (tmp_path / "err0").read_text()) == ([0], "")
        return (tmp_path / "out0").read_text().split()

    return run


def test_a_second_group_sees_nothing_of_the_first(run, store_port):
    source = MEET + "print(meet(), meet(), meet())"
    assert run(source, MASTER_PORT=str(store_port)) == ["False", "False", "False"]


AFRESH = """
import json, os, sys
from unisono.launch.hang.status_block import StatusBlock, create
from unisono.launch.hang.call_recorder import install
page, (ask, question) = StatusBlock(create()), os.pipe()
install(page, ask=ask, dump=-1)
from unisono.launch import rendezvous_patch
rendezvous_patch.install(os.environ)
told = ["torch" in sys.modules]
import torch, torch.distributed as dist
for _ in range(3):
    dist.init_process_group("gloo", rank=0, world_size=1)
    store = dist.distributed_c10d._get_default_store()
    told.append(store.check(["mark"]))
    store.set("mark", "here")
    dist.monitored_barrier()
    dist.barrier()
    dist.destroy_process_group()
print(json.dumps([told, [call.name for call in page.calls() if call.epoch == 1]]))
"""


def test_torch_that_is_imported_afterwards_is_patched_and_its_calls_are_recorded(store_port):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store_port)}
    done = subprocess.run(
        [sys.executable, "-c", AFRESH],
        env={**environment, "WORLD_SIZE": "1"}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [[False] * 4, ["init_process_group", "monitored_barrier", "barrier"]]


def test_a_generation_sees_nothing_of_the_one_before(run, store_port):
    for restarts in range(3):
        variables = {"MASTER_PORT": str(store_port), "TORCHELASTIC_RESTART_COUNT": str(restarts)}
        assert run(MEET + "print(meet())", **variables) == ["False"]


def test_a_store_at_an_address_of_the_scripts_own_listens_on_loopback_only(warm_launcher):
    result = warm_launcher.run_script(
        """
        import os, sys
        from pathlib import Path
        import torch.distributed as dist

        port = int(sys.argv[1])
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
        dist.init_process_group("gloo")
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for row in Path(table).read_text().splitlines()[1:] if Path(table).exists() else ():
                address, state = row.split()[1], row.split()[3]
                if address.endswith(f":{port:04X}") and state == "0A":
                    print(address.split(":")[0])
        dist.destroy_process_group()
        """,
        free_port(),
        ranks=1,
    )
    assert (result.stderr, printed(result.stdout)) == ("", {0: ["0100007F"]})
