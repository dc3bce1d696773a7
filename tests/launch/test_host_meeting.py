"""A host that ends while hosts meet: the others do not wait for it, but for one in its place, or go on without it."""

import pytest
from host_network import Hosts, finish
from host_training import await_line, sha_of, write

MORTAL = """
import os, sys
from unisono.launch.hosts import meeting
from unisono.launch.hosts.addresses import find_addresses
from unisono.launch.hosts.arrival import arrive
from unisono.launch.hosts.host_settings import HostSettings
from unisono.launch.hosts.own_store import OwnStore
meeting._assign_ranks = lambda *_, **__: os._exit(3)  # its number is known, its ranks are not
least, most, token = int(sys.argv[1]), int(sys.argv[2]), open("token").read().strip() if len(sys.argv) > 3 else ""
settings = HostSettings(
    endpoint_host="host0", endpoint_port=29500, min_hosts=least, max_hosts=most, token=token, conf={CONF}
)
addresses = find_addresses(settings)
own = OwnStore(addresses, token, ranks=1, flags={{}})
arrive(settings, addresses, own, role="default", notice=print, warn=print)
"""
CONF = {"last_call_timeout": "1", "keep_alive_interval": "1", "keep_alive_max_attempt": "3"}
SOAK = pytest.mark.soak


def start(hosts: Hosts, host: int, nnodes: str, flags: tuple[str, ...]):
    conf = ",".join(f"{name}={value}" for name, value in CONF.items())
    return hosts.start_rank(
        host, write(hosts), "0.01", ranks=1, flags=("--nnodes", nnodes, "--rdzv-conf", conf, *flags)
    )


@pytest.mark.parametrize("token", [pytest.param(False, marks=SOAK), True])
def test_hosts_wait_for_another_one_in_place_of_a_host_that_ends_while_they_meet(hosts, calm_sha, token):
    flags, given = (("--rdzv-token-file", "token"), ("token",)) if token else ((), ())
    finish(hosts.start(0, "token", "token"))
    (hosts.folder / "mortal.py").write_text(MORTAL.format(CONF=CONF))
    first = start(hosts, 0, "2", flags)
    assert finish(hosts.start_python(1, "mortal.py", "2", "2", *given)).returncode == 3
    told = await_line(first, "before all hosts had met")
    assert "unisono: host1 (10.97.0.2): its launcher has ended before all hosts had met; waiting for others" in told
    again = start(hosts, 1, "2", flags)
    done = [finish(first), finish(again)]
    assert [job.returncode for job in done] == [0, 0], done[0].stderr + done[1].stderr
    assert sha_of(done[0].stdout + done[1].stdout) == calm_sha


@pytest.mark.usefixtures("third_host")
def test_the_others_begin_without_a_host_that_ends_while_they_meet_if_they_are_enough(hosts, calm_sha):
    (hosts.folder / "mortal.py").write_text(MORTAL.format(CONF=CONF))
    jobs = [start(hosts, host, "2:3", ()) for host in (0, 2)]
    assert finish(hosts.start_python(1, "mortal.py", "2", "3")).returncode == 3
    done = [finish(job) for job in jobs]
    assert [job.returncode for job in done] == [0, 0], done[0].stderr + done[1].stderr
    for job in done:
        assert "unisono: host1 (10.97.0.2): its launcher has ended before all hosts had met" in job.stderr
        assert " of 2, rank " in job.stderr
    assert sha_of(done[0].stdout + done[1].stdout) == calm_sha
