"""A killed rank: the time from kill -9 of a random rank at a random moment to the next step that is new.

Ours is a Trainer under `unisono run`, which replaces the rank while the others wait. One peer is
DistributedDataParallel over gloo under `torchrun --max-restarts`, which starts all ranks again, with a checkpoint after
each step, so that it repeats as little as ours. The other one is torchft: a replica group for each rank, with a
torchrun of its own, and the settings of torchft's documentation. There the survivors go on with a smaller batch, so its
figure is the time to a step that lacks a rank; what became of the samples is in
[fault-comparison.md](fault-comparison.md).
All train the same model of 66 thousand parameters on 4 ranks, with a pause of 5 ms in each step and a script that
imports nothing slow, and have one kill in each run. Ranks of torchrun meet in a store of their own
(`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`): without it, they meet at the address of the dead ones, which often fails for
good. Where no step has come after 30 s, a run is ended and started anew, and those seconds do not count; the case says
how often a peer came back by itself.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench.disturbed import TIMEOUT_S, DisturbedRun
from bench.errors import CannotRun
from bench.measure import Effort, in_turn
from bench.rows import Goal, Row, summarise
from bench.systems import TORCHFT_MISSING, System, has_torchft, torchft, torchrun, unisono

__all__ = ["run"]

_RANKS, _STEPS = 4, 5000
_BEFORE = 30
"""Steps before a kill."""
_PATIENCE_S = 30.0


def run(effort: Effort) -> Iterator[Row]:
    """Measure both engines. Raises: CannotRun if a side does not train at all."""
    rng = random.Random(effort.seed)
    cases = [("shared", 0, 0.6), ("collective", 0, 0.6), ("shared", 1, 0.15)]
    peers = {"torchrun --max-restarts, DDP": torchrun(_RANKS, checkpoint_every=1)}
    if has_torchft():
        peers["torchft, DDP"] = torchft(_RANKS)
    else:
        print(TORCHFT_MISSING, file=sys.stderr)
    for engine, spares, goal_s in cases[:1] if effort.quick else cases:
        ours = unisono(_RANKS, engine=engine, spares=spares)
        systems = [ours, *peers.values()]
        back: dict[str, list[bool]] = {system.name: [] for system in systems}
        sides = [partial(_recover, system, rng, back[system.name]) for system in systems]
        own, *others = in_turn(sides, rounds=effort.rounds(5), warmup=0)
        for (name, peer), seconds in zip(peers.items(), others, strict=True):
            itself = back[peer.name]
            yield summarise(
                "recovery",
                f"{_RANKS} ranks, {engine} engine{', one spare' if spares else ''}, from a kill to the next new step; "
                f"{name.split()[0].rstrip(',')} came back by itself in {sum(itself)} of {len(itself)}",
                ours=own,
                peer=seconds,
                peer_name=name,
                unit="s",
                goal=Goal(of="ours", bound=goal_s),
                ranks=_RANKS,
                spares=spares,
            )


def _recover(system: System, rng: random.Random, back: list[bool]) -> float:
    """Kill a rank; return the seconds to the next new step, and note whether the launcher came to it by itself."""
    with tempfile.TemporaryDirectory() as folder:
        with DisturbedRun(system, Path(folder), _STEPS) as run:
            run.come_to(_BEFORE)
            struck = run.strike("kill", rng)
            seconds = run.resumed(struck, _PATIENCE_S)
        back.append(seconds is not None)
        if seconds is not None:
            return seconds
        again = struck._replace(at_s=time.monotonic(), before=run.log.latest(), old=frozenset(run.log.pids))
        with DisturbedRun(system, Path(folder), _STEPS) as run:
            if (seconds := run.resumed(again, TIMEOUT_S)) is None:
                raise CannotRun(f"{system.name} did not come to a new step in {TIMEOUT_S:g} s, started anew")
        return seconds
