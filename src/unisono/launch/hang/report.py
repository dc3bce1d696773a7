"""Words for ranks that wait in vain, and for where ranks are: one screen, equal ranks together. Pure functions.

Start reading at `render_finding`; `render_stacks` is what `unisono stacks` prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unisono.launch.failure.frames import short_path
from unisono.launch.hang.judgement import Finding, Mismatch, Operation, Situation, Wait, detail_of
from unisono.launch.hang.page import Call, name_range
from unisono.launch.hang.stacks import Frame, Thread

__all__ = ["name_group", "render_finding", "render_mismatch", "render_stacks", "render_stragglers", "summarize"]

_MOST_FRAMES = 6
_MOST_MISSING = 4
_MOST_CHILDREN = 2
_WIDTH = 100
_LONGEST_LIST = 40


def render_finding(
    finding: Finding, situations: Sequence[Situation], *, now_ns: int, folder: str, remedy: str = ""
) -> str:
    """Say who waits where, and where the ranks are that they wait for.

    Args: folder is the job's working directory, which paths are shortened by; remedy is said at the end.
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
            group = f", group {wait.group!r}" if several and wait.group else ""
            lines += [_headline(wait, len(by_rank), now_ns) + group, *_operations(wait.operations, folder)]
        missing = sorted({rank for wait in finding.waits for rank in wait.missing})
        waiting = {rank for wait in finding.waits for rank in wait.waiting}
        if missing and set(missing) <= waiting and not any(by_rank[rank].state == "stopped" for rank in missing):
            lines.append("They wait for each other.")
        # Those that wait for nobody come first: one of them is the cause.
        first = [rank for rank in missing if rank not in waiting or by_rank[rank].state == "stopped"]
        lines += _where(first, by_rank, now_ns, folder)
    return "\n".join([*lines, *([remedy] if remedy else [])])


def summarize(finding: Finding, *, ranks: int, now_ns: int) -> str:
    """Give a finding in one line."""
    if finding.mismatch is not None:
        return render_mismatch(finding.mismatch, ranks=ranks, folder="").splitlines()[0]
    return _headline(finding.waits[0], ranks, now_ns)


def render_mismatch(mismatch: Mismatch, *, ranks: int, folder: str) -> str:
    """Say which collectives do not match. The first line stands for itself."""
    whose = "" if len(mismatch.members) in (0, ranks) else f" of {name_group(mismatch.members, ranks)}"
    lines = [f"{_odd_ones(mismatch)} (collective {mismatch.sequence}{whose})"]
    lines += _operations(mismatch.operations, folder)
    lines.append("Every rank must call the same collectives in the same order, with equal shapes and dtypes.")
    return "\n".join(lines)


def _odd_ones(mismatch: Mismatch) -> str:
    """Say which ranks call something else than most do, or than the first one does."""
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
    return f"{_name(tuple(ranks))} {call} {other} where {_name(tuple(most))} {usually} {usual}"


def render_stacks(situations: Sequence[Situation], *, now_ns: int, folder: str, full: bool = False) -> str:
    """Show the stack and the collective of every rank; equal ranks together.

    Args: full shows the stacks of all threads, with library frames, instead of the main thread's own.
    """
    blocks: dict[tuple[str, ...], list[int]] = {}
    for situation in situations:
        blocks.setdefault(tuple(_block(situation, now_ns, folder, full=full)), []).append(situation.rank)
    parts = []
    for (state, *body), ranks in blocks.items():
        parts.append("\n".join([f"{_name(tuple(ranks))}: {state}", *body]))
    return "\n".join(parts)


def render_stragglers(
    left: Sequence[Situation], *, ended: Sequence[int], idle_s: float, now_ns: int, folder: str, remedy: str
) -> str:
    """Say that these ranks stay and do nothing since the others have ended."""
    have = "has" if len(left) == 1 else "have"
    who = _name(tuple(situation.rank for situation in left))
    seconds = _duration(int(idle_s * 1e9))
    lines = [f"{_name(tuple(ended))} ended {seconds} ago or more, and {who} {have} done nothing since"]
    by_rank = {situation.rank: situation for situation in left}
    return "\n".join([*lines, *_where(sorted(by_rank), by_rank, now_ns, folder), remedy])


def name_group(members: tuple[int, ...], ranks: int) -> str:
    """Name a process group by its members.

    >>> name_group((0, 2), 4), name_group((0, 1), 2)
    ('the group of ranks 0,2', 'all ranks')
    """
    return "all ranks" if len(members) in (0, ranks) else f"the group of ranks {name_range(members)}"


def _headline(wait: Wait, ranks: int, now_ns: int) -> str:
    seconds = _duration(now_ns - wait.since_ns)
    has = "has" if len(wait.waiting) == 1 else "have"
    who = f"{_name(wait.waiting)} {has} waited {seconds} in {wait.name}"
    where = (
        ""
        if len(wait.members) in (0, ranks) or wait.kind != "collective"
        else " in a group of " + name_range(wait.members)
    )
    if not wait.missing:
        return f"{who}{where}; all ranks of the group are in it"
    if wait.kind == "point-to-point" and len(wait.missing) > 1:
        return f"{who} for any other rank"
    return f"{who}{where} for {_name(wait.missing)}"


