"""The failure report: one screen for people, and the same as JSON. Pure; start reading at `render`.

Its parts, in order: the rank and what happened, the place in your code, a hint, its last lines of output, other ranks.
Frames of libraries are folded into one line.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.launch.failure.frames import FrameRecord, frames_in, is_own
from unisono.launch.failure.hints import hint_for, meaning_of_signal
from unisono.launch.failure.root_cause import RankFailure, RootCause, has_heard, name_signal
from unisono.launch.failure.traceback_lines import frame_lines, short_place
from unisono.text import clip, name_ranks, without_cpp_place

__all__ = ["Circumstances", "headline", "render", "report_as_data"]

_MOST_MESSAGE_LINES = 6
_MOST_BODY_LINES = 24
_MOST_TAIL = 8
_LABEL = 13
_INDENT = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """The facts in a report besides the failures themselves."""

    ranks: int
    """How many ranks the job has."""
    folder: str = ""
    """Working directory; paths of source files are shown relative to it."""
    evidence: str | None = None
    """Evidence of a lack of memory in the kernel's counters (`unisono.memory.evidence`); None if there is none."""
    log_files: Mapping[int, Sequence[Path]] = field(default_factory=dict)
    """By rank, the files with all its output in this generation."""
    restarts: int = 0
    """How often the ranks have been restarted before this failure."""
    max_restarts: int = 0
    """How often they may be restarted."""
    recoveries: Sequence[Mapping[str, Any]] = ()
    """The replacements of ranks before it (`launch.replacing`)."""
    mismatch: str = ""
    """The report of collectives that did not match, if any (`launch.hang.hang_report.render_mismatch`)."""
    remarks: Sequence[str] = ()
    """Sentences to add: why there is no restart, what absent ranks did."""
    run_id: str = ""


def render(verdict: RootCause, circumstances: Circumstances, *, colour: bool = False, columns: int = 100) -> str:
    """Return the report: lines of at most `columns` characters, without a line break at the end."""
    lines = _ReportLines(colour=colour, columns=columns)
    lines.add(f"unisono: {headline(verdict, circumstances)}", style="headline")
    body = list(_body(verdict, circumstances, columns - _INDENT))
    if body:
        lines.add("")
    for text, style in body[:_MOST_BODY_LINES]:
        lines.add(f"  {text}" if text else "", style=style)
    if len(body) > _MOST_BODY_LINES:
        lines.add(f"  … {len(body) - _MOST_BODY_LINES} more lines", style="dim")
    lines.add("")
    for label, texts in _facts(verdict, circumstances, columns - _LABEL - 2):
        for number, text in enumerate(texts):
            lines.fact(label if number == 0 else "", text)
    return lines.text()


def report_as_data(verdict: RootCause, circumstances: Circumstances) -> dict[str, Any]:
    """Return the report as data, for a file beside the logs."""
    parts = {
        "same": verdict.same,
        "victims": verdict.victims,
        "others": verdict.others,
    }
    return {
        "run_id": circumstances.run_id,
        "ranks": circumstances.ranks,
        "headline": headline(verdict, circumstances),
        "exit_code": verdict.code,
        "cause_ranks": list(verdict.ranks),
        "absent_ranks": list(verdict.absent),
        "cause": _failure_as_json(verdict.cause, circumstances),
        **{name: [_failure_as_json(failure, circumstances) for failure in found] for name, found in parts.items()},
        "ended_ranks": list(verdict.ended),
        "mismatch": circumstances.mismatch,
        "evidence": circumstances.evidence,
        "restarts": circumstances.restarts,
        "max_restarts": circumstances.max_restarts,
        "recoveries": list(circumstances.recoveries),
        "remarks": list(circumstances.remarks),
    }


_REFUSED = ("TypeError", "ValueError")
"""Types of errors by which torch refuses arguments."""


