"""A host that comes to a job that runs already: it finds the leader, and asks to be let in.

The leader's side is `launch.hosts.announcement`. Start reading at `knock`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from unisono.launch.hosts.announcement import KNOCK, running_prefix
from unisono.launch.hosts.endpoint import HostRefusedError
from unisono.launch.hosts.host_settings import HostSettings
from unisono.launch.hosts.own_store import connect, way_to
from unisono.launch.hosts.term import STORE_ERRORS
from unisono.tcp_store import LOOPBACK

__all__ = ["Admission", "JobRunsError", "NotYet", "knock", "unless_job_runs"]

_POLL_S = 0.2
_ANSWER_S = 10.0

T = TypeVar("T")


class JobRunsError(Exception):
    """A job of this name runs already.

    Attributes:
        leader: The greeting of its leader.
        servers: The stores that this process serves.
    """

    def __init__(self, leader: Mapping[str, Any]) -> None:
        super().__init__(leader["name"])
        self.leader = leader
        self.servers: list[Any] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """The facts that a host learns when it is let into a job."""

    host: int
    """Its number."""
    term: int
    leader: int
    hellos: dict[int, dict[str, Any]]
    """By number, what all hosts of the job have said of themselves, also those that were lost."""
    members: frozenset[int]
    """Those that take part, without this one."""


@dataclass(frozen=True, slots=True)
class NotYet:
    """Why a host is not let into a job, for now."""

    reason: str
    is_full: bool = False
    """True if the job has no room, unless it is about to end."""


def unless_job_runs(store: Any, settings: HostSettings, meet: Callable[[], T]) -> T:
    """Wait for the other hosts at the endpoint, unless a job of this name runs, or is found to run meanwhile.

    Args:
        store: A connection to the store at the endpoint.
        meet: Waits for the others, and returns who they are. It is left behind in a thread if a job runs.

    Raises:
        JobRunsError: It does.
        Exception: What `meet` raises.
    """
    outcome: list[tuple[T | None, Exception | None]] = []
    key = f"unisono/{running_prefix(settings)}/leader"

    def look() -> None:
        if store.check([key]):
            raise JobRunsError(json.loads(store.get(key)))

    def run() -> None:
        try:
            outcome.append((meet(), None))
        except Exception as error:  # of any class: raised below, by the thread that waits
            outcome.append((None, error))

    look()
    thread = threading.Thread(target=run, name="unisono-hosts-meet", daemon=True)
    thread.start()
    while thread.is_alive():
        with suppress(*STORE_ERRORS):  # the endpoint is gone, which `meet` sees
            look()
        thread.join(_POLL_S)
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def knock(
    leader: Mapping[str, Any], hello: Mapping[str, Any], settings: HostSettings, *, still_s: Callable[[], float]
) -> Admission | NotYet:
    """Ask the leader of a running job to let this host in.

    Args:
        leader: The greeting of the leader.
        hello: What this host says of itself.
        still_s: Returns for how many seconds more this host may wait.

    Raises:
        HostRefusedError: This host cannot take part.
    """
    way = way_to(leader, settings.token)
    try:
        store = connect((LOOPBACK, way.port), KNOCK, timeout_s=_ANSWER_S)
        number = store.add("count", 1)
        store.set(str(number), json.dumps(hello))
        store.wait([f"{number}/answer"], timedelta(seconds=max(1.0, min(_ANSWER_S, still_s()))))
        answer = json.loads(store.get(f"{number}/answer"))
    except STORE_ERRORS:
        time.sleep(_POLL_S)
        return NotYet(f"{leader['name']}, which leads the job, does not answer")
    finally:
        way.close()
    if reason := answer.get("refused"):
        raise HostRefusedError(reason)
    if reason := answer.get("full") or answer.get("later"):
        time.sleep(_POLL_S)
        return NotYet(reason, is_full="full" in answer)
    return Admission(
        host=answer["host"],
        term=answer["term"],
        leader=answer["leader"],
        hellos={int(host): each for host, each in answer["hellos"].items()},
        members=frozenset(answer["members"]),
    )
