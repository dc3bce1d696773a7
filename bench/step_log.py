"""What the ranks of a run have written down, and what follows from it. Pure, but for `StepLog.read`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Done", "StepLog", "dropped", "first_new_s", "latest_processes", "repeated"]


class Done(NamedTuple):
    """A step that a rank has done."""

    at_s: float
    """When, by the monotonic clock."""
    step: int
    """Counted from 1."""
    samples: int
    """Samples in it, over all ranks."""
    rank: int
    pid: int


class StepLog:
    """The steps of a run, which `scripts/recovery_task.py` writes down.

    Args:
        folder: The folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: Counter[Path] = Counter()
        self.done: list[Done] = []
        """What has been read so far: each process in its order."""
        self.pids: set[int] = set()
        """The processes that were about to train, or had trained."""

    def read(self) -> Sequence[Done]:
        """Read what is new, and return everything."""
        for path in self._folder.glob("steps.*"):
            _, rank, pid = path.name.split(".")
            self.pids.add(int(pid))
            with path.open("rb") as file:
                file.seek(self._offsets[path])
                whole, newline, _ = file.read().rpartition(b"\n")
            self._offsets[path] += len(whole + newline)
            for line in whole.decode().splitlines():
                at_s, step, samples = line.split()
                self.done.append(Done(float(at_s), int(step), int(samples), int(rank), int(pid)))
        return self.done

    def latest(self, until_s: float = float("inf")) -> int:
        """Return the latest step that a rank had done by then; 0 if there is none."""
        return max((each.step for each in self.done if each.at_s <= until_s), default=0)

    def ways_s(self) -> dict[int, float]:
        """Return how long the script was on its way to its Trainer, by process that has come there."""
        told = {path: path.read_text(encoding="utf-8") for path in self._folder.glob("way.*")}
        return {int(path.suffix[1:]): float(text) for path, text in told.items() if text.endswith("\n")}

    def digests(self) -> dict[int, str]:
        """Return what the weights have come to, by rank that is done."""
        paths = [path for path in self._folder.glob("digest.*") if path.name.count(".") == 1]
        return {int(path.suffix[1:]): path.read_text(encoding="utf-8") for path in paths}


def latest_processes(done: Sequence[Done]) -> dict[int, int]:
    """Return the process of each rank that has done a step last.

    >>> latest_processes([Done(2.0, 1, 64, 0, 17), Done(1.0, 1, 64, 0, 16)])
    {0: 17}
    """
    return {each.rank: each.pid for each in sorted(done)}


def first_new_s(done: Sequence[Done], before: int, old: Collection[int]) -> float | None:
    """Return when the first step that needs no dead rank was done; None if there is none yet.

    A step that the dead rank has taken part in may be written down by others only after its death. So the step after
    the latest one counts if a new process has taken part, and the one that follows in any case.

    Args:
        done: The steps.
        before: The latest step that was written down before the death.
        old: The processes at the death.
    """
    new = [each.step for each in done if each.step > before + 1 or (each.step > before and each.pid not in old)]
    first = min(new, default=None)
    return None if first is None else min(each.at_s for each in done if each.step >= first)


def repeated(done: Sequence[Done]) -> int:
    """Return how many steps were done, and done again later.

    >>> repeated([Done(1.0, 1, 64, 0, 17), Done(2.0, 2, 64, 0, 17), Done(3.0, 2, 64, 0, 18)])
    1
    """
    times = Counter((each.rank, each.step) for each in done)
    by_rank = Counter(rank for (rank, _), count in times.items() if count > 1)
    return max(by_rank.values(), default=0)


def dropped(done: Sequence[Done], batch: int) -> int:
    """Return how many samples of the batches were not in the steps that counted.

    >>> dropped([Done(1.0, 1, 64, 0, 17), Done(2.0, 2, 48, 0, 17)], batch=64)
    16
    """
    counted = {each.step: each.samples for each in sorted(done)}
    return sum(batch - samples for samples in counted.values())