class _ReportLines:
    """Collects the lines of a report, clipped and optionally coloured."""

    _STYLES = {"headline": "1;31", "error": "31", "dim": "2", "label": "2"}  # noqa: RUF012  a table

    def __init__(self, *, colour: bool, columns: int) -> None:
        self._colour = colour
        self._columns = columns
        self._lines: list[str] = []

    def add(self, text: str, *, style: str = "") -> None:
        self._lines.append(self._paint(clip(_plain(text), self._columns), style))

    def fact(self, label: str, text: str) -> None:
        """Add a line of the lower part after a label, wrapped where it is too long."""
        for number, part in enumerate(_wrap(_plain(text), self._columns - _LABEL - 2)):
            head = f"  {(label if number == 0 else ''):<{_LABEL}}"
            self._lines.append(f"{self._paint(head, 'label')}{part}".rstrip())

    def text(self) -> str:
        return "\n".join(self._lines)

    def _paint(self, text: str, style: str) -> str:
        return f"\x1b[{self._STYLES[style]}m{text}\x1b[0m" if self._colour and style and text.strip() else text


def headline(verdict: RootCause, circumstances: Circumstances, *, most: int = 2000) -> str:
    """Return which rank was the cause and what happened to it, in a line of at most `most` characters."""
    return clip(_plain(_headline(verdict, circumstances)), most)


def _headline(verdict: RootCause, circumstances: Circumstances) -> str:
    cause, ranks = verdict.cause, verdict.ranks
    if _is_of_mismatch(verdict, circumstances):
        return circumstances.mismatch.splitlines()[0]
    if verdict.absent:
        names = name_ranks(verdict.absent)
        waiting = name_ranks({failure.rank for failure in (cause, *verdict.same, *verdict.victims)})
        if verdict.absent_finished:
            return f"{names} ended while {waiting} still needed {_them(verdict.absent)}"
        if verdict.absent_left:
            its = "its" if len(verdict.absent) == 1 else "their"
            return f"{names} left {its} process groups while {waiting} still needed {_them(verdict.absent)}"
        return f"{names} did not come where {waiting} waited for {_them(verdict.absent)}"
    names = f"all {len(ranks)} ranks" if len(ranks) == circumstances.ranks > 1 else name_ranks(ranks)
    return f"{names} {_what_happened(cause, were='was' if len(ranks) == 1 else 'were')}"


def _what_happened(cause: RankFailure, *, were: str) -> str:
    account = cause.account
    if cause.code < 0:
        return f"{were} killed by {name_signal(-cause.code)}"
    if account is None:
        return f"exited with code {cause.code}"
    if account["type"] == "SystemExit":
        words = _title(account, most=2000).partition(": ")[2]
        return f"exited with code {cause.code}" + f": {words}" * (words not in ("", str(cause.code)))
    if account["type"] == "KeyboardInterrupt":
        return f"{were} interrupted (KeyboardInterrupt)"
    subject = account.get("remote", account)
    if account.get("handled"):
        return f"left its process groups while handling {_title(subject, most=2000)}"
    where = f" in {subject['where']}" if "where" in subject else ""
    return f"failed{where}: {_title(subject, most=2000)}"


def _body(verdict: RootCause, circumstances: Circumstances, width: int) -> Iterator[tuple[str, str]]:
    """Yield the middle part: lines and their styles."""
    cause, folder = verdict.cause, circumstances.folder
    account = cause.account
    if _is_of_mismatch(verdict, circumstances):
        yield from ((line.removeprefix("  "), "") for line in circumstances.mismatch.splitlines()[1:])
        then = f"Then rank {cause.rank} {_what_happened(cause, were='was')}"
        yield from ((line, "") for line in _wrap(f"{then}{f', {cause.doing}' if cause.code < 0 else ''}.", width))
        return
    if circumstances.mismatch:
        yield from ((line, "") for line in circumstances.mismatch.splitlines())
        yield "", ""
    if verdict.absent and account is not None:
        yield f"rank {cause.rank} then failed: {_title(account)}", ""
        yield from frame_lines(account["frames"], folder)
        return
    if len(verdict.ranks) > 1:
        yield f"The first was rank {cause.rank}:", "dim"
    if cause.code < 0:
        yield from _signal_body(cause, circumstances, width)
    elif account is None:
        yield "It gave no Python error: os._exit, native code, or a program that is not Python.", ""
        if cause.doing:
            yield f"It was {cause.doing}.", ""
    else:
        is_told = len(f"unisono: {_headline(verdict, circumstances)}") <= width + _INDENT
        yield from _error_body(account, folder, width, is_told=is_told)


