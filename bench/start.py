"""Starting: unisono run against torchrun --standalone, and both against one bare import of torch.

Both start the same script, which joins a gloo group, sums one number over all ranks and ends. Rank 0 writes down the
time at which it had the sum; the clock is the machine's monotonic one, which all processes share. After the warm-up,
files are in the page cache and bytecode is cached, as in an installed package. `python -c "import torch"` is measured
before each start; the goal beside it is that floor and 0.3 s, at 8 ranks 0.5 s.
A restart is measured from just before a rank kills itself to the first sum of the next generation, inside one command.
torchrun's own restart meets at the addresses of the dead generation and does not come back in most tries, so the peer
is torchrun started anew.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.errors import CannotRun
from bench.measure import Effort, Pairs, alternate
from bench.rows import Goal, Row, summarise

__all__ = ["run"]

_SCRIPT = Path(__file__).parent / "scripts" / "first_all_reduce.py"
_LAST_LINE = Path(__file__).parent / "scripts" / "last_line.py"
_RESTART = Path(__file__).parent / "scripts" / "restart.py"
_UNISONO = [sys.executable, "-m", "unisono"]
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
# The peer's time over ours, at least; and seconds above a bare import, at most.
_RATIO = {1: 1 / 0.70, 4: 1 / 0.40, 8: 1 / 0.25}
_ABOVE_IMPORT_S = {1: 0.3, 2: 0.3, 4: 0.3, 8: 0.5}
_TIMEOUT_S = 120


def run(effort: Effort) -> Iterator[Row]:
    """Measure 1, 2, 4 and 8 ranks, a restart, and the help text. Raises: CannotRun if the launcher does not work."""
    with tempfile.TemporaryDirectory() as folder:
        stamp = Path(folder, "stamp")
        for ranks in (1,) if effort.quick else (1, 2, 4, 8):
            ours = [*_UNISONO, "run", "-n", str(ranks), str(_SCRIPT), str(stamp)]
            peer = [*_TORCHRUN, f"--nproc-per-node={ranks}", str(_SCRIPT), str(stamp)]
            if not _works(ours):
                raise CannotRun("`unisono run` does not work in this tree yet")
            yield from _starts(effort, ranks, ours, peer, stamp)
        for ranks in (1,) if effort.quick else (1, 8):
            yield _end(effort, ranks, Path(folder))
        yield _restart(effort, 2 if effort.quick else 4, Path(folder))
    helps = alternate(
        lambda: _seconds([*_UNISONO, "--help"]),
        lambda: _seconds([*_TORCHRUN, "--help"]),
        rounds=effort.rounds(9),
        warmup=1,
    )
    goal = Goal(of="ours", bound=0.3)
    yield summarise("start", "--help", **helps._asdict(), peer_name="torchrun", unit="s", goal=goal)


def _starts(effort: Effort, ranks: int, ours: Sequence[str], peer: Sequence[str], stamp: Path) -> Iterator[Row]:
    ends, imports = Pairs([], []), []

    def side(command: Sequence[str], end: list[float]) -> float:
        imports.append(_seconds([sys.executable, "-c", "import torch"]))
        start = time.monotonic()
        end.append(_seconds(command))
        return float(stamp.read_text()) - start

    rounds = effort.rounds(7)
    firsts = alternate(lambda: side(ours, ends.ours), lambda: side(peer, ends.peer), rounds=rounds, warmup=1)
    who = f"{ranks} rank{'s' if ranks > 1 else ''}"
    floors = [min(pair) for pair in zip(imports[2::2], imports[3::2], strict=True)]
    last = Pairs(ends.ours[-rounds:], ends.peer[-rounds:])  # without the warm-up
    for case, pairs, peer_name, goal in (
        ("to the first all_reduce", firsts, "torchrun --standalone", _ratio_goal(ranks)),
        ("to the first all_reduce", Pairs(firsts.ours, floors), "import torch", _floor_goal(ranks, floors)),
        ("to the end of the command", last, "torchrun --standalone", None),
    ):
        yield summarise(
            "start", f"{who}, {case}", **pairs._asdict(), peer_name=peer_name, unit="s", goal=goal, ranks=ranks
        )


def _ratio_goal(ranks: int) -> Goal | None:
    return Goal(of="ratio", bound=round(_RATIO[ranks], 2)) if ranks in _RATIO else None


def _floor_goal(ranks: int, floors: Sequence[float]) -> Goal:
    return Goal(of="ours", bound=round(statistics.median(floors) + _ABOVE_IMPORT_S[ranks], 2))


def _end(effort: Effort, ranks: int, folder: Path) -> Row:
    """Measure from the last line of the last rank to the end of the command."""

    def side(command: Sequence[str]) -> float:
        _seconds([*command, str(_LAST_LINE), str(folder / "last")])
        end = time.monotonic()
        return end - max(float((folder / f"last{rank}").read_text()) for rank in range(ranks))

    pairs = alternate(
        lambda: side([*_UNISONO, "run", "-n", str(ranks)]),
        lambda: side([*_TORCHRUN, f"--nproc-per-node={ranks}"]),
        rounds=effort.rounds(7),
        warmup=1,
    )
    return summarise(
        "start",
        f"{ranks} rank{'s' * (ranks > 1)}, from the last line to the end of the command",
        **pairs._asdict(),
        peer_name="torchrun --standalone",
        unit="s",
        goal=Goal(of="ours", bound=0.15),
        ranks=ranks,
    )


def _restart(effort: Effort, ranks: int, folder: Path) -> Row:
    lost, back, stamp = folder / "lost", folder / "back", folder / "stamp"

    def ours() -> float:
        restarting = ["run", "-n", str(ranks), "--max-restarts", "1", str(_RESTART), str(lost), str(back)]
        _seconds([*_UNISONO, *restarting])
        return float(back.read_text()) - float(lost.read_text())

    def peer() -> float:
        start = time.monotonic()
        _seconds([*_TORCHRUN, f"--nproc-per-node={ranks}", str(_SCRIPT), str(stamp)])
        return float(stamp.read_text()) - start

    pairs = alternate(ours, peer, rounds=effort.rounds(7), warmup=1)
    return summarise(
        "start",
        f"{ranks} ranks, from a killed rank to the next generation's first all_reduce",
        **pairs._asdict(),
        peer_name="torchrun started anew",
        unit="s",
        goal=Goal(of="ours", bound=1.0),
        ranks=ranks,
    )


def _seconds(command: Sequence[str]) -> float:
    # Where this variable is set and no bytecode is cached, each start of ours would compile all that it imports.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.monotonic()
    subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S, env=environment)
    return time.monotonic() - start


def _works(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, check=False, capture_output=True, timeout=_TIMEOUT_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False
