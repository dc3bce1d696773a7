"""A change of who the ranks are, in the control plane alone: launchers of many hosts in one process, with 8 ranks each.

For `unisono run` it is the time from the death of a rank until the launchers of all hosts know what follows from it:
the leader asks all of them for their ranks, and decides. For torchrun it is a round of its rendezvous, in which all
hosts meet anew after any failure; its own random delay of up to 0.3 s and its polling are in it. That ranks end, start
and join is in neither. All simulated launchers share one interpreter and the cores of this machine, and real ones do
not, so the figures are upper bounds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from bench.errors import CannotRun
from bench.measure import Effort
from bench.rows import Goal, Row, summarise

__all__ = ["run"]

_SCRIPT = Path(__file__).parent / "scripts" / "membership_change.py"
_RANKS = 8
_HOSTS = (4, 32, 125)
_CHANGES = 15
_MOST_OF_PEER = {125: 3}
"""With so many hosts, a round of torch's rendezvous takes two minutes: it is compared with medians of ours."""
_GOAL_MS = 50.0


def run(effort: Effort) -> Iterator[Row]:
    """Measure each number of hosts. Raises: CannotRun if a simulation fails."""
    for hosts in _HOSTS[:1] if effort.quick else _HOSTS:
        changes = effort.rounds(_CHANGES, quick=2)
        ours = _milliseconds("unisono", hosts, changes)
        peer = _milliseconds("torchrun", hosts, min(changes, _MOST_OF_PEER.get(hosts, changes)))
        yield summarise(
            "membership",
            f"{hosts} hosts, {hosts * _RANKS} ranks: a rank dies, to the decision on all hosts",
            ours=[median(ours[first :: len(peer)]) for first in range(len(peer))],
            peer=peer,
            peer_name="torchrun's rendezvous",
            unit="ms",
            goal=Goal(of="ours", bound=_GOAL_MS),
            hosts=hosts,
        )


def _milliseconds(system: str, hosts: int, changes: int) -> list[float]:
    done = subprocess.run(
        [sys.executable, str(_SCRIPT), system, str(hosts), str(changes)],
        env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    if done.returncode:
        raise CannotRun(f"the simulation of {hosts} hosts of {system} failed: {done.stderr.strip()[-500:]}")
    return [1e3 * seconds for seconds in json.loads(done.stdout)]
