"""Trainer.step over hosts on a slow link, 1 Gbit/s or 200 Mbit/s with 0.5 ms, against DDP over gloo on the same link.

The hosts are network namespaces of this machine, so the ranks of all share its cores, and so do the programs that move
packets. The kernel limits the rate of what each host sends (token bucket), and a program delays each packet by 0.5 ms
in either direction. TCP is cubic. Both sides are those of the rows of `ddp`, with one rank or two on each host. The
rows with 200 Mbit/s are points of the model of step times in several-machines.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from bench.ddp import against_ddp
from bench.linked_hosts import linked_hosts
from bench.measure import Effort
from bench.ranks import run_ranks
from bench.rows import Goal, Row

__all__ = ["run"]

_DELAY_S = 0.0005
_NOTICE_S = 0.02
"""Ranks agree over the link on when to begin, in several round trips."""


class _Case(NamedTuple):
    model: str
    hosts: int
    per_host: int
    """Ranks of each host."""
    mbits_per_s: int
    bound: float | None = None
    """The goal: DDP's time over ours."""


_CASES = (
    _Case("66k", 2, 1, 1000, bound=1.0),
    _Case("4m", 2, 1, 1000, bound=1.0),
    _Case("25m", 2, 1, 1000, bound=1.0),
    _Case("4m", 2, 2, 1000, bound=1 / 0.6),
    _Case("25m", 2, 2, 1000, bound=1 / 0.6),
    _Case("4m", 2, 1, 200),
    _Case("4m", 3, 1, 200),
    _Case("4m", 4, 1, 200),
)


def run(effort: Effort) -> Iterator[Row]:
    """Measure each case. Raises: CannotRun where there can be no such link."""
    for case in (_Case("tiny", 2, 1, 1000), _Case("tiny", 2, 2, 1000)) if effort.quick else _CASES:
        bits_per_s = 1_000_000 * case.mbits_per_s
        with linked_hosts(case.hosts, per_host=case.per_host, bits_per_s=bits_per_s, delay_s=_DELAY_S) as hosts:
            yield from run_ranks(_step, len(hosts), effort, case, hosts=hosts)


def _step(effort: Effort, case: _Case) -> list[Row]:
    rounds = replace(effort, repeats=effort.rounds(15))
    goal = None if case.bound is None else Goal(of="ratio", bound=case.bound)
    where = f"{case.mbits_per_s} Mbit/s, {case.hosts} hosts x {case.per_host}"
    row = against_ddp(rounds, case.model, bench="link", engine="collective", goal=goal, where=where, notice_s=_NOTICE_S)
    return [row]
