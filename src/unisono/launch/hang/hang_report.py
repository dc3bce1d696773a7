"""Reports of ranks that wait in vain, and of where ranks are: one screen, equal ranks together. Pure functions.

Start reading at `render_finding`; `render_stacks` makes the output of `unisono stacks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unisono.launch.failure.frames import short_path
from unisono.launch.hang.analysis import Finding, Mismatch, OperationState, OperationWait, detail_of
from unisono.launch.hang.situation import Situation
from unisono.launch.hang.stacks import Frame, Thread
from unisono.launch.hang.status_block import RecordedCall
from unisono.text import format_duration, name_ranks

__all__ = ["render_finding", "render_idle", "render_mismatch", "render_stacks", "summarize"]

_MOST_FRAMES = 6
_MOST_MISSING = 4
_MOST_CHILDREN = 2
_MOST_THREADS = 2
_WIDTH = 100


def render_finding(
    finding: Finding, situations: Sequence[Situation], *, now_ns: int, folder: str, remedy: str = ""
) -> str:
    """Return a report of which ranks wait where, and where the ranks are that they wait for.

    Args:
        folder: The job's working directory; paths in the report are relative to it.
        remedy: The last line.
    """
    by_rank = {situation.rank: situation for situation in situations}
    if finding.mismatch is not None:
        lines = render_mismatch(finding.mismatch, ranks=len(by_rank), folder=folder).splitlines()
        shown = {operation.rank for operation in finding.mismatch.operations}
        others = [rank for wait in finding.waits for rank in wait.missing if rank not in shown]
        lines += _where(sorted(set(others)), by_rank, now_ns, folder)
    else:
        lines = []
        several = len({wait.group for wait in finding.waits}) > 1
        for wait in finding.waits[:3]:
            headline = _headline(wait, len(by_rank), now_ns, label=several, folder=folder)
            lines += [headline, *_operations(wait.operations, folder)]
        missing = sorted({rank for wait in finding.waits for rank in wait.missing})
        waiting = {rank for wait in finding.waits for rank in wait.waiting}
        if missing and set(missing) <= waiting and not any(by_rank[rank].state == "stopped" for rank in missing):
            lines.append("They wait for each other.")
        # Only ranks that do not wait themselves, or are stopped, are shown: one of them is the cause.
        first = [rank for rank in missing if rank not in waiting or by_rank[rank].state == "stopped"]
        lines += _where(first, by_rank, now_ns, folder)
    return "\n".join([*lines, *([remedy] if remedy else [])])


def summarize(finding: Finding, *, ranks: int, now_ns: int) -> str:
    """Return a finding in one line."""
    if finding.mismatch is not None:
        return render_mismatch(finding.mismatch, ranks=ranks, folder="").splitlines()[0]
    return _headline(finding.waits[0], ranks, now_ns)


def render_mismatch(mismatch: Mismatch, *, ranks: int, folder: str) -> str:
    """Return a report of the collectives that do not match. Its first line is complete in itself."""
    whose = _group(mismatch.label, mismatch.members, ranks, folder=folder)
    whose = f" of {whose}" if whose else ""
    lines = [f"{_odd_ones(mismatch)} (collective {mismatch.sequence}{whose})"]
    lines += _operations(mismatch.operations, folder)
    lines.append("Every rank must call the same collectives in the same order, with equal shapes and dtypes.")
    return "\n".join(lines)


def _odd_ones(mismatch: Mismatch) -> str:
    """Return a sentence on the ranks whose call differs from that of most ranks or, in a tie, of the first one.

    It is not that of `mismatch.describe_mismatch`, which is longer: as a headline it would be cut, and the rank at
    fault comes first here.
    """
    by_name = len({operation.name for operation in mismatch.operations}) > 1
    callers: dict[str, list[int]] = {}
    for operation in mismatch.operations:
        callers.setdefault(operation.name if by_name else operation.detail, []).append(operation.rank)
    (usual, most), *odd = sorted(callers.items(), key=lambda item: (-len(item[1]), item[1]))
    if len(odd) != 1:
        return f"ranks call {len(callers)} different collectives in the same place"
    (other, ranks), *_ = odd
    call = "calls" if len(ranks) == 1 else "call"
    usually = "calls" if len(most) == 1 else "call"
    if not by_name:
        other, usually = f"{mismatch.operations[0].name} with {other}", "has" if len(most) == 1 else "have"
    return f"{name_ranks(ranks)} {call} {other} where {name_ranks(most)} {usually} {usual}"


def render_stacks(situations: Sequence[Situation], *, now_ns: int, folder: str, full: bool = False) -> str:
    """Return the stack and the collective of every rank, equal ranks together.

    `full` includes the stacks of all threads, with library frames, instead of the main thread's user frames.
    """
    blocks: dict[tuple[str, ...], list[int]] = {}
    for situation in situations:
        blocks.setdefault(tuple(_block(situation, now_ns, folder, full=full)), []).append(situation.rank)
    parts = []
    for (state, *body), ranks in blocks.items():
        parts.append("\n".join([f"{name_ranks(ranks)}: {state}", *body]))
    return "\n".join(parts)


def render_idle(
    idle: Sequence[Situation],
    *,
    ended: Sequence[int],
    idle_s: float,
    now_ns: int,
    folder: str,
    command: str,
    places: str = "",
) -> str:
    """Return a report of idle ranks; ended are the other ranks, if any, and command shows where ranks are."""
    have = "has" if len(idle) == 1 else "have"
    who = name_ranks(situation.rank for situation in idle)
    seconds = format_duration(idle_s)
    if ended:
        headline = f"{name_ranks(ended)} ended {seconds} ago or more, and {who} {have} done nothing since"
        remedy = f"The job goes on until they end. `{command}` shows where they are; Ctrl-C ends it."
    else:
        headline = f"{who} {have} done nothing for {seconds}: no CPU time, no output, no I/O"
        remedy = (
            "The job goes on, and this is not said again: a program that waits for requests looks like that, too. "
            f"`{command}` shows where they are; Ctrl-C ends it."
        )
    by_rank = {situation.rank: situation for situation in idle}
    where = _where(sorted(by_rank), by_rank, now_ns, folder)
    return "\n".join([headline, *where, *filter(None, [places]), remedy])


def _group(label: str, members: tuple[int, ...], ranks: int, *, folder: str, always: bool = False) -> str:
    """Return the name of a process group as the user knows it; "" for one of all ranks that needs no name.

    `always` names a group of all ranks, too, to distinguish it from others.

    >>> _group("the group 'tp'", (0, 2), 4, folder=""), _group("the group made at a.py:3", (0, 1), 4, folder="")
    ("the group 'tp' (ranks 0, 2)", 'the group of ranks 0-1')
    >>> _group("the group made at /job/a.py:3", (0, 1), 2, folder="/job", always=True)
    'the group made at a.py:3'
    """
    everybody = len(members) in (0, ranks)
    if not label or not (always or label.startswith("the group '")):
        return "" if everybody else f"the group of {name_ranks(members)}"
    label = label.replace(f"{folder.rstrip('/')}/", "") if folder else label
    return label if everybody else f"{label} ({name_ranks(members)})"


def _headline(wait: OperationWait, ranks: int, now_ns: int, *, label: bool = False, folder: str = "") -> str:
    seconds = format_duration((now_ns - wait.since_ns) / 1e9)
    has = "has" if len(wait.waiting) == 1 else "have"
    who = f"{name_ranks(wait.waiting)} {has} waited {seconds} in {wait.name}"
    where = ""
    if wait.kind == "collective" and (group := _group(wait.label, wait.members, ranks, always=label, folder=folder)):
        where = f" of {group}"
    if not wait.missing:
        return f"{who}{where}; all ranks of the group are in it"
    if wait.kind == "point-to-point" and len(wait.missing) > 1:
        return f"{who} for any other rank"
    return f"{who}{where} for {name_ranks(wait.missing)}"


def _operations(operations: Sequence[OperationState], folder: str) -> list[str]:
    """List the operations that ranks are in: equal ones in one line, with the line of source below."""
    folded: dict[tuple[str, str, str], list[int]] = {}
    for operation in operations:
        call = f"{operation.name}({operation.detail})"
        place = operation.place.place_in(folder) if operation.place else ""
        source = operation.place.source if operation.place else ""
        folded.setdefault((call, place, source), []).append(operation.rank)
    lines = []
    for (call, place, source), ranks in folded.items():
        lines.append(f"  {name_ranks(ranks)}: {call}{'  at ' * bool(place)}{place}"[: 2 * _WIDTH])
        if source:
            lines.append(f"        {source}"[:_WIDTH])
    return lines


def _where(ranks: Sequence[int], by_rank: Mapping[int, Situation], now_ns: int, folder: str) -> list[str]:
    """List where ranks are instead, equal ones together."""
    folded: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks:
        folded.setdefault(tuple(_block(by_rank[rank], now_ns, folder, full=False)), []).append(rank)
    lines = []
    for (state, *body), same in list(folded.items())[:_MOST_MISSING]:
        lines += [f"{name_ranks(same)}: {state}", *body]
    if len(folded) > _MOST_MISSING:
        lines.append(f"… and {len(folded) - _MOST_MISSING} more")
    return lines


def _block(situation: Situation, now_ns: int, folder: str, *, full: bool) -> list[str]:
    lines = [_state(situation)]
    last = situation.calls[-1] if situation.calls else None
    running = [call for call in situation.calls if call.running]
    for call in running:
        lines.append(f"  in {_call(call, folder)}, for {format_duration((now_ns - call.started_ns) / 1e9)}")
    if last is not None and not running:
        when = format_duration((now_ns - (last.ended_ns or now_ns)) / 1e9)
        lines.append(f"  its last call was {_call(last, folder)}, {when} ago")
    if full:
        for thread in situation.threads:
            which = f"thread {thread.ident:#x}" if thread.ident else "main thread; the others did not answer"
            lines += [f"  {which}", *_stack(thread, folder, full=True)]
    elif situation.main is not None:
        lines += _stack(situation.main, folder, full=False)
        for thread in _awaited(situation)[:_MOST_THREADS]:
            lines += ["  another thread of it:", *_stack(thread, folder, full=False)]
    elif not running and last is None and not situation.ended:
        lines.append("  it has called nothing in torch.distributed, and its stack could not be read")
    for pid, name, threads in situation.children[: None if full else _MOST_CHILDREN]:
        # The main thread of a worker comes last. Feeder threads of queues run no user code.
        own = [_without_parents(thread, situation.main) for thread in threads]
        shown = threads if full else tuple(t for t in own if any(not f.is_library for f in t.frames))[-1:]
        if shown:
            lines.append(f"  its child process {pid} ({name}):")
            lines += ["  " + line for thread in shown for line in _stack(thread, folder, full=full)]
    return lines


def _state(situation: Situation) -> str:
    if situation.ended:
        code = situation.exit_code
        return "ended" if code is None else f"ended with code {code}" if code >= 0 else f"killed by signal {-code}"
    if situation.state == "stopped":
        return f"stopped, by SIGSTOP or a debugger; `kill -CONT {situation.pid}` lets it go on"
    if situation.state == "in the kernel":
        return "stuck in the kernel, as with a disk or network file system that does not answer"
    if situation.state == "running" or (situation.load is not None and situation.load >= 0.5):
        return "computing"
    if situation.main is not None and any(_ends(frame) for frame in situation.main.frames):
        return "at the end, waiting for threads that are not daemons"
    return "waiting for its DataLoader" if _waits_for_loader(situation.main) else "waiting"


def _without_parents(thread: Thread, parent: Thread | None) -> Thread:
    """Return a thread's stack without the calls from before the fork, which are the parent's, too."""
    outer = list(reversed(thread.frames))
    common = 0
    for own, theirs in zip(outer, reversed(parent.frames if parent else ()), strict=False):
        if own != theirs:
            break
        common += 1
    return Thread(ident=thread.ident, frames=tuple(reversed(outer[common:])))


def _ends(frame: Frame) -> bool:
    """Return True if the interpreter waits for threads in this frame before it ends."""
    return frame.function == "_shutdown" and frame.file.endswith("/threading.py")


def _awaited(situation: Situation) -> list[Thread]:
    """Return the threads that run user code if the main one waits for a thread or a condition, as at its end."""
    main = situation.main
    if main is None or not main.frames or not main.frames[0].file.endswith("/threading.py"):
        return []
    others = (thread for thread in situation.threads if thread is not main)
    return [thread for thread in others if any(not frame.is_library for frame in thread.frames)]


def _waits_for_loader(thread: Thread | None) -> bool:
    frames = thread.frames if thread else ()
    return any(frame.file.endswith("torch/utils/data/dataloader.py") and "next" in frame.function for frame in frames)


def _stack(thread: Thread, folder: str, *, full: bool) -> list[str]:
    """Return the lines of a stack and their source, innermost last; without `full`, only user frames and the last."""
    frames = [frame for frame in reversed(thread.frames) if full or not frame.is_library]
    if not frames and thread.frames:
        frames = [thread.frames[0]]
    hidden = 0 if full else max(0, len(frames) - _MOST_FRAMES)
    lines = [f"    … {hidden} outer calls"] if hidden else []
    for frame in frames[hidden:]:
        lines.append(f"    {frame.place_in(folder)}")
        if frame.source:
            lines.append(f"        {frame.source}"[:_WIDTH])
    inner = thread.frames[0] if thread.frames else None
    if not full and inner is not None and inner.is_library and inner not in frames:
        lines.append(f"    {inner.place_in(folder)}")
    return lines


def _call(call: RecordedCall, folder: str) -> str:
    place = f" at {short_path(call.file, folder=folder)}:{call.line}" if call.file else ""
    return f"{call.name}({detail_of(call)}){place}"
