"""A rank's record of the error that ends it, as data that fits into its status block: type, message, frames, causes.

Made in the rank, where the error object is; read by the agent, as JSON. Start reading at `record_error`.
"""

from __future__ import annotations

import json
import re
import signal
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from unisono.launch.failure.frames import FrameRecord, frame_at, frames_in, frames_of, is_hidden

__all__ = ["ErrorRecord", "record_error", "remote_error"]

ErrorRecord = dict[str, Any]
"""Data for JSON: type, message, notes, frames (outermost first), chain (its causes, nearest first: the same with
`link`, "cause" or "context"), traceback (the full text), code (exit code). Where they apply: group (the errors in an
ExceptionGroup, and `members`, their number) and remote (the error of another process, which the message holds)."""

_MOST_BYTES = 47 << 10  # the status block has 48 KiB for it, including a header
_MOST_MESSAGE = 6000
_MOST_CHAIN = 6
_MOST_MEMBERS = 8
_HEADING = "Traceback (most recent call last):"
_WHERE = (
    re.compile(r"Caught \S+ in (?P<where>.+?)\.\s"),  # torch, for errors of DataLoader workers
    re.compile(r"On WorkerInfo\(id=\d+, name=(?P<where>[^)]+)\)"),  # torch's RPC
    re.compile(r"-- (?P<where>Process \d+) terminated"),  # torch's spawn
)


def record_error(error: BaseException) -> ErrorRecord:
    """Return the record of an error. Its JSON has less than 48 KiB.

    >>> account = record_error(ValueError("bad batch"))
    >>> account["type"], account["message"], account["code"]
    ('ValueError', 'bad batch', 1)
    """
    try:
        account = _describe_all(error)
    except MemoryError:
        # The variables of the frames are not needed any more, and may have filled the memory.
        traceback.clear_frames(error.__traceback__)
        account = _describe_all(error)
    return _fit(account)


def remote_error(message: str) -> ErrorRecord | None:
    """Return the error of another process from a message that contains its traceback; None if it contains none.

    >>> remote_error('Caught KeyError in DataLoader worker process 0.\\nOriginal Traceback (most recent call last):\\n'
    ...     '  File "/data.py", line 7, in load\\n    return table[key]\\nKeyError: 3\\n')["where"]
    'DataLoader worker process 0'
    """
    before, heading, text = message.rpartition(_HEADING)
    if not heading:
        return None
    error = _last_words(text)
    kind, _, told = error.partition(": ")
    found = [match["where"] for pattern in _WHERE if (match := pattern.search(before + heading))]
    where = found[0] if found else "another process"
    return {"type": kind, "message": _cut(told, _MOST_MESSAGE), "frames": frames_in(text)[-40:], "where": where}


def _describe_all(error: BaseException) -> ErrorRecord:
    trace = _without_launcher(error.__traceback__)
    chain = [{"link": link, **_describe(other, other.__traceback__)} for link, other in _chain(error)]
    account = {**_describe(error, trace), "chain": chain}
    if "remote" not in account and chain and chain[0]["type"].endswith("RemoteTraceback") and "remote" in chain[0]:
        account["remote"] = chain.pop(0)["remote"]  # how multiprocessing's and concurrent's pools pass an error on
    text = "".join(traceback.format_exception(type(error), error, trace))
    return {**account, "traceback": _clean(text), "code": _exit_code(error)}


def _describe(error: BaseException, trace: TracebackType | None) -> ErrorRecord:
    message = _message(error)
    notes = getattr(error, "__notes__", None)
    account: ErrorRecord = {
        "type": _type_name(type(error)),
        "message": _cut(message, _MOST_MESSAGE),
        "notes": [_cut(_clean(str(note)), 1000) for note in notes[:10]] if isinstance(notes, list) else [],
        "frames": frames_of(trace),
    }
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        account["frames"].append(_syntax_frame(error))
    if (remote := remote_error(message)) is not None:
        account["remote"] = remote
    members = getattr(error, "exceptions", None)
    # Python before 3.11 has no class for these, but a package adds it.
    if isinstance(members, tuple) and all(isinstance(member, BaseException) for member in members):
        account["members"] = len(members)
        account["group"] = [_describe(member, member.__traceback__) for member in members[:_MOST_MEMBERS]]
    return account


