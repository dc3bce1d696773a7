"""What `unisono hosts check` finds in the facts of hosts and the links between them."""

from dataclasses import replace

from unisono.launch.host_check.check_table import table_of
from unisono.launch.host_check.facts import HostFacts
from unisono.launch.host_check.findings import Findings, find
from unisono.launch.host_check.links import Link

GOOD = Link(round_trip_s=1e-4, clock_offset_s=0.0, bytes_per_s=1.2e9)


def network(count: int) -> tuple[list[HostFacts], dict[tuple[int, int], Link]]:
    """Hosts that are all alike, on a network of 10 Gbit/s."""
    hosts = [
        HostFacts(
            name=f"h{host}",
            address=f"10.0.0.{host + 1}",
            interface="eth0",
            mtu=9000,
            versions={"Python": "3.11", "torch": "2.13.0", "unisono": "0.1.0"},
            cores=8,
            memory_nbytes=64_000_000_000,
            cpu="AVX2, some processor",
            gpus=("H100", "H100"),
        )
        for host in range(count)
    ]
    return hosts, {(i, j): GOOD for i in range(count) for j in range(count) if i != j}


def test_nothing_is_odd_about_equal_hosts():
    hosts, links = network(4)
    assert find(hosts, links) == Findings()
    text = table_of(hosts, links, find(hosts, links), own=1)
    assert "on all 4 hosts: Python 3.11, torch 2.13.0, unisono 0.1.0, AVX2, some processor, 8 cores" in text
    assert "2 x H100" in text and "4 hosts can form a job" in text


def test_the_host_with_another_version_is_named_and_a_job_would_be_refused():
    hosts, links = network(3)
    hosts[1] = replace(hosts[1], versions={**hosts[1].versions, "torch": "2.12.0"})
    found = find(hosts, links)
    (problem,) = found.problems
    assert problem.startswith("torch: 2.12.0 on host 1, h1 (10.0.0.2), and 2.13.0 on the other 2 hosts; a job refuses")
    text = table_of(hosts, links, found, own=0)
    assert "TORCH" in text and "can form a job" not in text


def test_of_two_hosts_that_differ_both_are_named():
    hosts, links = network(2)
    hosts[1] = replace(hosts[1], gpus=("H100",), cpu="AVX512, some processor")
    found = find(hosts, links)
    assert found.problems == []
    assert [note.partition(";")[0] for note in found.notices] == [
        "CPU: AVX2, some processor on host 0, h0 (10.0.0.1), AVX512, some processor on host 1, h1 (10.0.0.2)",
        "GPUs: 2 x H100 on host 0, h0 (10.0.0.1), 1 x H100 on host 1, h1 (10.0.0.2)",
    ]


def test_a_host_all_of_whose_links_are_slow_is_named_and_not_its_partners():
    hosts, links = network(4)
    for pair in links:
        if 2 in pair:
            links[pair] = replace(GOOD, bytes_per_s=1.2e8)
    (note,) = find(hosts, links).notices
    assert note == "host 2, h2 (10.0.0.3) is slow: 960 Mbit/s at best, where the others have 9.6 Gbit/s"


def test_a_host_far_away_is_named():
    hosts, links = network(3)
    for pair in links:
        if 0 in pair:
            links[pair] = replace(GOOD, round_trip_s=4e-3)
    (note,) = find(hosts, links).notices
    assert note.startswith(
        "host 0, h0 (10.0.0.1) is far: 4.00 ms for a round trip at least, where the others have 0.10 ms"
    )


def test_a_single_slow_link_is_named():
    hosts, links = network(4)
    links[1, 3] = replace(GOOD, bytes_per_s=1.2e7)
    (note,) = find(hosts, links).notices
    assert note.startswith("the link from host 1 to host 3 is slow: 96.0 Mbit/s, where 9.6 Gbit/s is usual")


def test_a_pair_that_cannot_connect_and_a_wrong_clock_are_named():
    hosts, links = network(3)
    links[1, 2] = Link(problem="Connection refused")
    links[0, 1] = replace(GOOD, clock_offset_s=-7.25)
    found = find(hosts, links)
    (problem,), (note,) = found.problems, found.notices
    assert problem.startswith("host 1, h1 (10.0.0.2) cannot connect to host 2, h2 (10.0.0.3): Connection refused; let")
    assert note.startswith("the clock of host 1, h1 (10.0.0.2) is 7.2 s behind that of host 0")
    text = table_of(hosts, links, found, own=0)
    assert "no connection" in text and "-7.2 s" in text


def test_many_hosts_have_one_row_each():
    hosts, links = network(9)
    links[4, 7] = replace(GOOD, bytes_per_s=1e9, round_trip_s=2e-3)
    text = table_of(hosts, links, find(hosts, links), own=0)
    row = next(line for line in text.splitlines() if line.startswith("4 ") and "ms" in line and "h4" not in line)
    assert "2.00 ms (4 to 7)" in row and "8.0 Gbit/s (4 to 7)" in row
    assert len(text.splitlines()) < 40
