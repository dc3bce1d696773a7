"""Events and their readers: a file, the launcher, a display."""

from unisono.watch.display import Progress
from unisono.watch.event_kinds import Event, Kind
from unisono.watch.events import EventLog, read_events

__all__ = ["Event", "EventLog", "Kind", "Progress", "read_events"]
