"""The state of ending a job's ranks early. Pure: `launch.job_shutdown` acts on it."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Shutdown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shutdown:
    """Why and how the ranks are being ended early. Times are by the monotonic clock."""

    code: int
    """The exit code that follows from the reason; after a failure, it is known when all ranks have ended."""
    failed: bool = False
    """True if a rank failed: then there is a report at the end, or a restart."""
    host_lost: bool = False
    """True if another host is lost, for which ranks may wait in vain."""
    reason: str = ""
    """The reason that the last message of the job gives; "" for no such message."""
    ranks: int = 0
    """How many ranks were running."""
    begins_s: float | None = None
    """When ranks are asked to end. None: they have been asked."""
    dying_until_s: float = -math.inf
    """Until when they are not asked while the kernel is ending one that may be the cause."""
    dying_told_s: float | None = None
    """When a message says so. None: it has."""
    deadline_s: float = math.inf
    """When ranks that still run are killed; after that, when the fork server is killed."""
    waited_for_s: float | None = None
    """When a message names the ranks that the job waits for. None: no such message is due."""
    killed: bool = False
    """True if ranks have been killed."""

    @property
    def next_s(self) -> float:
        """When the next action is due."""
        return min(due_s for due_s in (self.begins_s, self.waited_for_s, self.deadline_s) if due_s is not None)
