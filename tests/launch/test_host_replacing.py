"""What the agent of a host answers to that of the leader, which the test plays at the other end of its channel."""

import os
import select
import selectors
import socket
from pathlib import Path

import pytest

from unisono.launch.channel import Channel
from unisono.launch.generation import Generation
from unisono.launch.hosts.addresses import HostAddresses
from unisono.launch.hosts.host_replacing import HostReplacing
from unisono.launch.hosts.host_settings import HostSettings
from unisono.launch.hosts.job_hosts import JobHosts
from unisono.launch.launch_job import LaunchJob, Output
from unisono.launch.output.relay import Relay

ASK = {"do": "ask", "round": 1}
GIVE_UP = {"do": "give up", "reason": "", "exhausted": None}
DECIDE = {
    "do": "decide",
    "number": 1,
    "new": [1],
    "refill": [1],
    "newcomer": None,
    "came": [],
    "is_scaled": False,
    "places": {},
    "step": 3,
}
PLACE = {
    "host": 1,
    "hosts": 2,
    "first_rank": 1,
    "world_size": 2,
    "first_role_rank": 1,
    "role_world_size": 2,
    "master_addr": "10.0.0.1",
    "master_port": 29500,
    "identity": "host1",
}


class Agent:
    """Host 1 of two, with rank 1."""

    def __init__(self, nowhere):
        settings = HostSettings(endpoint_host="host0", endpoint_port=29500, min_hosts=2, max_hosts=2)
        addresses = HostAddresses(
            endpoint="10.0.0.1", local="10.0.0.2", interface="eth0", hosts_endpoint=False, listen=""
        )
        self.hosts = JobHosts(settings, addresses, ranks=1, role="default", flags={})
        self.leader = Channel(socket.socket(fileno=socket.dup(self.hosts.link)))
        self.leader.send(
            {
                "type": "joined",
                "is_late": False,
                "place": PLACE,
                "names": {"0": "host0", "1": "host1"},
                "ranks": {"0": 1, "1": 1},
                "nonce": "n",
                "has_torchrun": False,
            }
        )
        self.leader.send(
            {"type": "hosts", "members": [0, 1], "leader": 0, "term": 0, "store": ["10.0.0.1", 29500], "lost": {}}
        )
        assert [message["type"] for message in self.hosts.receive()] == ["joined", "hosts"]
        self.relay = Relay(
            selectors.PollSelector(),
            stdout=nowhere,
            stderr=nowhere,
            output=Output(),
            run_id="run",
            environment={},
        )
        job = LaunchJob(target="script.py", ranks=1, place=self.hosts.place)
        self.generation = Generation(job, attempt=0, relay=self.relay)
        self.forked = []
        self.replacing = HostReplacing(
            self.generation,
            hosts=self.hosts,
            enabled=True,
            server=None,  # nothing is asked of it here, nor are there spares
            relay=self.relay,
            number=0,
            completed=lambda entry: None,
            fork=lambda rank, files: self.forked.append(rank),
            spares=None,
        )
        self.files = self.generation.open(1)

    def hear(self, *entries):
        """Hear what the leader says; return what the agent tells it."""
        for entry in entries:
            self.replacing.on_said(0, entry)
        if not select.select([self.leader], [], [], 0)[0]:
            return []
        return [message["entry"]["do"] for message, _ in self.leader.receive()]

    def close(self):
        for file in self.files.values():
            os.close(file)
        self.generation.close()
        self.relay.drain([1])
        self.leader.close()
        self.hosts.close()


@pytest.fixture
def agent():
    with Path(os.devnull).open("w") as nowhere:
        agent = Agent(nowhere)
        yield agent
        agent.close()


def test_an_agent_tells_of_its_ranks_when_it_is_asked(agent):
    assert agent.hear(ASK) == ["ranks"]


@pytest.mark.parametrize("late", [ASK, DECIDE], ids=["ask", "decide"])
def test_an_agent_that_has_been_told_to_give_up_disregards_what_was_said_before_it_was_known(agent, late):
    assert agent.hear(GIVE_UP, late) == []
    assert agent.forked == []


def test_an_agent_whose_ranks_have_ended_is_asked_about_them_in_vain(agent):
    agent.generation.close()
    assert agent.hear(ASK) == []
