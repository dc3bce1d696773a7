"""Events and who looks at them: a file, the launcher, a display."""

from unisono.watch.events import Event, EventLog, Kind, read_events
from unisono.watch.progress import Progress

__all__ = ["Event", "EventLog", "Kind", "Progress", "read_events"]