def _operations(operations: Sequence[Operation], folder: str) -> list[str]:
    """List what ranks are in: equal ones in one line, with the line of source under it."""
    folded: dict[tuple[str, str, str], list[int]] = {}
    for operation in operations:
        call = f"{operation.name}({operation.detail})"
        place = _place(operation.place, folder) if operation.place else ""
        source = operation.place.source if operation.place else ""
        folded.setdefault((call, place, source), []).append(operation.rank)
    lines = []
    for (call, place, source), ranks in folded.items():
        lines.append(f"  {_label(ranks)} {call}{'  at ' * bool(place)}{place}"[: 2 * _WIDTH])
        if source:
            lines.append(f"        {source}"[:_WIDTH])
    return lines


def _where(ranks: Sequence[int], by_rank: Mapping[int, Situation], now_ns: int, folder: str) -> list[str]:
    """Say where these ranks are instead."""
    folded: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks:
        folded.setdefault(tuple(_block(by_rank[rank], now_ns, folder, full=False)), []).append(rank)
    lines = []
    for (state, *body), same in list(folded.items())[:_MOST_MISSING]:
        lines += [f"{_name(tuple(same))}: {state}", *body]
    if len(folded) > _MOST_MISSING:
        lines.append(f"… and {len(folded) - _MOST_MISSING} more")
    return lines


def _block(situation: Situation, now_ns: int, folder: str, *, full: bool) -> list[str]:
    lines = [_state(situation)]
    last = situation.calls[-1] if situation.calls else None
    running = [call for call in situation.calls if call.running]
    for call in running:
        lines.append(f"  in {_call(call, folder)}, for {_duration(now_ns - call.started_ns)}")
    if last is not None and not running:
        when = _duration(now_ns - (last.ended_ns or now_ns))
        lines.append(f"  its last call was {_call(last, folder)}, {when} ago")
    if full:
        for thread in situation.threads:
            which = f"thread {thread.ident:#x}" if thread.ident else "main thread; the others did not answer"
            lines += [f"  {which}", *_stack(thread, folder, full=True)]
    elif situation.main is not None:
        lines += _stack(situation.main, folder, full=False)
    elif not running and last is None and not situation.ended:
        lines.append("  it has called nothing in torch.distributed, and its stack could not be read")
    for pid, name, threads in situation.children[: None if full else _MOST_CHILDREN]:
        # The main thread of a worker is its last; feeder threads of queues run no code of the user's.
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
    return "waiting for its DataLoader" if _waits_for_loader(situation.main) else "waiting"


def _without_parents(thread: Thread, parent: Thread | None) -> Thread:
    """Leave out the calls from before a fork, which are the parent's too."""
    outer = list(reversed(thread.frames))
    common = 0
    for own, theirs in zip(outer, reversed(parent.frames if parent else ()), strict=False):
        if own != theirs:
            break
        common += 1
    return Thread(ident=thread.ident, frames=tuple(reversed(outer[common:])))


def _waits_for_loader(thread: Thread | None) -> bool:
    frames = thread.frames if thread else ()
    return any(frame.file.endswith("torch/utils/data/dataloader.py") and "next" in frame.function for frame in frames)


def _stack(thread: Thread, folder: str, *, full: bool) -> list[str]:
    """Give the stack, innermost call last; without `full`, the user's own frames with their source."""
    frames = [frame for frame in reversed(thread.frames) if full or not frame.is_library]
    if not frames and thread.frames:
        frames = [thread.frames[0]]
    hidden = 0 if full else max(0, len(frames) - _MOST_FRAMES)
    lines = [f"    … {hidden} outer calls"] if hidden else []
    for frame in frames[hidden:]:
        lines.append(f"    {_place(frame, folder)}")
        if frame.source:
            lines.append(f"        {frame.source}"[:_WIDTH])
    inner = thread.frames[0] if thread.frames else None
    if not full and inner is not None and inner.is_library and inner not in frames:
        lines.append(f"    {_place(inner, folder)}")
    return lines


def _call(call: Call, folder: str) -> str:
    place = f" at {short_path(call.file, folder=folder)}:{call.line}" if call.file else ""
    return f"{call.name}({detail_of(call)}){place}"


def _place(frame: Frame, folder: str) -> str:
    function = "" if frame.function == "<module>" else f" in {frame.function}"
    return f"{short_path(frame.file, folder=folder)}:{frame.line}{function}"


def _label(ranks: Sequence[int]) -> str:
    return f"{_name(tuple(ranks))}:"


def _name(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    listed = name_range(ranks)
    return f"ranks {listed}" if len(listed) <= _LONGEST_LIST else f"{len(ranks)} ranks ({listed[:_LONGEST_LIST]}…)"


def _duration(elapsed_ns: int) -> str:
    """Give a time span in words.

    >>> _duration(31_400_000_000), _duration(400_000_000), _duration(75_000_000_000)
    ('31 s', '0.4 s', '1 min 15 s')
    """
    seconds = elapsed_ns / 1e9
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