def _signal_body(cause: RankFailure, circumstances: Circumstances, width: int) -> Iterator[tuple[str, str]]:
    if meaning := meaning_of_signal(-cause.code, evidence=circumstances.evidence):
        yield from ((line, "") for line in _wrap(f"{meaning[:1].upper()}{meaning[1:]}.", width))
    if cause.doing:
        yield f"It was {cause.doing}.", ""
    if frames := _crash_frames(cause.crash_stack):
        yield "", ""
        yield from frame_lines(frames, circumstances.folder)


def _error_body(account: Mapping[str, Any], folder: str, width: int, *, is_told: bool) -> Iterator[tuple[str, str]]:
    subject = account.get("remote", account)
    yield from frame_lines(subject["frames"], folder)
    yield from _rest_of_message(subject, width, is_told=is_told)
    for note in account["notes"]:
        yield from ((line, "") for line in note.splitlines()[:3])
    if subject is not account and (own := [frame for frame in account["frames"] if is_own(frame)]):
        yield f"asked for at {short_place(own[-1], folder)}: {own[-1]['source']}", "dim"
    for member in account.get("group", ())[:4]:
        yield _title(member), "error"
        yield from frame_lines(member["frames"], folder, most=4)
    if (hidden := account.get("members", 0) - 4) > 0:
        yield f"… {hidden} more errors in the group", "dim"
    for link in account["chain"][:2]:
        yield "", ""
        how = "caused by" if link["link"] == "cause" else "while handling"
        yield f"{how} {_title(link)}", "error"
        yield from frame_lines(link["frames"], folder, most=6, within=subject["frames"])


def _victims(verdict: RootCause) -> Iterator[str]:
    heard = {failure.rank for failure in verdict.victims if has_heard(failure)}
    lost = {failure.rank for failure in verdict.victims} - heard
    causes = name_ranks(verdict.ranks)
    if lost:
        yield f"{name_ranks(lost)} only lost " + (f"the connection to {causes}" if len(verdict.ranks) < 8 else "a peer")
    if heard:
        yield f"{name_ranks(heard)} only heard of " + (f"the failure of {causes}" if len(verdict.ranks) < 8 else "it")


def _rest_of_message(account: Mapping[str, Any], width: int, *, is_told: bool) -> Iterator[tuple[str, str]]:
    """Yield the lines of a message that the headline does not show. Stacks of C++ are only in the log."""
    lines = [line for line in account["message"].splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("frame #", "Exception raised from"))]
    told = lines[1:] if is_told else [": ".join([account["type"], *lines[:1]]), *lines[1:]]
    wrapped = [part for line in told for part in _wrap(line, width)]
    for line in wrapped[:_MOST_MESSAGE_LINES]:
        yield line, "error"
    if len(wrapped) > _MOST_MESSAGE_LINES:
        yield f"… {len(wrapped) - _MOST_MESSAGE_LINES} more lines", "dim"


def _facts(verdict: RootCause, circumstances: Circumstances, width: int) -> Iterator[tuple[str, list[str]]]:
    """Yield the lower part: labels and their lines."""
    cause = verdict.cause
    # For a signal, the middle part contains it already.
    if circumstances.evidence is not None and cause.code >= 0:
        yield "memory", [circumstances.evidence]
    if hint := _hint(cause):
        yield "hint", [hint]
    if tail := _tail(cause):
        yield "last lines", [clip(_plain(line), width) for line in tail]
    if verdict.victims and not verdict.absent:
        yield "victims", [*_victims(verdict)]
    if verdict.others:
        yield "also failed", [_other(failure) for failure in verdict.others[:3]]
    if verdict.ended:
        yield "ended", [f"{name_ranks(verdict.ended)}, by the launcher"]
    named = circumstances.log_files.get(verdict.rank) or circumstances.log_files.get(cause.rank)
    if named:
        yield "log files", [str(path) for path in named]
    if circumstances.max_restarts:
        yield "restarts", [f"{circumstances.restarts} of {circumstances.max_restarts} used"]
    for remark in circumstances.remarks:
        yield "note", [remark]
    yield "exit code", [str(verdict.code)]


