"""From the command to the first all_reduce, and to the end of the command: unisono run against torchrun --standalone.

Both start the same script, which joins a gloo group, sums one number over all ranks and ends. Rank 0 writes down the
time at which it had the sum; the clock is the machine's monotonic one, which all processes share. Files are in the page
cache after the warm-up.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.errors import CannotRun
from bench.measure import Effort, Pairs, alternate
from bench.rows import Row, summarise

__all__ = ["run"]

_SCRIPT = Path(__file__).parent / "scripts" / "first_all_reduce.py"
_TIMEOUT_S = 120


def run(effort: Effort) -> Iterator[Row]:
    """Measure 1, 2, 4 and 8 ranks. Raises: CannotRun if the launcher does not work in this tree."""
    with tempfile.TemporaryDirectory() as folder:
        stamp = Path(folder, "stamp")
        for ranks in (1,) if effort.quick else (1, 2, 4, 8):
            ours = [sys.executable, "-m", "unisono", "run", "-n", str(ranks), str(_SCRIPT), str(stamp)]
            peer = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            peer += [str(_SCRIPT), str(stamp)]
            if not _works(ours):
                raise CannotRun("`unisono run` does not work in this tree yet")
            yield from _rows(effort, ranks, ours, peer, stamp)


def _rows(effort: Effort, ranks: int, ours: Sequence[str], peer: Sequence[str], stamp: Path) -> Iterator[Row]:
    lasts = Pairs([], [])

    def side(command: Sequence[str], last: list[float]) -> float:
        start = time.monotonic()
        subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
        last.append(time.monotonic() - start)
        return float(stamp.read_text()) - start

    rounds = effort.rounds(7)
    firsts = alternate(lambda: side(ours, lasts.ours), lambda: side(peer, lasts.peer), rounds=rounds, warmup=1)
    ends = Pairs(lasts.ours[-rounds:], lasts.peer[-rounds:])  # without the warm-up
    for case, pairs in (("to the first all_reduce", firsts), ("to the end of the command", ends)):
        yield summarise(
            "start",
            f"{ranks} rank{'s' if ranks > 1 else ''}, {case}",
            **pairs._asdict(),
            peer_name="torchrun --standalone",
            unit="s",
            ranks=ranks,
        )


def _works(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, check=False, capture_output=True, timeout=_TIMEOUT_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False
