"""The way of a new rank through the calls that the others have made: their results are returned, not computed again.

Start reading at `CallReplay.go_through`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

from unisono.trainer.call_log import Dropped, LoggedCall

__all__ = ["TURN", "CallReplay"]

T = TypeVar("T")

TURN = "unisono.main_first"
"""The call that a new rank may leave out or make once more; see `Recovery.take_turn`."""


class CallReplay:
    """The calls that the other ranks have made and a new rank has not come to yet.

    Args:
        calls: The calls, in order.
        differ: Called with what this rank does otherwise than the others; raises.
    """

    def __init__(self, calls: Iterable[LoggedCall] = (), *, differ: Callable[[str], NoReturn]) -> None:
        self._left = deque(calls)
        self._differ = differ

    def __bool__(self) -> bool:
        return bool(self._left)

    @property
    def next_name(self) -> str:
        """The next call."""
        return self._left[0].name

    def go_through(self, name: str, body: Callable[[], T], *, again: bool, account: Callable[[Any], None]) -> T:
        """Return the result of the next call; see `Recovery.call` for the arguments."""
        logged = self._left.popleft()
        while logged.name == TURN != name and self._left:
            logged = self._left.popleft()
        if logged.name != name:
            self._differ(f"{name} where the others have called {logged.name}")
        if logged.has_failed:
            self._differ(f"{name}, which has failed in the others")
        if again:
            return body()
        if isinstance(logged.result, Dropped):
            self._differ(f"{name}, whose result is not kept")
        if logged.is_recent:
            account(logged.result)
        return logged.result  # type: ignore[no-any-return]
