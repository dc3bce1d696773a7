"""Process groups find their members: again and again in one job, in every generation, at other addresses."""

import os
import subprocess
import sys
import textwrap
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from ports import free_port
from printed import printed

TIMEOUT_S = 60
MEET = """
import os
from unisono.launch import rendezvous_patch
{before}
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


def run(source, **variables):
    """Run a program in a process of its own, where torch can be changed."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")} | {"GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env={**environment, "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "1", **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.parametrize("before", ["", "import torch.distributed"], ids=["before torch", "after torch"])
def test_a_second_group_sees_nothing_of_the_first(store_port, before):
    source = MEET.format(before=before) + "print(meet(), meet(), meet())"
    assert run(source, MASTER_PORT=str(store_port)) == ["False", "False", "False"]


def test_a_generation_sees_nothing_of_the_one_before(store_port, rank_host, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(MEET.format(before="") + "print(meet())")
    variables = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "1"}
    for restarts in range(3):
        variables |= {"MASTER_PORT": str(store_port), "TORCHELASTIC_RESTART_COUNT": str(restarts)}
        codes, _ = rank_host.run(1, script, folder=tmp_path, environment=variables)
        told = [(tmp_path / name).read_text() for name in ("out0", "err0")]
        assert (codes, told) == ([0], ["False\n", ""])


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
