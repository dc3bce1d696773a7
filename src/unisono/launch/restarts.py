"""The decision whether a job restarts ranks that have failed. Pure; start reading at `decide_restart`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Decision", "Ending", "decide_restart"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How one generation of ranks ended."""

    code: int
    """Exit code of the rank that was the cause; negative for a signal."""
    account: Mapping[str, Any] | None
    """That rank's record of its error; None if it left none."""
    met: bool
    """True if the ranks had completed a collective together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The decision whether to restart; if not although restarts are left, with the reason."""

    restart: bool
    reason: str = ""


def decide_restart(ending: Ending, before: Ending | None, *, restarts: int, max_restarts: int) -> Decision:
    """Return the decision after a failure, given how the previous generation ended and the number of restarts used.

    A program that fails twice with the same error before its first collective has a mistake that a restart does not
    correct: it is restarted once, and no more.

    >>> failed = Ending(code=1, account={"type": "ImportError", "message": "no x"}, met=False)
    >>> decide_restart(failed, None, restarts=0, max_restarts=3)
    Decision(restart=True, reason='')
    >>> decide_restart(failed, failed, restarts=1, max_restarts=3).restart
    False
    """
    if restarts >= max_restarts:
        return Decision(restart=False)
    if before is not None and not ending.met and not before.met and _same(ending, before):
        left = max_restarts - restarts
        return Decision(
            restart=False,
            reason=f"the same error twice before any collective: not restarted again ({left} of {max_restarts} left)",
        )
    return Decision(restart=True)


def _same(one: Ending, other: Ending) -> bool:
    if one.code != other.code or one.code < 0:
        return False
    return _identity(one.account) == _identity(other.account)


def _identity(account: Mapping[str, Any] | None) -> tuple[Any, Any] | None:
    return None if account is None else (account.get("type"), account.get("message"))
