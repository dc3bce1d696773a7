"""The leader of a running job tells of it at the endpoint, also if the host of that was lost and comes back."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from ports import free_port
from unisono.launch.hosts.addresses import HostAddresses
from unisono.launch.hosts.announcement import Announcement, running_prefix
from unisono.launch.hosts.endpoint import listen
from unisono.launch.hosts.host_settings import HostSettings
from unisono.launch.hosts.own_store import connect
from unisono.tcp_store import LOOPBACK, serve_store

ENDPOINT, LEADER = "127.0.0.2", "127.0.0.3"


def until(holds: Callable[[], Any], seconds: float = 30.0) -> Any:
    end_s = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.02)
    return found


@pytest.fixture
def told():
    """What an announcement says, where nothing is at the endpoint at first, and its settings."""
    settings = HostSettings(endpoint_host=ENDPOINT, endpoint_port=int(free_port()), min_hosts=1, max_hosts=2)
    addresses = HostAddresses(endpoint=ENDPOINT, local=LEADER, interface="lo", hosts_endpoint=False, listen="")
    own = serve_store(LOOPBACK, listen(LOOPBACK, 0))
    said: list[str] = []
    announcement = Announcement(
        settings,
        addresses,
        hello={"address": LEADER},
        own=(LOOPBACK, own.port),
        admit=lambda hello: {"for": hello},
        say=said.append,
    )
    yield settings, said
    announcement.close()
    connect((LOOPBACK, own.port), "knock").set("1", "{}")  # the thread that answers ends with this
    time.sleep(0.1)


def test_hosts_hear_of_the_job_at_the_leader_and_at_an_endpoint_that_has_come_back(told):
    settings, said = told
    until(lambda: said)
    assert said == [f"nothing answers at {settings.endpoint}; hosts can join at {LEADER}:{settings.endpoint_port} now"]
    assert (
        connect((LEADER, settings.endpoint_port), running_prefix(settings)).get("leader") == b'{"address": "127.0.0.3"}'
    )
    time.sleep(1.5)  # it has been announced there for a while
    back = serve_store(ENDPOINT, listen(ENDPOINT, settings.endpoint_port))
    found = connect((ENDPOINT, back.port), running_prefix(settings))
    until(lambda: found.check(["leader"]))
    assert found.get("leader") == b'{"address": "127.0.0.3"}'
