"""Errors and oddities of the hosts of a job, from their facts and the links between them. Pure.

Start reading at `find`.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unisono.launch.host_check.facts import HostFacts
from unisono.launch.host_check.links import Link
from unisono.watch.figures import format_bytes

__all__ = ["Findings", "find", "format_bandwidth", "pair_rounds", "properties"]

_SLOW = 0.5
"""A link or host is slow if its bandwidth is below this part of the others'."""
_LATE = 3.0
"""A link is late if its round trip takes this many times as long as the others' …"""
_LATE_S = 0.0002
"""… and this much longer."""
_CLOCK_S = 1.0
"""From here on, the offset of a clock is named."""
_MOST_LINKS = 6
_PAIR = 2

_WHY = {
    "CPU": "the bits of a run may depend on the vector instructions",
    "cores": "the slowest host sets the pace of a step",
    "memory": "the smallest host limits the model",
    "GPUs": "the slowest host sets the pace of a step",
    "MTU": "large packets may be lost between hosts with different sizes",
}


@dataclass(kw_only=True)
class Findings:
    """The findings of a check, as sentences for the user."""

    problems: list[str] = field(default_factory=list)
    """The findings that would make a job fail."""
    notices: list[str] = field(default_factory=list)
    """The findings that are odd but do not hinder a job."""


def properties(facts: HostFacts) -> dict[str, str]:
    """Return what should be equal on all hosts, by name, as texts."""
    gpus = Counter(facts.gpus)
    return {
        **facts.versions,
        "CPU": facts.cpu,
        "cores": str(facts.cores),
        "memory": format_bytes(facts.memory_nbytes),
        "GPUs": ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "none",
        **({"MTU": str(facts.mtu)} if facts.interface else {}),
    }


def pair_rounds(hosts: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs, such that each pair comes once and each host at most once in a round.

    The circle method of round-robin tournaments.

    >>> pair_rounds(2), pair_rounds(3)
    ([[(0, 1)]], [[(1, 2)], [(0, 2)], [(0, 1)]])
    >>> [len(pairs) for pairs in pair_rounds(6)], len({pair for pairs in pair_rounds(6) for pair in pairs})
    ([3, 3, 3, 3, 3], 15)
    """
    seats = list(range(hosts + hosts % 2))  # with an odd number, the last seat is empty
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], reversed(seats[len(seats) // 2 :]), strict=True)
        rounds.append(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < hosts))
        seats.insert(1, seats.pop())
    return rounds


def format_bandwidth(bytes_per_s: float) -> str:
    """Return a bandwidth as networks are sold, in bits.

    >>> format_bandwidth(1.18e9), format_bandwidth(117e6), format_bandwidth(12_500)
    ('9.4 Gbit/s', '936 Mbit/s', '0.1 Mbit/s')
    """
    mbits = bytes_per_s * 8 / 1e6
    return f"{mbits / 1000:.1f} Gbit/s" if mbits >= 1000 else f"{mbits:.{0 if mbits >= 100 else 1}f} Mbit/s"


def find(hosts: Sequence[HostFacts], links: Mapping[tuple[int, int], Link]) -> Findings:
    """Return what is wrong or odd. Hosts that differ from most are named; without a majority, all are.

    Args:
        hosts: The facts of each host, by number.
        links: What was measured from one host to another, for each direction.
    """
    found = Findings()
    told = [properties(facts) for facts in hosts]
    for name in told[0]:
        values = [each.get(name, "unknown") for each in told]
        if len(set(values)) == 1:
            continue
        if name in hosts[0].versions:
            found.problems.append(f"{_difference(name, values, hosts)}; a job refuses that: install the same on all")
        else:
            found.notices.append(f"{_difference(name, values, hosts)}; {_WHY[name]}")
    for (one, other), link in sorted(links.items()):
        if link.problem:
            found.problems.append(
                f"{_name(one, hosts)} cannot connect to {_name(other, hosts)}: {link.problem}; let all ports between "
                "the hosts through their firewalls, or choose a network with --local-addr"
            )
    for host in range(1, len(hosts)):
        link = links.get((0, host), Link(problem="not measured"))
        if not link.problem and abs(link.clock_offset_s) >= _CLOCK_S:
            way = "ahead of" if link.clock_offset_s > 0 else "behind"
            found.notices.append(
                f"the clock of {_name(host, hosts)} is {abs(link.clock_offset_s):.1f} s {way} that of host 0; the "
                "times in logs and events differ by that"
            )
    _find_slow({pair: link for pair, link in links.items() if not link.problem}, hosts, found)
    return found


def _find_slow(links: Mapping[tuple[int, int], Link], hosts: Sequence[HostFacts], found: Findings) -> None:
    """Note the hosts of which all links are slower than the others, and otherwise the links that are."""
    odd = set()
    for host in range(len(hosts)):
        own = [link for pair, link in links.items() if host in pair]
        others = [link for pair, link in links.items() if host not in pair]
        if not own or not others:
            continue
        best, usual = max(link.bytes_per_s for link in own), statistics.median(link.bytes_per_s for link in others)
        nearest = min(link.round_trip_s for link in own)
        usual_s = statistics.median(link.round_trip_s for link in others)
        if best < _SLOW * usual:
            odd.add(host)
            found.notices.append(
                f"{_name(host, hosts)} is slow: {format_bandwidth(best)} at best, where the others have "
                f"{format_bandwidth(usual)}"
            )
        elif nearest > _LATE * usual_s and nearest > usual_s + _LATE_S:
            odd.add(host)
            found.notices.append(
                f"{_name(host, hosts)} is far: {1e3 * nearest:.2f} ms for a round trip at least, where the others have "
                f"{1e3 * usual_s:.2f} ms"
            )
    rest = {pair: link for pair, link in links.items() if not odd & set(pair)}
    if len(rest) < _PAIR:
        return
    usual = statistics.median(link.bytes_per_s for link in rest.values())
    slow = sorted(
        (pair for pair, link in rest.items() if link.bytes_per_s < _SLOW * usual), key=lambda p: rest[p].bytes_per_s
    )
    for one, other in slow[:_MOST_LINKS]:
        found.notices.append(
            f"the link from host {one} to host {other} is slow: {format_bandwidth(rest[one, other].bytes_per_s)}, "
            f"where {format_bandwidth(usual)} is usual"
        )


def _difference(name: str, values: Sequence[str], hosts: Sequence[HostFacts]) -> str:
    """Return how hosts differ in a property: those that are unlike most, or all."""
    (common, count), *_ = Counter(values).most_common(1)
    if count * 2 > len(values):
        odd = [f"{value} on {_name(host, hosts)}" for host, value in enumerate(values) if value != common]
        return f"{name}: {', '.join(odd)}, and {common} on the other {'host' if count == 1 else f'{count} hosts'}"
    return f"{name}: " + ", ".join(f"{value} on {_name(host, hosts)}" for host, value in enumerate(values))


def _name(host: int, hosts: Sequence[HostFacts]) -> str:
    return f"host {host}, {hosts[host].title}"