def _message(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.msg:
        return _clean(str(error.msg))
    try:
        return _clean(str(error))
    except Exception:  # the user's own __str__ may raise anything
        return "(its __str__ raised an error)"


def _syntax_frame(error: SyntaxError) -> FrameRecord:
    frame = frame_at(str(error.filename), error.lineno or 0, "", source=error.text)
    if error.text and error.offset and error.offset > 0:
        start = error.offset - 1 - (len(error.text) - len(error.text.lstrip()))
        end = getattr(error, "end_offset", None) if getattr(error, "end_lineno", None) == error.lineno else None
        length = max(1, end - error.offset) if end else 1
        if 0 <= start <= len(frame["source"]):
            frame["span"] = [start, start + length]
    return frame


def _chain(error: BaseException) -> Iterator[tuple[str, BaseException]]:
    """Yield the errors that an error came from, nearest first, as Python prints them."""
    seen = {id(error)}
    while len(seen) <= _MOST_CHAIN:
        if error.__cause__ is not None:
            link, error = "cause", error.__cause__
        elif error.__context__ is not None and not error.__suppress_context__:
            link, error = "context", error.__context__
        else:
            return
        if id(error) in seen:
            return
        seen.add(id(error))
        yield link, error


def _type_name(kind: type[BaseException]) -> str:
    module = kind.__module__
    return kind.__qualname__ if module in ("builtins", "__main__") else f"{module}.{kind.__qualname__}"


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _without_launcher(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames between the interpreter and the user's first one."""
    while trace is not None and is_hidden(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _last_words(text: str) -> str:
    """Return the error at the end of a printed traceback: from the first unindented line after the last frame."""
    lines = text.strip().removesuffix('"""').rstrip().splitlines()
    frame = max((i for i, line in enumerate(lines) if line.lstrip().startswith('File "')), default=-1)
    words = [i for i, line in enumerate(lines) if i > frame and line and not line[0].isspace() and line[0] != "["]
    return "\n".join(lines[words[0] :]) if words else ""


def _clean(text: str) -> str:
    """Replace characters that cannot be encoded, such as bytes of a file name that is not UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def _cut(text: str, most: int) -> str:
    """Shorten a text in the middle.

    >>> _cut("a" * 50 + "b" * 50, 40)
    'aaaaaaaaaa … (80 characters) … bbbbbbbbbb'
    """
    if len(text) <= most:
        return text
    kept = max(1, (most - 20) // 2)
    return f"{text[:kept]} … ({len(text) - 2 * kept} characters) … {text[-kept:]}"


def _fit(account: ErrorRecord) -> ErrorRecord:
    """Shorten the parts that matter least until the whole is small enough."""

    def excess() -> int:
        return len(json.dumps(account)) - _MOST_BYTES

    text, most = account["traceback"], _MOST_BYTES
    # A character that is not ASCII takes 6 or 12 bytes in JSON, so one cut may not be enough.
    while excess() > 0 and most > 2000:
        most = most * 2 // 3
        account["traceback"] = _cut(text, most)
    for part in ("group", "chain", "notes"):
        while excess() > 0 and account.get(part):
            account[part].pop()
    for error in (account, account.get("remote", {})):
        while excess() > 0 and len(error.get("frames", [])) > 4:
            del error["frames"][len(error["frames"]) // 2]
        while excess() > 0 and len(error.get("message", "")) > 500:
            error["message"] = _cut(error["message"], len(error["message"]) * 2 // 3)
    return account
