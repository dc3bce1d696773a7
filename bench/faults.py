"""The faults of `unisono drill` under each system: one fault in each run, and what became of the run."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.disturbed import DisturbedRun
from bench.errors import CannotRun
from bench.measure import Effort
from bench.step_log import dropped, repeated
from bench.systems import TORCHFT_MISSING, System, has_torchft, torchft, torchrun, unisono
from unisono.drill.fault_plan import KINDS

__all__ = ["BATCH", "CHECKPOINT_EVERY", "HANG_S", "PATIENCE_S", "RANKS", "STEPS", "FaultOutcome", "outcomes", "systems"]

RANKS, STEPS, BATCH = 4, 1000, 64
CHECKPOINT_EVERY = 20
"""Steps from one checkpoint of DDP to the next."""
HANG_S = 10.0
"""After so long, each system gives a rank up that does not answer, by a flag or the timeout of its process group."""
PATIENCE_S = 60.0
"""After so long without a new step, a run is given up."""
_BEFORE = 50
_END_S = 180.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultOutcome:
    """What became of a run after a fault."""

    system: str
    fault: str
    seconds: float | None
    """From the fault to the next new step; None if there was none."""
    replaced: bool
    """Whether a process began in place of another."""
    exit_code: int | None
    """Of a launcher that ended without a new step; None if there was one, or the launcher did not end."""
    ranks: int
    """The ranks that came to the end of the steps."""
    repeated: int
    """Steps that were done, and done again."""
    dropped: int
    """Samples of the batches that were not trained on."""
    same: bool
    """Whether the weights at the end are, to the bit, those of an undisturbed run."""


def systems() -> Sequence[System]:
    """Return the systems that are here."""
    found = [
        unisono(RANKS, stuck_timeout_s=HANG_S),
        torchrun(RANKS, checkpoint_every=CHECKPOINT_EVERY, own_store=False),
        torchrun(RANKS, checkpoint_every=CHECKPOINT_EVERY),
    ]
    if has_torchft():
        return [*found, torchft(RANKS)]
    print(TORCHFT_MISSING, file=sys.stderr)
    return found


def outcomes(effort: Effort) -> Iterator[FaultOutcome]:
    """Inject each fault under each system, in random order. Raises: CannotRun if one does not train at all."""
    rng = random.Random(effort.seed)
    present = systems()
    calm = {system.name: _undisturbed(system) for system in present}
    for _ in range(effort.rounds(3, quick=1)):
        cases = [(system, fault) for system in present for fault in (["kill"] if effort.quick else KINDS)]
        for system, fault in rng.sample(cases, len(cases)):
            yield _outcome(system, fault, rng, calm)


def _undisturbed(system: System) -> set[str]:
    with tempfile.TemporaryDirectory() as folder, DisturbedRun(system, Path(folder), STEPS) as run:
        if not run.end(_END_S):
            raise CannotRun(f"{system.name} did not come to the end of its steps")
        return set(run.log.digests().values())


def _outcome(system: System, fault: str, rng: random.Random, calm: Mapping[str, set[str]]) -> FaultOutcome:
    with tempfile.TemporaryDirectory() as folder, DisturbedRun(system, Path(folder), STEPS) as run:
        run.come_to(_BEFORE)
        struck = run.strike(fault, rng)
        seconds = run.resumed(struck, PATIENCE_S)
        code = None if seconds is not None else run.exit_code()
        if seconds is not None:
            run.end(_END_S)
        digests = run.log.digests()
        return FaultOutcome(
            system=system.name,
            fault=fault,
            seconds=seconds,
            replaced=bool(run.log.pids - struck.old),
            exit_code=code,
            ranks=len(digests),
            repeated=repeated(run.log.done),
            dropped=dropped(run.log.done, BATCH),
            same=set(digests.values()) == calm[system.name],
        )
