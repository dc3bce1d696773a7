"""One rank as the observer knows it: its status block, its process, and the questions that are sent to it.

`launch.hang.observer` looks at all ranks and judges what they do together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from unisono.launch.failure.frames import short_path
from unisono.launch.hang.call_recorder import ASK_ERROR, ASK_RECORDER, ASK_STACKS
from unisono.launch.hang.situation import Pending
from unisono.launch.hang.stacks import create_dump
from unisono.launch.hang.status_block import RecordedCall, StatusBlock, create
from unisono.text import parse_ranks

__all__ = ["ObservedRank", "describe_call"]


@dataclass(eq=False, slots=True)
class ObservedRank:
    """One rank of the current generation."""

    block: StatusBlock
    block_file: int
    dump: int
    ask: int
    """The write end of the pipe for questions."""
    pid: int = 0
    exit_code: int | None = None
    mark: tuple[int, int] = (0, 0)
    mark_s: float = 0.0
    """When the mark last changed."""
    asked_s: float = 0.0
    cpu: tuple[float, float] = (0.0, 0.0)
    """When the CPU time of the process was last read, and how much it was."""
    load: float | None = None
    met: bool = False

    @classmethod
    def opened(cls) -> tuple[ObservedRank, tuple[int, int, int]]:
        """Create the status block, the file for stacks and the pipe for questions of a process.

        Returns:
            The rank, and numbers for its process (status block, dump, read end of the pipe), which the caller closes
            after passing on.
        """
        block_file, dump = create(), create_dump()
        read, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(write, False)
        watched = cls(block=StatusBlock(block_file), block_file=block_file, dump=dump, ask=write)
        return watched, (os.dup(block_file), os.dup(dump), read)

    @property
    def alive(self) -> bool:
        """True while the rank's process runs."""
        return self.pid != 0 and self.exit_code is None

    @property
    def grouped(self) -> bool:
        """False if the rank is known to have neither made a process group nor begun to."""
        return not self.block.pid or self.block.begun > 0  # a program that is not Python records nothing

    @property
    def in_call(self) -> bool:
        """False if the latest call of torch.distributed is known to have ended without an error."""
        calls = self.block.calls()
        return not calls or calls[-1].failed or any(call.running for call in calls)

    def doing(self, folder: str) -> str:
        """Return the call that the rank is in, or has made last, as words: "in all_reduce at train.py:7".

        Args:
            folder: The folder to which the path is relative.
        """
        return describe_call(self.block.calls(), folder=folder)

    def measure_load(self, now_s: float, cpu_s: float) -> None:
        """Note the number of cores that the process has kept busy since the previous call, if there was one.

        Args:
            now_s: The monotonic clock.
            cpu_s: The CPU time of the process.
        """
        if self.cpu[0]:
            self.load = (cpu_s - self.cpu[1]) / (now_s - self.cpu[0])
        self.cpu = now_s, cpu_s

    def ask_recorder(self, now_s: float) -> None:
        """Ask the rank's thread for the unfinished operations in torch's flight recorder."""
        self.asked_s = now_s
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self.ask, ASK_RECORDER)

    def ask_stacks(self) -> None:
        """Ask the rank's thread, if it has one, for all stacks."""
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self.ask, ASK_STACKS)

    def ask_error(self) -> None:
        """Ask the rank's thread which exception the main thread handles."""
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self.ask, ASK_ERROR)

    def close(self) -> None:
        """Close the files."""
        self.block.close()
        for file in (self.block_file, self.dump, self.ask):
            os.close(file)

    def recorded(self) -> dict[str, Any]:
        """Return the latest answer of the rank's flight recorder, as arguments of `Situation`."""
        answer = self.block.read_answer()
        if answer is None:
            return {}
        _, told = answer
        # An answer from before the latest call says nothing about what the rank does now.
        fresh = told["time_ns"] / 1e9 >= self.mark_s and self.alive
        return {
            "enqueued": {group: counts["enqueued"] for group, counts in told["status"].items()},
            "groups": {group: parse_ranks(ranks) for group, ranks in told["groups"].items()},
            "pending": tuple(
                Pending(
                    group=entry["group"],
                    sequence=entry["sequence"],
                    name=entry["name"],
                    tensors=entry["tensors"],
                    point_to_point=entry["point_to_point"],
                    since_ns=told["time_ns"] - int(entry["age_s"] * 1e9),
                )
                for entry in (told["pending"] if fresh else ())
            ),
        }


def describe_call(calls: Sequence[RecordedCall], *, folder: str) -> str:
    """Return the call that runs, or otherwise the latest one, as words; "" without calls.

    Args:
        calls: The latest calls of a rank, the newest last.
        folder: The folder to which the path is relative.
    """
    if not calls:
        return ""
    call = next((call for call in reversed(calls) if call.running), calls[-1])
    where = f"{call.name} at {short_path(call.file, folder=folder)}:{call.line}"
    last = "its last collective, " if call.kind == "collective" else ""
    return f"in {where}" if call.running else f"past {last}{where}"
