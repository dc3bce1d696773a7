"""A round of the meeting of hosts: begun by all of them, or given up by all since one has ended meanwhile.

torch's rendezvous notices a host that ends while others are waited for. When its round is complete, hosts wait for each
other's ranks, and nobody would notice. Start reading at `MeetingRound`.
"""

from __future__ import annotations

import json
import time
from typing import Any

from unisono.launch.hosts.arrivals import Arrivals

__all__ = ["MeetingRound"]

_VERDICT = "unisono/verdict"
_BEGUN = "begun"
_LOOK_S = 1.0
"""How often a host that waits looks whether the others are there."""


class MeetingRound:
    """What becomes of a round, which its hosts agree on in its store.

    Args:
        store: The store of the round.
        came: The hosts that have come to the endpoint.
    """

    def __init__(self, store: Any, came: Arrivals) -> None:
        self._store, self._came = store, came
        self._look_s = time.monotonic() + _LOOK_S
        self.is_off = False
        """True if the round has been given up."""

    def begin(self) -> bool:
        """Return True if the round begins, False if it has been given up."""
        return self._is_begun(_BEGUN)

    def check(self) -> bool:
        """Return False if the round has been given up. To be called some times a second by a host that waits."""
        if self._store.check([_VERDICT]):
            return self._is_begun("")
        if time.monotonic() >= self._look_s:
            self._look_s = time.monotonic() + _LOOK_S
            if ended := self._came.find_ended():
                return self._is_begun(json.dumps(sorted(ended)))
        return True

    def _is_begun(self, proposed: str) -> bool:
        verdict = self._store.compare_set(_VERDICT, "", proposed).decode()
        if verdict != _BEGUN and not self.is_off:
            self.is_off = True
            self._came.forget(json.loads(verdict))
        return not self.is_off
