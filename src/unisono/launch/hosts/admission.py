"""The decision whether a host is let into a job that runs.

Pure; `launch.hosts.job_membership` acts on it, on the leader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.launch.hosts.host_differences import find_difference
from unisono.launch.hosts.host_settings import HostSettings
from unisono.launch.hosts.roster import Roster

__all__ = ["answer_newcomer"]


def answer_newcomer(
    hello: Mapping[str, Any], *, roster: Roster, hellos: Mapping[int, Mapping[str, Any]], settings: HostSettings
) -> dict[str, Any]:
    """Return the answer to a host that comes to a running job.

    Args:
        hello: What it says of itself.
        roster: The hosts that there are.
        hellos: By number, what all that have ever been there have said.

    Returns:
        "host" and "hellos", its number and what all have said, with its own; or a reason: "refused" if it can never
        join, "full" if there is no room, "later" if it may ask again at once.
    """
    host = max(hellos) + 1
    present = {each: hellos[each] for each in roster.members}
    if problem := find_difference({**present, host: hello}):
        return {"refused": problem}
    if len(roster.members) >= settings.max_hosts:
        return {"full": f"it has {len(roster.members)} hosts, which is all that its --nnodes allows"}
    if not roster.is_settled or not roster.members.isdisjoint(roster.finished):
        return {"later": "another host joins at the moment, or the job is about to end"}
    return {"host": host, "hellos": {str(each): dict(told) for each, told in {**hellos, host: hello}.items()}}