def _hint(cause: RankFailure) -> str | None:
    if cause.account is None:
        return hint_for("\n".join(cause.tail)) if cause.code != -9 else None
    subject = cause.account.get("remote", cause.account)
    errors = (subject, *cause.account["chain"])
    hints = (hint_for(f"{error['type']}: {error['message']}") for error in errors)
    return next((hint for hint in hints if hint is not None), None)


def _tail(cause: RankFailure) -> list[str]:
    """Return those of the last lines that the report does not contain yet."""
    account = cause.account or {}
    told = {line.strip() for text in ("traceback", "message") for line in account.get(text, "").splitlines()}
    lines = [line for line in cause.tail if line.strip() and line.strip() not in told]
    return lines[-_MOST_TAIL:]


def _other(failure: RankFailure) -> str:
    if failure.account is None or failure.code < 0:
        return failure.describe_end()
    return f"rank {failure.rank}, later: {_title(failure.account.get('remote', failure.account))}"


def _crash_frames(crash_stack: str) -> list[FrameRecord]:
    """Return the frames of the thread that crashed, outermost first; the fault handler writes the innermost first."""
    _, found, stack = crash_stack.partition("Current thread ")
    text = stack.partition("\n\n")[0].partition("\nThread ")[0] if found else ""
    frames = frames_in(text)[::-1]
    # The fork server was started with `-c`.
    return frames[1:] if frames and frames[0]["file"] == "<string>" else frames


def _is_of_mismatch(verdict: RootCause, circumstances: Circumstances) -> bool:
    """Return True if the failure results from collectives that do not match, and is not another error."""
    account, code = verdict.cause.account, verdict.cause.code
    if not circumstances.mismatch or verdict.absent_finished:
        return False
    if verdict.absent or account is None:
        return bool(verdict.absent) or code == -signal.SIGABRT
    frames = account["frames"] or [{"file": ""}]
    return "/torch/distributed/" in frames[-1]["file"] and account["type"] not in _REFUSED


def _title(account: Mapping[str, Any], *, most: int = 200) -> str:
    """Return an error in one line.

    >>> _title({"type": "ValueError", "message": "bad batch\\nof 3"})
    'ValueError: bad batch'
    """
    first = next((line.strip() for line in account["message"].splitlines() if line.strip()), "")
    first = without_cpp_place(first) or first
    return clip(f"{account['type']}: {first}" if first else account["type"], most)


def _them(ranks: Sequence[int]) -> str:
    return "it" if len(ranks) == 1 else "them"


def _failure_as_json(failure: RankFailure, circumstances: Circumstances) -> dict[str, Any]:
    return {
        "rank": failure.rank,
        "exit_code": failure.code,
        "signal": name_signal(-failure.code) if failure.code < 0 else None,
        "pid": failure.pid,
        "time_ns": failure.time_ns,
        "error": failure.account,
        "crash_stack": failure.crash_stack,
        "doing": failure.doing,
        "last_lines": list(failure.tail),
        "log_files": [str(path) for path in circumstances.log_files.get(failure.rank, ())],
    }


def _plain(text: str) -> str:
    """Replace the characters that a terminal would interpret: colours, returns, other control characters."""
    return "".join(character if character.isprintable() else " " for character in text.expandtabs(4))


def _wrap(text: str, columns: int) -> list[str]:
    """Break a text into lines, at blanks or after a slash if there are any. Drops nothing but blanks."""
    lines = []
    while len(text) > columns:
        cut = text.rfind(" ", columns // 2, columns + 1)
        if cut < 0:
            cut = text.rfind("/", columns // 2, columns) + 1 or columns
        lines.append(text[:cut])
        text = text[cut:].lstrip()
    return [*lines, text]
