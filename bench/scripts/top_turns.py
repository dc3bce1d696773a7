"""A training for `bench top`: rank 0 stops the view of `unisono top` with SIGSTOP in every other turn.

Arguments: a folder, the rounds, "tiny" or "66k", the seconds of a turn. Rank 0 writes into the folder: `ready`; then,
after `view` has told the processes of the view and the launcher, `found.json`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import unisono
from bench.models import MLP_66K, TINY, classify, optimizer_of
from unisono import comm
from unisono.data.batch import Batch

_STEPS_PER_EPOCH = 256
_BEGINNING_S, _FREE_S = 6.0, 60.0
"""Until the view looks at its usual pace; and how long it is then left alone."""


def main() -> None:
    """Train in turns."""
    folder, rounds, name, turn_s = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, ranks = unisono.rank(), unisono.world_size()
    subject = TINY if name == "tiny" else MLP_66K
    model, size = subject.build(), ranks * subject.batch_size
    dataset = subject.dataset(_STEPS_PER_EPOCH * size)
    trainer = unisono.Trainer(
        model,
        optimizer_of(model),
        virtual_ranks=ranks,
        directory=folder / "run",
        checkpoints=unisono.Checkpoints(every_minutes=None, every_epoch=False),
    )

    def endless() -> Iterator[Batch]:
        while True:
            yield from trainer.batches(dataset, batch_size=size)

    batches = endless()
    ended_s: list[float] = []

    def train(steps: int) -> float:
        begun_s = time.monotonic()
        for _ in range(steps):
            trainer.step(classify, next(batches))
            ended_s.append(time.monotonic())
        return time.monotonic() - begun_s

    def steps_in(seconds: float) -> int:
        return max(1, round(seconds / step_s))

    step_s = 1.0
    train(300)
    step_s = comm.broadcast(train(300) / 300)
    view = launcher = 0
    if rank == 0:
        (folder / "ready").touch()
        while not (folder / "view").exists():
            time.sleep(0.01)
        view, launcher = json.loads((folder / "view").read_text())
    short = turn_s < 1
    train(steps_in(1.0 if short else _BEGINNING_S))
    step_s = comm.broadcast(train(300) / 300)
    ended_s.clear()
    used_s = [cpu_s(view), cpu_s(launcher)] if rank == 0 else []
    free_s = train(steps_in(1.0 if short else _FREE_S))
    if rank == 0:
        used_s = [now - before for now, before in zip((cpu_s(view), cpu_s(launcher)), used_s, strict=True)]
    free = list(ended_s)
    # Turns begin at a random moment between two looks of the view; all ranks draw the same.
    rng, launcher_s = random.Random(0), [0.0, 0.0]
    turns: tuple[list[float], list[float]] = ([], [])
    for number in range(-1, rounds):
        for side in rng.sample((0, 1), 2):
            if rank == 0:
                os.kill(view, signal.SIGCONT if side == 0 else signal.SIGSTOP)
            train(steps_in(rng.uniform(0.1, 0.2 if short else 1.1)))
            before_s = cpu_s(launcher) if rank == 0 else 0.0
            seconds = train(steps_in(turn_s))
            if number >= 0:
                turns[side].append(seconds / steps_in(turn_s))
                launcher_s[side] += (cpu_s(launcher) - before_s) / seconds / rounds if rank == 0 else 0.0
    if rank == 0:
        os.kill(view, signal.SIGCONT)
        found = {"turns": turns, "steps_s": free, "free_s": free_s, "view_s": used_s[0], "launcher_s": launcher_s}
        (folder / "found.json").write_text(json.dumps(found))


def cpu_s(pid: int) -> float:
    """Return the CPU time of all threads of a process."""
    return sum(int(each.read_text().split()[0]) for each in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


if __name__ == "__main__":
    main()
