"""The view of `unisono top`, as lines of text. Pure. Start reading at `frame`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.report.rank_times import PARTS
from unisono.report.verdict import format_short_time
from unisono.text import clip
from unisono.watch.figures import format_bytes, format_clock, format_elapsed, format_rate, format_value, plural

__all__ = ["JobView", "RankView", "frame", "slowest", "visible"]

_APART = 0.25
"""The least difference between the waits of ranks, as a part of the time, of which the view speaks."""
_CROWDED = 0.15
"""The least part of the time without a core that makes the machine the reason."""
_LEAST = 4
"""Lines about ranks for which there must be room beside a remark."""
_IDLE = 0.6
"""A rank that keeps fewer cores busy than this, outside of calls, sleeps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankView:
    """One rank, during the last seconds."""

    rank: int
    pid: int
    host: int | None = None
    """The host that it is on, in a job on several."""
    state: str
    """"running", "sleeping", "in the kernel", "stopped" or "ended"."""
    cores: float | None = None
    """How many cores it has kept busy; None if not known yet."""
    delay: float = 0.0
    """The part of the time in which it was ready to run, and had no core."""
    memory: int = 0
    gpu: int | None = None
    """Bytes on GPUs; None without."""
    waits: float | None = None
    """The part of the time in which it was in a call of torch.distributed, or waited in a Trainer's step. None if it is
    not known."""
    doing: str = ""
    """The call that it is in, or has made last."""
    parts: Mapping[str, float] | None = None
    """Seconds of a step in each of `PARTS`, as its Trainer has measured them; None if it has not."""


@dataclass(frozen=True, slots=True)
class _RankColumn:
    """A column of the table of ranks."""

    name: str
    least: int
    """Its width for most values, so that columns do not jump."""
    cell: Callable[[RankView], str]
    is_text: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """A job, and the run of its Trainer if it has one."""

    name: str
    pid: int
    ranks: int
    hosts: int = 1
    """The hosts that they are on."""
    age_s: float
    recoveries: int = 0
    problem: str = ""
    """Why what is shown is old; "" otherwise."""
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    lr: float | None = None
    samples_per_s: float | None = None
    left_s: float | None = None
    step_s: float | None = None
    """Seconds of a step, if its parts have been measured on ranks."""
    parts: Mapping[str, float] | None = None
    """Those parts, in seconds, as a mean over ranks."""


def measured(times: Mapping[str, Any] | None) -> tuple[float, list[dict[str, float]]] | None:
    """Return what an event "times" tells: seconds of a step, and those of its parts on each rank; None without any.

    >>> measured({"steps": 2, "seconds": 1.0, "data": [0.1], "compute": [0.6]})
    (0.5, [{'data': 0.05, 'compute': 0.3}])
    """
    if not times or not times.get("steps") or not times.get("seconds"):
        return None
    steps, known = times["steps"], {name: times[name] for name in PARTS if name in times}
    ranks = [dict(zip(known, of_rank, strict=True)) for of_rank in zip(*known.values(), strict=True)]
    return times["seconds"] / steps, [{name: each / steps for name, each in parts.items()} for parts in ranks]


