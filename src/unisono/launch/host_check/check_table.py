"""The text that `unisono hosts check` prints, the same on all hosts. Pure. Start reading at `table_of`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from unisono.launch.host_check.facts import HostFacts
from unisono.launch.host_check.findings import Findings, format_bandwidth, properties
from unisono.launch.host_check.links import Link
from unisono.watch.figures import plural

__all__ = ["table_of"]

_MOST_HOSTS = 6
"""With more hosts than this, links are summed up for each host."""


def table_of(hosts: Sequence[HostFacts], links: Mapping[tuple[int, int], Link], findings: Findings, *, own: int) -> str:
    """Return the whole text.

    Args:
        hosts: The facts of each host, by number.
        links: What was measured from one host to another.
        findings: What is wrong or odd.
        own: The number of the host that prints; it is marked with an asterisk.
    """
    told = [properties(facts) for facts in hosts]
    equal = [name for name in told[0] if len({each.get(name) for each in told}) == 1]
    differing = [name for name in told[0] if name not in equal]
    where = f"on all {len(hosts)} hosts" if len(hosts) > 1 else "on this host"
    lines = [f"{where}: " + ", ".join(_phrase(name, told[0][name]) for name in equal)] if equal else []
    if len(hosts) > 1:
        rows = [["HOST", "NAME", "ADDRESS", "INTERFACE", "CLOCK", *(name.upper() for name in differing)]]
        for host, facts in enumerate(hosts):
            rows.append([
                f"{host}{'*' if host == own else ''}", facts.name, facts.address, facts.interface or "-",
                _clock(host, links), *(told[host].get(name, "-") for name in differing),
            ])  # fmt: skip
        lines += ["", *_aligned(rows), "", *_aligned(_link_rows(len(hosts), links))]
    lines += ["", *(f"error: {text}" for text in findings.problems), *(f"note: {text}" for text in findings.notices)]
    if not findings.problems:
        lines.append(f"{plural(len(hosts), 'host')} can form a job" if len(hosts) > 1 else "this host can run a job")
    return "\n".join(lines)


def _phrase(name: str, value: str) -> str:
    return {
        "cores": "1 core" if value == "1" else f"{value} cores",
        "memory": f"{value} memory",
        "GPUs": "no GPU" if value == "none" else value,
        "CPU": value,
    }.get(name, f"{name} {value}")


def _clock(host: int, links: Mapping[tuple[int, int], Link]) -> str:
    if host == 0:
        return "0"
    link = links.get((0, host))
    if link is None or link.problem:
        return "-"
    return f"{1e3 * link.clock_offset_s:+.1f} ms" if abs(link.clock_offset_s) < 1 else f"{link.clock_offset_s:+.1f} s"


def _link_rows(hosts: int, links: Mapping[tuple[int, int], Link]) -> list[list[str]]:
    if hosts <= _MOST_HOSTS:
        rows = [["FROM", "TO", "ROUND TRIP", "BANDWIDTH"]]
        for (one, other), link in sorted(links.items()):
            measured = [_milliseconds(link.round_trip_s), format_bandwidth(link.bytes_per_s)]
            rows.append([str(one), str(other), *(["-", "no connection"] if link.problem else measured)])
        return rows
    rows = [["HOST", "ROUND TRIP", "LONGEST", "BANDWIDTH", "LEAST", "FAILED"]]
    for host in range(hosts):
        own = {pair: link for pair, link in links.items() if host in pair}
        good = {pair: link for pair, link in own.items() if not link.problem}
        if not good:
            rows.append([str(host), "-", "-", "-", "-", str(len(own))])
            continue
        late = max(good, key=lambda pair: good[pair].round_trip_s)
        slow = min(good, key=lambda pair: good[pair].bytes_per_s)
        rows.append([
            str(host),
            _milliseconds(statistics.median(link.round_trip_s for link in good.values())),
            f"{_milliseconds(good[late].round_trip_s)} ({late[0]} to {late[1]})",
            format_bandwidth(statistics.median(link.bytes_per_s for link in good.values())),
            f"{format_bandwidth(good[slow].bytes_per_s)} ({slow[0]} to {slow[1]})",
            str(len(own) - len(good)),
        ])  # fmt: skip
    return rows


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(wide) for cell, wide in zip(row, widths, strict=True)).rstrip() for row in rows]
