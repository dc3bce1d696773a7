"""Changes the number of ranks of a job on several hosts: `unisono scale`, typed on any of them.

The agent that is asked tells the leader, which asks all about their ranks and says who is to have which:
`scale begins`. Hosts start the processes of ranks that come to them while the others work, and are `ready` when these
wait at their Trainer. From there on, it is as when a host joins (`launch.hosts.host_joining`): all ranks wait at the
end of a step, and a decision follows. Until then the change can be given up, by `scale ends`, and nothing is lost.
Start reading at `HostScaling.plan`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, Literal

from unisono.launch.failure.root_cause import name_signal
from unisono.launch.forkserver_handle import ForkServerHandle
from unisono.launch.generation import Generation
from unisono.launch.hosts.job_hosts import JobHosts
from unisono.launch.hosts.rank_places import spread_ranks
from unisono.launch.output.relay import Relay
from unisono.launch.replacement_policy import Member
from unisono.launch.replacing import Fork
from unisono.watch.figures import plural

__all__ = ["HostScaling"]

_State = Literal["idle", "asking", "starting", "waiting", "changing"]


class HostScaling:
    """The changes of the number of ranks, one at a time, as one of the agents sees them.

    Args:
        hosts: The other hosts.
        generation: The ranks of this one.
        enabled: False if the ranks of this job never change.
        fork: Starts the process of a rank with its files.
        show_traceback: Shows the traceback of a rank that has failed.
    """

    MESSAGES: Final = frozenset({"scale", "scale begins", "scale ends"})
    """The messages of agents about these changes, beside those when a host joins."""

    def __init__(
        self,
        hosts: JobHosts,
        generation: Generation,
        relay: Relay,
        *,
        enabled: bool,
        server: ForkServerHandle,
        fork: Fork,
        show_traceback: Callable[[int, Mapping[str, Any]], None],
    ) -> None:
        self._hosts, self._generation, self._relay, self._server = hosts, generation, relay, server
        self._enabled, self._fork, self._show_traceback = enabled, fork, show_traceback
        self._state: _State = "idle"
        self._before, self._wanted = generation.size, generation.size
        self._outcome: dict[str, Any] = {}
        self.coming: list[int] = []
        """Ranks whose processes have been started here, and are none of the job's ranks yet."""
        # On the leader:
        self.size = 0
        """The number of ranks that was asked for; 0: no change is under way."""
        self.placement: dict[int, list[int]] = {}
        """The ranks of each host then."""

    @property
    def status(self) -> dict[str, Any]:
        """The change under way, or how the latest one has ended, for `unisono scale`."""
        return {"state": self._state, "ranks": self._generation.size, "wanted": self._wanted, **self._outcome}

    def request(self, size: int) -> str:
        """Begin to change the number of ranks of the job; return why that is not possible, or "" if it may be."""
        if problem := next(self._obstacles(size), ""):
            return problem
        self._state, self._outcome, self._before, self._wanted = "asking", {}, self._generation.size, size
        self._hosts.say_to_leader({"do": "scale", "size": size})
        return ""

    def _obstacles(self, size: int) -> Iterator[str]:
        hosts, now = self._hosts, self._generation.size
        if hosts.has_torchrun:
            yield "torchrun's launcher is on one of its hosts, and then its ranks do not change"
        if not self._enabled:
            yield "it runs with --recover off, or with several roles, and then its ranks do not change"
        if size < 1:
            yield f"{size} is no number of ranks: a job has at least one"
        if hosts.joins:
            yield "this host has not joined it yet"
        if self._state != "idle":
            yield f"a change from {self._before} to {self._wanted} ranks is under way"
        if size == now:
            yield f"it has {plural(now, 'rank')} already"

    def on_new_term(self) -> None:
        """Give up the change under way: the leader that knew of it is lost."""
        self._give_up("the host that leads was lost meanwhile")
        self.size = 0

    def on_said(self, entry: Mapping[str, Any]) -> None:
        """Handle what the leader has told all."""
        is_refused = entry.get("host") == self._own_host and self._state == "asking"
        if entry["do"] == "scale begins":
            self._begin(entry)
        elif entry["host"] is None or is_refused:
            self._give_up(entry["reason"])

    def on_exit(self, rank: int, code: int) -> None:
        """Handle the end of a process: of one that was started to become a rank, or of the last rank."""
        generation = self._generation
        if rank not in self.coming and self.coming and generation.finished.issuperset(generation.ranks):
            self._hosts.say_to_leader({"do": "scale fails", "size": self._wanted, "reason": "the run has ended"})
        elif rank in self.coming:
            how = f"was killed by {name_signal(-code)}" if code < 0 else f"ended with code {code}"
            if code > 0 and (account := self._generation.observer.failure(rank)) is not None:
                self._show_traceback(rank, account)
                how = f"raised {account['type'].rpartition('.')[2]}"
            self._on_lost(rank, how)

    def on_unstarted(self, rank: int, problem: str) -> bool:
        """Handle that a process could not be started. Return False if it was to be one of the present ranks."""
        if rank not in self.coming:
            return False
        self._on_lost(rank, f"could not be started ({problem})")
        return True

    def _on_lost(self, rank: int, how: str) -> None:
        """Handle that a process that was to become a rank has ended, or could not be started."""
        self.coming.remove(rank)
        reason = f"rank {rank} {how} before it had joined the others"
        self._hosts.say_to_leader({"do": "scale fails", "size": self._wanted, "reason": reason})

    def pause(self) -> None:
        """Note that the ranks come to the end of a step."""
        if self._state == "starting":
            self._state = "waiting"

    def follow(self, step: int) -> None:
        """Note that the processes that have been started are ranks now, which are about to meet."""
        self.coming.clear()
        self._generation.expect((), size=0)
        self._state = "changing"
        self._outcome = {"before": self._before, "step": step}

    def complete(self, seconds: float) -> None:
        """Note that all ranks go on together."""
        if self._state == "changing":
            self._state, self.size = "idle", 0
            self._outcome = {**self._outcome, "seconds": seconds}

    def plan(
        self, answers: Mapping[int, Mapping[str, Any]], members: Collection[Member]
    ) -> dict[int, list[int]] | None:
        """Decide which host has which ranks, and let all know. On the leader.

        Returns:
            For each host, the ranks that come to it; None if the number of ranks stays.
        """
        hosts, size = self._hosts, self.size
        now = sum(map(len, hosts.placement.values()))
        problems = _problems(size, now=now, hosts=len(hosts.hosts), answers=answers, members=members)
        if problem := next(problems, ""):
            self.end(problem)
            return None
        self.placement = spread_ranks(hosts.placement, size, capacities=hosts.capacities)
        comes = {
            host: [rank for rank in ranks if rank not in hosts.placement[host]]
            for host, ranks in self.placement.items()
        }
        places = {str(host): ranks for host, ranks in self.placement.items()}
        hosts.say({"do": "scale begins", "before": now, "size": size, "places": places})
        return {host: ranks for host, ranks in comes.items() if ranks}

    def end(self, reason: str) -> None:
        """Give the change up that is under way, and say why. On the leader."""
        self._hosts.say({"do": "scale ends", "host": None, "reason": reason})
        self.size = 0

    def refuse(self, host: int, reason: str) -> None:
        """Refuse what an agent has asked for, and say why. On the leader."""
        self._hosts.say({"do": "scale ends", "host": host, "reason": reason})

    @property
    def _own_host(self) -> int:
        assert self._hosts.place is not None
        return self._hosts.place.host

    def _begin(self, entry: Mapping[str, Any]) -> None:
        generation = self._generation
        self._state, self._outcome = "starting", {}
        self._before, self._wanted = entry["before"], entry["size"]
        own = entry["places"][str(self._own_host)]
        self.coming = [rank for rank in own if rank not in generation.ranks]
        generation.expect(own, size=entry["size"])
        for rank in list(self.coming):
            self._relay.move(rank, generation.local_rank(rank))
            files = generation.open(rank)
            generation.pages[rank].mark_new()
            self._fork(rank, files)

    def _give_up(self, reason: str) -> None:
        if self._state in ("idle", "changing"):
            return
        has_begun = self._state != "asking"
        self._state, self._outcome = "idle", {"problem": reason}
        coming, self.coming = self.coming, []
        self._generation.expect((), size=0)
        if coming:
            self._server.signal(signal.SIGKILL, coming, group=True)
        if has_begun:
            now = plural(self._generation.size, "rank")
            self._relay.say(f"the job keeps its {now} and does not get {self._wanted}: {reason}")


def _problems(
    size: int, *, now: int, hosts: int, answers: Mapping[int, Mapping[str, Any]], members: Collection[Member]
) -> Iterator[str]:
    """Yield the reasons why the number of ranks cannot become `size`, the first one first."""
    for refusal in filter(None, (member.refusal for member in members)):
        yield f"no rank can be moved or added alone: {refusal}"
    if any(member.finished for member in members) or len(members) < now:
        yield "the run is about to end"
    if not all(member.armed for member in members):
        yield "its ranks have made no Trainer so far, and the number of ranks is that of a Trainer's run"
    yield from (answer["fixed_size"] for answer in answers.values() if answer["fixed_size"])
    if size < hosts:
        yield f"{plural(size, 'rank')} cannot be spread over {hosts} hosts, of which each needs one"
    if size > (most := min(answer["virtual_ranks"] for answer in answers.values())):
        yield f"{size} ranks are too many for {plural(most, 'virtual rank')}, of which each rank needs one"
    if any(answer["leaving"] for answer in answers.values()):
        yield "processes of the last change have not ended yet; try it again in a moment"
