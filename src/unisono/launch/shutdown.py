"""How far the agent is with ending the ranks of a job early. Pure: acting on it is `launch.agent`'s."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Shutdown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shutdown:
    """Why and how the ranks are being ended early. Times are by the monotonic clock."""

    code: int
    """The exit code that follows from the reason; of a failure, that is known when all ranks have ended."""
    failed: bool = False
    """Whether a rank failed: then there is a report at the end, or a restart."""
    reason: str = ""
    """What is said at the end, when the number of ranks is known."""
    ranks: int = 0
    """How many ranks were running."""
    begins_s: float | None = None
    """When ranks are asked to end, which they have not been yet."""
    deadline_s: float = math.inf
    """When ranks that are still there are killed; after that, when the fork server is."""
    waited_for_s: float | None = None
    """When it is said whom the job waits for. None: it has been said."""
    killed: bool = False
    """Whether ranks have been killed."""

    @property
    def next_s(self) -> float:
        """When something is due."""
        return min(due_s for due_s in (self.begins_s, self.waited_for_s, self.deadline_s) if due_s is not None)
