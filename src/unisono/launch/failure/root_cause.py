"""Finds the rank that caused the failure of a job, and the ranks that only lost a peer.

Pure. Start reading at `find_root_cause`.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unisono.peer_loss import LOST_PEER

__all__ = ["RankFailure", "RootCause", "exit_status", "find_root_cause", "first_failure", "has_heard", "name_signal"]

_LEAD_NS = 50_000_000
"""How much earlier than its end was seen a rank may have failed, if it recorded no error. Its connections close before
its end is seen, so a peer's error can be recorded first. A peer that is not at fault needs longer than this to end."""
_LATE_LEAD_NS = 500_000_000
"""How much earlier than its record a rank may have given up waiting: it closes its connections first, and on a busy
machine the peers that see them closed may record their errors before it does."""

_LOST_IN_RPC = ("pipe closed", "eof: end of file")
"""RPC needs no process group."""
_STORE_TIMEOUT = ("wait timeout", "socket timeout")
"""A key of the store was not set. Within a call, a peer is missing; elsewhere, the program may wait for any key."""
_WAITED_IN_VAIN = (
    "timed out waiting",
    "timed out: rank",
    "collective operation timeout",
    "failed to pass monitoredbarrier",
    "timed out in monitoredbarrier",
    "errors while waiting",
)
_TORCH_TYPES = ("", "RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
"""Types of the errors that torch raises for a lost peer; "" where only text is known."""
_CONNECTION_TYPES = (
    *("ConnectionError", "ConnectionResetError", "ConnectionAbortedError", "ConnectionRefusedError"),
    *("BrokenPipeError", "EOFError", "BrokenBarrierError"),
)
"""Types of the errors that Python code raises for a lost connection, to a peer or to anything else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure:
    """The failure of one rank."""

    rank: int
    code: int
    """Its exit code; a negative number is the signal that ended it, as in `subprocess`."""
    time_ns: int
    """When it failed, by the monotonic clock: when it raised an error, or when its end was seen if it recorded none."""
    reported: bool
    """True if the rank itself recorded the failure, before it ended."""
    pid: int | None = None
    account: Mapping[str, Any] | None = None
    """Its record of the error (`launch.failure.error_record`)."""
    crash_stack: str = ""
    """The output of Python's fault handler when a signal ended it."""
    tail: tuple[str, ...] = ()
    """The last lines that it printed."""
    grouped: bool = True
    """False if it has never made a process group, and so cannot have lost a peer there."""
    in_call: bool = True
    """False if its latest call of torch.distributed had ended without an error."""
    doing: str = ""
    """The call that it was in, or had made last, as words: "in all_reduce at train.py:7"."""

    def describe_end(self) -> str:
        """Return how the process ended, as words.

        >>> RankFailure(rank=1, code=-9, time_ns=0, reported=False).describe_end()
        'rank 1 was killed by SIGKILL'
        """
        how = f"was killed by {name_signal(-self.code)}" if self.code < 0 else f"exited with code {self.code}"
        return f"rank {self.rank} {how}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RootCause:
    """The cause among the failures of a job's ranks, and how the other failures relate to it."""

    cause: RankFailure
    """The failure to report. If all failed ranks only missed a rank (`absent`), the first of their failures."""
    same: tuple[RankFailure, ...] = ()
    """Ranks that failed with the same error as the cause, in the same place."""
    victims: tuple[RankFailure, ...] = ()
    """Ranks that failed only because of a peer: it was lost, or told them of its own failure."""
    others: tuple[RankFailure, ...] = ()
    """Ranks that failed in another way, after the cause."""
    ended: tuple[int, ...] = ()
    """Ranks that the launcher ended."""
    absent: tuple[int, ...] = ()
    """If all failed ranks only missed a peer: the ranks that were missed, as far as they are known."""
    absent_finished: bool = False
    """True if the absent ranks had ended with exit code 0, and were not just elsewhere."""
    absent_left: bool = False
    """True if the absent ranks had left their process groups, and had not ended yet."""
    lost: bool = False
    """True if the cause itself only lost a peer: one of another host may be the cause."""
    sure: bool = True
    """False if a failure that may still arrive is likely to change the cause. Then wait a moment before ending others:
    only a lost connection is known, or that another rank has failed, and that one's failure has not come yet."""

    @property
    def rank(self) -> int:
        """The rank to name as the cause."""
        return min(self.absent) if self.absent else self.cause.rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks to name as the cause."""
        return self.absent or tuple(sorted({self.cause.rank, *(failure.rank for failure in self.same)}))

    @property
    def code(self) -> int:
        """The exit code of the launcher."""
        return exit_status(self.cause.code)


def find_root_cause(
    failures: Collection[RankFailure],
    *,
    finished: Collection[int] = (),
    left: Collection[int] = (),
    running: Collection[int] = (),
    ended_ns: int | None = None,
) -> RootCause:
    """Find the cause among the failures of one generation of ranks.

    The cause is the first failure that is not only a lost peer. If there is no such failure, the result names ranks
    that had ended with exit code 0, had left their process groups, or let the others wait.

    Args:
        failures: The failures so far, at least one.
        finished: Ranks that ended with exit code 0 before the launcher began to end ranks.
        left: Ranks that left their process groups before the first failure and have no error. The launcher may have
            ended them.
        running: Ranks without a failure so far.
        ended_ns: When the launcher began to end ranks; None if it has not.

    >>> lost = {"type": "RuntimeError", "message": "Connection closed by peer [127.0.0.1]:4000"}
    >>> victim = RankFailure(rank=0, code=1, time_ns=1, reported=True, account=lost)
    >>> killed = RankFailure(rank=1, code=-9, time_ns=9, reported=False)
    >>> verdict = find_root_cause([victim, killed])
    >>> verdict.rank, [failure.rank for failure in verdict.victims], verdict.code
    (1, [0], 137)
    """
    own = [failure for failure in failures if not _is_ended(failure, ended_ns)] or list(failures)
    ended = {failure.rank for failure in failures} - {failure.rank for failure in own}
    doubts = {failure.rank: _doubt(failure) for failure in own}
    least = min(doubts.values())
    # A rank that waits in vain closes its connections in the end. The times show which of these two came first.
    suspects = [failure for failure in own if doubts[failure.rank] == least or least >= _LOST]
    cause = first_failure(suspects)
    late = [failure for failure in suspects if doubts[failure.rank] == _LATE]
    if late and first_failure(late).time_ns < cause.time_ns + _LATE_LEAD_NS:
        cause = first_failure(late)
    rest = [failure for failure in own if failure is not cause]
    same = [failure for failure in rest if _identity(failure) == _identity(cause)]
    victims = [failure for failure in rest if failure not in same and doubts[failure.rank] > _CERTAIN]
    others = [failure for failure in rest if failure not in same and failure not in victims]
    absent: Collection[int] = ()
    if least >= _LOST:
        absent = finished or left or (ended.union(running) if doubts[cause.rank] == _LATE else ())
    return RootCause(
        cause=cause,
        same=_by_rank(same),
        victims=_by_rank(victims),
        others=_by_rank(others),
        ended=tuple(sorted(ended)),
        absent=tuple(sorted(absent)),
        absent_finished=bool(absent) and bool(finished),
        absent_left=bool(absent) and bool(left) and not finished,
        lost=least >= _LOST,
        sure=least in (_CERTAIN, _PERHAPS) or not running,
    )


def first_failure(failures: Collection[RankFailure]) -> RankFailure:
    """Return the earliest of several failures.

    A rank that raised an error has recorded when. For one that was killed, only its end is known, a little late,
    so it gets a head start. SIGABRT gets none: libraries abort when a peer is lost.

    >>> raised = RankFailure(rank=0, code=1, time_ns=1_000_000, reported=True)
    >>> killed = RankFailure(rank=1, code=-9, time_ns=1_200_000, reported=False)
    >>> first_failure([raised, killed]).rank
    1
    """

    def failed_ns(failure: RankFailure) -> int:
        sure = failure.reported or failure.code == -signal.SIGABRT
        return failure.time_ns if sure else failure.time_ns - _LEAD_NS

    return min(failures, key=failed_ns)


_CERTAIN, _PERHAPS, _TOLD, _LOST, _LATE = range(5)
"""Grades of how little a failure explains: an error of the rank itself; a connection that Python code lost, to a peer
or to anything else; the failure of a peer that unisono has told the rank; a peer lost by torch; a peer waited for in
vain."""


def has_heard(failure: RankFailure) -> bool:
    """Return True if a rank failed because unisono told it that another one had failed."""
    return _doubt(failure) == _TOLD


def _doubt(failure: RankFailure) -> int:
    """Return how likely a failure is only a consequence of another one, as a grade."""
    if failure.account is None:
        # A library that aborts, or a program that is not Python: only its output is known. Other signals, and output
        # that mentions no lost peer, are certain.
        text = "\n".join(failure.tail) if failure.code in (1, -signal.SIGABRT) else ""
        return _doubt_of({"type": "", "message": text}, failure)
    return max(_doubt_of(error, failure) for error in _errors(failure.account))


def _doubt_of(error: Mapping[str, Any], failure: RankFailure) -> int:
    text, name = error["message"].lower(), error["type"].rpartition(".")[2]
    if name in _TORCH_TYPES and not _raised_by_program(error):
        if failure.grouped and _holds(text, _WAITED_IN_VAIN):
            return _LATE
        if failure.grouped and failure.in_call and _holds(text, _STORE_TIMEOUT):
            return _LATE
        if _holds(text, _LOST_IN_RPC):
            return _LOST
        if failure.grouped and (name == "DistNetworkError" or _holds(text, LOST_PEER)):
            return _LOST
    if name == "PeerError" and not _raised_by_program(error):
        return _TOLD
    return _PERHAPS if name in _CONNECTION_TYPES or name == "DistNetworkError" else _CERTAIN


def _holds(text: str, words: Collection[str]) -> bool:
    return any(word in text for word in words)


def _raised_by_program(error: Mapping[str, Any]) -> bool:
    """Return True if a line of the program, or of a library but torch, raised the error: its message may be any."""
    frame = (error.get("frames") or [{}])[-1]
    source: str = frame.get("source", "")
    start, end = frame.get("span", (0, len(source)))
    return source[start:end].startswith("raise ") and frame.get("library") not in ("torch", "unisono")


def _errors(account: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield an error, and all those that it came from or contains."""
    yield account
    for part in ("chain", "group"):
        for other in account.get(part, ()):
            yield from _errors(other)


def _is_ended(failure: RankFailure, ended_ns: int | None) -> bool:
    """Return True if a failure is only a rank's response when the launcher ended it."""
    if ended_ns is None or failure.time_ns < ended_ns:
        return False
    if failure.code in (-signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT) or failure.account is None:
        return True
    return failure.account["type"] in ("SystemExit", "KeyboardInterrupt")


def _identity(failure: RankFailure) -> tuple[object, ...]:
    """Return what equal failures have in common: the signal, or the error and its place, or the exit code."""
    account = failure.account
    if failure.code < 0 or account is None:
        return (failure.code,)
    frames = account.get("frames") or [{}]
    return account["type"], frames[-1].get("file"), frames[-1].get("line")


def _by_rank(failures: Collection[RankFailure]) -> tuple[RankFailure, ...]:
    return tuple(sorted(failures, key=lambda failure: failure.rank))


def exit_status(code: int) -> int:
    """Return the exit code with which a shell would report the code of a process.

    >>> exit_status(3), exit_status(-9)
    (3, 137)
    """
    return code if code >= 0 else 128 - code


def name_signal(signum: int) -> str:
    """Return the name of a signal, with its number if Python has no name for it (real-time signals).

    >>> name_signal(9), name_signal(40)
    ('SIGKILL', 'signal 40')
    """
    known = {int(known): known.name for known in signal.Signals}
    return known.get(signum, f"signal {signum}")
