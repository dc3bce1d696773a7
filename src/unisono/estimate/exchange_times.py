"""How long ranks of this machine take to exchange little, with the code around it: by steps of a tiny model.

A step with shards has many exchanges, or few of them if all blocks are in one unit, one with stages has many messages,
and one of replicas computes the same with a single exchange. So differences tell what each costs. Start reading at
`measure_exchanges`; this file is also the program of the ranks.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono
from unisono.errors import EstimateError
from unisono.estimate.layouts import num_exchanges
from unisono.parallel import Pipeline, Shard

__all__ = ["ExchangeTimes", "measure_exchanges"]

_BLOCKS, _WIDTH, _SAMPLES = 8, 32, 512
"""Blocks that compute for a moment: where ranks meet often, they also wait for the one that is slower just then."""
_SHARES = 4
"""Shares of a rank, each of which is a micro-batch."""
_WARM, _STEPS = 3, 12
_PATIENCE_S = 120.0


class ExchangeTimes(NamedTuple):
    """Times of one thread, in seconds."""

    exchange_s: float = 0.0
    """An exchange of some bytes between all ranks, as before a unit of shards comes together."""
    message_s: float = 0.0
    """A message from a stage to the next one, or back."""
    shards_s: float = 0.0
    """What a step with shards takes besides, however many exchanges it has."""


def measure_exchanges(ranks: int) -> ExchangeTimes:
    """Return what exchanges and messages take between ranks of this machine. It takes about 5 s.

    Args:
        ranks: How many of them compute at once. With one, nothing is measured.

    Raises:
        EstimateError: The ranks could not be started, or failed.
    """
    if ranks == 1:
        return ExchangeTimes()
    command = [sys.executable, "-m", "unisono", "run", "-n", str(ranks), "-m", "unisono.estimate.exchange_times"]
    with tempfile.TemporaryDirectory(prefix="unisono-plan-") as name:
        file = Path(name) / "times.json"
        try:
            done = subprocess.run(
                [*command, str(file)],
                check=False,
                capture_output=True,
                text=True,
                timeout=_PATIENCE_S,
                errors="replace",
            )
        except subprocess.TimeoutExpired as error:
            raise EstimateError(f"steps of a tiny model on {ranks} ranks took more than {_PATIENCE_S:.0f} s") from error
        if done.returncode:
            raise EstimateError(f"steps of a tiny model on {ranks} ranks failed: {done.stderr.strip()}")
        return ExchangeTimes(*json.loads(file.read_text()))


def _mean(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    result: Tensor = model(batch[0])
    return result.mean(1)


def _stepper(parallel: Shard | Pipeline | None, shares: int) -> Callable[[], float]:
    """Return what makes a step of a tiny model, and returns its time in seconds."""
    blocks = (nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(_BLOCKS))
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(
        model, optimizer, virtual_ranks=shares, progress=False, engine="collective", parallel=parallel
    )
    data = TensorDataset(torch.ones(_SAMPLES * shares, _WIDTH))
    batches = (
        batch for _ in trainer.epochs(_WARM + _STEPS + 1) for batch in trainer.batches(data, batch_size=len(data))
    )

    def step() -> float:
        batch = next(batches)
        since_s = time.perf_counter()
        trainer.step(_mean, batch)
        return time.perf_counter() - since_s

    return step


def _measure(ranks: int) -> ExchangeTimes:
    shares = _SHARES * ranks
    stages = [str(_BLOCKS * k // ranks) for k in range(1, ranks)]
    layouts = [None, Shard(unit_bytes=1), Shard(), Pipeline(stages=stages)]
    steppers = [_stepper(layout, shares) for layout in layouts]
    times: list[list[float]] = [[] for _ in layouts]
    for number in range(_WARM + _STEPS):  # in turn, since the speed of cores changes
        for step, own in zip(steppers, times, strict=True):
            taken = step()
            if number >= _WARM:
                own.append(taken)
    # What other programs take from ranks shows in the upper half.
    whole, many, few, cut = (statistics.quantiles(own, n=4)[0] for own in times)
    fewest = num_exchanges(1, _SHARES)
    exchange_s = max(0.0, many - few) / (num_exchanges(_BLOCKS, _SHARES) - fewest)
    message_s = max(0.0, cut + exchange_s - whole) / (2 * shares)
    return ExchangeTimes(exchange_s, message_s, max(0.0, few - whole - (fewest - 1) * exchange_s))


if __name__ == "__main__":
    found = _measure(unisono.init().world_size)
    if unisono.is_main():
        Path(sys.argv[1]).write_text(json.dumps(found))
