"""Starts the ranks of all hosts again after a failure that ends them: `--max-restarts` for a job on several hosts.

The agent whose rank has failed decides whether there is a restart, and says so in the log: `failed`. All agents end
their ranks, and tell the leader once these have ended: `ended`. When it has heard that from all, it says `start again`,
with the ranks of each host. What agents say of the ranks between `failed` and `start again` is about ranks that end,
and is disregarded. A new leader is told everything again. Start reading at `HostRestarting.on_said`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from unisono.launch.hosts.job_hosts import JobHosts
from unisono.launch.hosts.rank_places import place_ranks
from unisono.launch.restarts import Ending

__all__ = ["HostRestarting"]


class HostRestarting:
    """The restarts of a job on several hosts, as one of its agents sees them.

    Args:
        hosts: The other hosts.
        end: Ends the ranks of this host, given the exit code of the rank that failed; `ranks_ended` is called then.
        number: Returns the number of the latest decision on who the ranks are.
        start: Starts the ranks of this host again, given what has failed as words, how it ended and the number of that
            decision.
    """

    MESSAGES: Final = frozenset({"failed", "ended", "start again"})
    """The messages of agents about restarts."""

    def __init__(
        self,
        hosts: JobHosts,
        *,
        end: Callable[[int], None],
        number: Callable[[], int],
        start: Callable[[str, Ending, int], None],
    ) -> None:
        self._hosts, self._end, self._number, self._start = hosts, end, number, start
        self._term = 0
        self._asked: dict[str, Any] | None = None  # what this host has said about the failure of its rank
        self._failure: dict[str, Any] | None = None  # the first that all have heard
        self._have_ended = False
        self._latest: dict[str, Any] | None = None  # the latest `start again`
        # On the leader:
        self._ended: dict[int, int] = {}  # by host whose ranks have ended, the number of its latest decision

    @property
    def is_under_way(self) -> bool:
        """True if the ranks of all hosts are ended to be started again, or this host has asked for that."""
        return self._asked is not None or self._failure is not None

    @property
    def is_agreed(self) -> bool:
        """True if all hosts have been asked, and have not started their ranks again."""
        return self._failure is not None

    @property
    def is_cause(self) -> bool:
        """True if this host has asked."""
        return self._asked is not None

    def ask(self, what: str, ending: Ending, *, names_host: bool = False) -> None:
        """Ask all hosts to end their ranks, and to start them again; does nothing if that is under way.

        Args:
            what: What has failed, as words.
            ending: How it ended.
            names_host: True if the words say on which host; otherwise on this one.
        """
        if not self.is_under_way:
            account = None
            if ending.account is not None:
                account = {name: ending.account.get(name) for name in ("type", "message")}
            told = {**asdict(ending), "account": account}
            assert self._hosts.place is not None
            what = what if names_host else f"{self._hosts.name(self._hosts.place.host)}: {what}"
            self._asked = {"do": "failed", "after": self._hosts.attempt, "what": what, "ending": told}
            self._hosts.say(self._asked)

    def ranks_ended(self) -> None:
        """Note that the ranks of this host have ended."""
        self._have_ended = True
        self._tell_ended()

    def on_hosts(self) -> None:
        """Handle the loss of hosts, and another leader."""
        if self._term != self._hosts.term:
            self._term = self._hosts.term
            self._ended.clear()
            if (told := self._failure or self._asked) is not None:
                self._hosts.say(told)
            self._tell_ended()
        self._look()

    def on_said(self, host: int, entry: Mapping[str, Any]) -> None:
        """Handle what an agent has told all, or the leader."""
        hosts, do = self._hosts, entry["do"]
        if do == "failed" and entry["after"] == hosts.attempt and self._failure is None:
            self._failure = dict(entry)
            self._end(entry["ending"]["code"])
            self._tell_ended()
            self._look()
        elif do == "failed" and entry["after"] < hosts.attempt:  # a lost leader told this host more than the other
            hosts.say_to_leader({"do": "ended", "after": entry["after"], "again": self._latest})
        elif do == "ended" and hosts.leads and entry["after"] == hosts.attempt:
            if entry.get("again"):
                hosts.say(entry["again"])
            else:
                self._ended[host] = entry["number"]
                self._look()
        elif do == "start again" and entry["attempt"] == hosts.attempt + 1 and self._failure is not None:
            self._go_on(dict(entry))

    def _tell_ended(self) -> None:
        if self._have_ended and self._failure is not None:
            entry = {"do": "ended", "after": self._hosts.attempt, "number": self._number()}
            self._hosts.say_to_leader(entry)

    def _look(self) -> None:
        """Let all start their ranks again, once those of all hosts have ended. On the leader."""
        hosts = self._hosts
        if not hosts.leads or self._failure is None or not set(hosts.hosts) <= self._ended.keys():
            return
        placement = place_ranks(hosts.placement, hosts=hosts.hosts)
        hosts.say(
            {
                "do": "start again",
                "attempt": hosts.attempt + 1,
                "number": max(self._ended.values()),
                "hosts": hosts.hosts,
                "placement": {str(host): ranks for host, ranks in placement.items()},
            }
        )
        self._ended.clear()

    def _go_on(self, entry: dict[str, Any]) -> None:
        failure, self._latest = self._failure, entry
        assert failure is not None
        self._asked = self._failure = None
        self._have_ended = False
        self._ended.clear()
        self._hosts.attempt = entry["attempt"]
        self._hosts.placement = {int(host): list(ranks) for host, ranks in entry["placement"].items()}
        self._start(failure["what"], Ending(**failure["ending"]), entry["number"])