def mean_parts(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over ranks of each part of a step."""
    return {name: sum(parts[name] for parts in ranks) / len(ranks) for name in ranks[0]} if ranks else {}


def frame(job: JobView, ranks: Sequence[RankView], *, width: int, height: int, first: int = 0) -> list[str]:
    """Return the lines of one picture: the job, the run, the ranks and the slowest one.

    Args:
        job: The job.
        ranks: Its ranks, in order.
        width: The most characters of a line.
        height: The most lines. Ranks that do not fit are left out, from `first` on.
        first: The place of the first rank that is shown.
    """
    head = [_job_line(job), *filter(None, [job.problem, _run_line(job), _parts_line(job)]), ""]
    remark = slowest(ranks)
    tail = ["", *textwrap.wrap(remark, width)] if remark else []
    room = height - len(head)
    if room - len(tail) < min(len(ranks), _LEAST) + 2:  # ranks come first: then the remark's beginning, if at all
        tail = [remark] if remark and room > _LEAST else []
    shown = visible(len(ranks), height=room - len(tail), first=first)
    rows = _table(ranks, shown)
    if shown and len(shown) < len(ranks):
        rows.append(f"ranks {_span(ranks, shown)} of {len(ranks)}: scroll with j and k")
    return [clip(line, width) for line in [*head, *rows, *tail][:height]]


def visible(count: int, *, height: int, first: int) -> range:
    """Return the places of the ranks that fit below the table's heading, and above a line about the others.

    >>> visible(4, height=5, first=0), visible(64, height=12, first=60)
    (range(0, 4), range(54, 64))
    """
    if count < height:
        return range(count)
    room = max(0, height - 2)
    first = min(max(0, first), count - room)
    return range(first, first + room)


def slowest(ranks: Sequence[RankView]) -> str:
    """Return which rank the others wait for, and why it is slow; "" if ranks wait about equally long.

    The slowest rank is the one that waits the least: a collective ends once the last rank has come to it.

    >>> quick = RankView(rank=0, pid=7, state="sleeping", cores=0.4, waits=0.7)
    >>> slowest([quick, RankView(rank=1, pid=8, state="running", cores=1.0, waits=0.1)])
    'slowest: rank 1, by its computation. It waits for others 10 % of the time, rank 0 70 %; it keeps 1.0 cores busy.'
    """
    for each in ranks:
        if each.state == "stopped":
            there = "" if each.host is None else f" on host {each.host}"
            return f"slowest: rank {each.rank}, which is stopped: `kill -CONT {each.pid}`{there} has it go on."
    known = [(each.waits, each) for each in ranks if each.waits is not None and each.cores is not None]
    if len(known) < 2:
        return ""
    least, slow = min(known, key=lambda pair: pair[0])
    most, quick = max(known, key=lambda pair: pair[0])
    if most - least < _APART:
        return ""
    waits = f"It waits for others {least:.0%} of the time, rank {quick.rank} {most:.0%}".replace("%", " %")
    there = "" if slow.host is None else f" on host {slow.host}"
    return f"slowest: rank {slow.rank}{there}, by {_reason(slow, quick, waits)}"


def _reason(slow: RankView, quick: RankView, waits: str) -> str:
    """Return why a rank is slow, which waits less than another one."""
    assert slow.cores is not None
    assert slow.waits is not None
    if slow.delay >= _CROWDED:
        told = f"{slow.delay:.0%}".replace("%", " %")
        return f"the machine. {waits}; it is ready to run and has no core {told}."
    own, other = slow.parts or {}, quick.parts or {}
    # On GPUs, what a rank waits for others is in `compute`, and tells nothing.
    longer = {name: own[name] - other[name] for name in ("data", "compute") if "waiting" in own and "waiting" in other}
    if longer and max(longer.values()) > 0:
        name = max(longer, key=lambda part: longer[part])
        took = f"{format_short_time(own[name])} there, and {format_short_time(other[name])} on rank {quick.rank}"
        if name == "data":
            return f"its data. {waits}; a step waits for its batch for {took}."
        return f"its computation. {waits}; forward and backward take {took}."
    if slow.state == "in the kernel" or slow.cores + slow.waits < _IDLE:
        return f"its data. {waits}; otherwise it sleeps: it waits for a disk, a network or its workers."
    return f"its computation. {waits}; it keeps {slow.cores:.1f} cores busy."


def _job_line(job: JobView) -> str:
    hosts = f" on {job.hosts} hosts" if job.hosts > 1 else ""
    parts = [f"{job.name} (job {job.pid})", f"{plural(job.ranks, 'rank')}{hosts}", format_elapsed(job.age_s)]
    if job.recoveries:
        parts.append(f"{job.recoveries} recover{'y' if job.recoveries == 1 else 'ies'}")
    return " · ".join(parts)


def _run_line(job: JobView) -> str:
    if job.step is None:
        return ""
    parts = [f"step {job.step}" + ("" if job.steps is None else f" of {job.steps}")]
    if job.loss is not None:
        parts.append(f"loss {format_value(job.loss)}")
    if job.lr is not None:
        parts.append(f"lr {job.lr:.3g}")
    if job.samples_per_s is not None:
        parts.append(f"{format_rate(job.samples_per_s)} samples/s")
    if job.left_s is not None and math.isfinite(job.left_s):
        parts.append(f"{format_clock(job.left_s)} left")
    return " · ".join(parts)


def _parts_line(job: JobView) -> str:
    """Return where the time of a step goes, as a mean over the ranks that are known."""
    if not job.parts or not job.step_s:
        return ""
    loop_s = max(0.0, job.step_s - sum(job.parts.values()))
    loop = {"loop": loop_s} if loop_s >= 0.005 * job.step_s else {}  # a RunLog counts all of it as computing
    parts = [f"{name} {100 * seconds / job.step_s:.0f} %" for name, seconds in {**job.parts, **loop}.items()]
    return f"step of {format_short_time(job.step_s)}: " + ", ".join(parts)


def _table(ranks: Sequence[RankView], shown: range) -> list[str]:
    has_gpu = any(each.gpu is not None for each in ranks)
    has_host = len({each.host for each in ranks}) > 1
    columns = [
        _RankColumn("RANK", 4, lambda each: str(each.rank)),
        *([_RankColumn("HOST", 4, lambda each: str(each.host))] if has_host else []),
        _RankColumn("STATE", 8, lambda each: each.state, is_text=True),
        _RankColumn("CPU", 5, lambda each: "-" if each.cores is None else f"{100 * each.cores:.0f} %"),
        _RankColumn("MEMORY", 7, lambda each: format_bytes(each.memory)),
        *([_RankColumn("GPU", 7, lambda each: "-" if each.gpu is None else format_bytes(each.gpu))] if has_gpu else []),
        _RankColumn("WAITS", 5, lambda each: "-" if each.waits is None else f"{100 * each.waits:.0f} %"),
        _RankColumn("CALL", 0, lambda each: each.doing or "-", is_text=True),
    ]
    rows = [["" for _ in columns] for _ in range(1 + len(shown))]
    for at, column in enumerate(columns):
        cells = [column.name, *(column.cell(ranks[place]) for place in shown)]
        wide = max(column.least, *map(len, cells))
        for row, cell in zip(rows, cells, strict=True):
            row[at] = cell.ljust(wide) if column.is_text else cell.rjust(wide)
    return ["  ".join(row).rstrip() for row in rows]


def _span(ranks: Sequence[RankView], shown: range) -> str:
    return f"{ranks[shown[0]].rank}-{ranks[shown[-1]].rank}"
