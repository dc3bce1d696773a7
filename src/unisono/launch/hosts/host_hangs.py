"""Hangs of a job on several hosts: the leader compares the ranks of all, and all agents report what it finds.

While ranks of a host wait in a call, its agent says so to the leader (`hang waits`). The leader asks all agents what
their ranks do (`hang ask`), and judges their answers (`hang ranks`) as one agent does on one machine. For a report it
asks once more, for the stacks of the ranks involved. What it finds, all are told: a report (`hang report`), ranks to be
killed (`hang kill`), or the end of the job (`hang abort`). While no rank waits for long, nothing is said.

If the ranks of a host do nothing, in no collective, its agent says so once (`hang idle`). If those of no other host do
anything either, that is reported, too (`hang idle report`).

Start reading at `HostHangs.on_said`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from unisono.launch.generation import Generation
from unisono.launch.hang.situation import Situation
from unisono.launch.hosts.job_hosts import JobHosts
from unisono.launch.hosts.rank_situations import decode_situation, encode_situation
from unisono.launch.output.relay import Relay

__all__ = ["HostHangs"]

_MOST_STACKS = 16
_LOOK_S = 0.25
"""How often to look whether ranks wait."""
_IDLE_LOOK_S = 1.0
"""How often to look whether they do nothing."""
_ROUND_S = 20.0
"""When to stop waiting for answers and ask anew: the stacks of a host take up to half of that."""


class HostHangs:
    """The hangs of a job on several hosts, as one of its agents sees them.

    Args:
        hosts: The other hosts.
        generation: The ranks of this one.
        relay: Shows reports.
    """

    MESSAGES: Final = frozenset(
        f"hang {what}" for what in ("waits", "idle", "ask", "ranks", "report", "idle report", "kill", "abort")
    )
    """The messages of agents about hangs."""

    def __init__(self, hosts: JobHosts, generation: Generation, relay: Relay) -> None:
        self._hosts, self._generation, self._relay = hosts, generation, relay
        self._observer, self._judge = generation.observer, generation.observer.judge
        # Often enough that a report is late by a fraction of the time after which it is due.
        self._pace_s = max(1.0, self._judge.patience_s / 6)
        self._looked_s = self._told_s = self._idle_looked_s = 0.0
        self._asked = ""  # the question whose answer waits for stacks
        self._asked_idle_s = 0.0
        # On the leader:
        self._round = 0
        self._question, self._asked_s = "", 0.0
        self._has_stacks = self._asks_idle = False
        self._idle_due = False
        self._answers: dict[int, list[Situation]] = {}
        self._idle_s: dict[int, float] = {}
        if hosts.has_torchrun and (self._judge.abort_s is not None or self._judge.stuck_s is not None):
            relay.say(
                "torchrun's launcher on another host tells nothing of its ranks, so hangs are not found: --hang-abort "
                "and --stuck-timeout have no effect"
            )

    def tick(self) -> None:
        """Tell the leader if ranks of this host wait, and answer it once stacks have been collected."""
        ranks, hosts = self._generation.ranks, self._hosts
        if self._asked and (situations := self._observer.collected(ranks)) is not None:
            self._answer(self._asked, situations)
            self._asked = ""
        now_s = time.monotonic()
        is_blind = hosts.joins or hosts.has_torchrun or not self._judge.patience_s
        if is_blind or now_s - self._looked_s < _LOOK_S or now_s - self._told_s < self._pace_s:
            return
        self._looked_s = now_s
        if self._observer.waits_s(ranks) >= self._pace_s:
            self._told_s = now_s
            hosts.say_to_leader({"do": "hang waits"})
        elif now_s - self._idle_looked_s >= _IDLE_LOOK_S:
            self._idle_looked_s = now_s
            if self._observer.look_for_idle():
                hosts.say_to_leader({"do": "hang idle"})
        if self._idle_due and hosts.leads and (not self._question or now_s - self._asked_s >= _ROUND_S):
            self._idle_due = False
            self._ask((), idle=True)

    def on_said(self, host: int, entry: Mapping[str, Any]) -> None:
        """Handle what an agent has told all, or the leader."""
        do, observer = entry["do"], self._observer
        if self._hosts.joins:
            return  # this host has no part in the run yet
        if do == "hang waits" and self._hosts.leads:
            self._on_wait()
        elif do == "hang idle" and self._hosts.leads:
            self._idle_due = True
        elif do == "hang ask":
            self._asked, self._asked_idle_s = entry["question"], observer.idle_for_s()  # stacks are activity, too
            observer.collect(set(entry["stacks"]).intersection(self._generation.ranks))
            self.tick()
        elif do == "hang ranks" and self._hosts.leads and entry["question"] == self._question:
            self._answers[host] = [decode_situation(told) for told in entry["ranks"]]
            self._idle_s[host] = entry["idle_s"]
            self._judge_if_known()
        elif do in ("hang report", "hang idle report"):
            if do == "hang report":
                observer.report = entry["text"]
            self._relay.show(f"unisono: {entry['text']}")
        elif do == "hang kill":
            observer.stuck, self._judge.stuck_s = tuple(entry["ranks"]), entry["seconds"]
        elif do == "hang abort":
            observer.abort, self._judge.abort_s = entry["cause"], entry["seconds"]

    def _answer(self, question: str, situations: Sequence[Situation]) -> None:
        told = [encode_situation(situation) for situation in situations]
        answer = {"do": "hang ranks", "question": question, "ranks": told, "idle_s": self._asked_idle_s}
        self._hosts.say_to_leader(answer)

    def _on_wait(self) -> None:
        """Ask what the ranks of all hosts do, unless that is under way."""
        now_s = time.monotonic()
        due_s = self._asked_s + (_ROUND_S if self._question else self._pace_s / 2)
        if self._judge.patience_s and not self._observer.is_quiet and now_s >= due_s:
            self._ask(())

    def _ask(self, stacks: Sequence[int], *, idle: bool = False) -> None:
        self._round += 1
        # Another leader may have counted as far.
        self._question, self._asked_s = f"{self._hosts.term}.{self._round}", time.monotonic()
        self._answers, self._has_stacks, self._asks_idle = {}, bool(stacks), idle
        self._hosts.say({"do": "hang ask", "question": self._question, "stacks": list(stacks)})

    def _judge_if_known(self) -> None:
        """Decide what is to be done, once all agents have answered. On the leader."""
        if not set(self._hosts.hosts) <= self._answers.keys():
            return
        self._question = ""
        situations = sorted((each for told in self._answers.values() for each in told), key=lambda each: each.rank)
        is_whole = [situation.rank for situation in situations] == list(range(self._generation.size))
        if not is_whole or self._observer.is_quiet:  # ranks are being moved
            return
        if self._asks_idle:
            self._report_idle(situations)
            return
        now_s = time.monotonic()
        if self._has_stacks:
            if text := self._judge.explain(situations, now_s, places=self._hosts.name_places):
                self._hosts.say({"do": "hang report", "text": text})
            return
        decision = self._judge.look(situations, now_s)
        if decision.abort is not None:
            self._hosts.say({"do": "hang abort", "cause": decision.abort, "seconds": self._judge.abort_s})
        elif decision.kill:
            self._hosts.say({"do": "hang kill", "ranks": list(decision.kill), "seconds": self._judge.stuck_s})
        elif decision.show:
            self._ask(decision.show[:_MOST_STACKS])

    def _report_idle(self, situations: Sequence[Situation]) -> None:
        """Report ranks that do nothing, if those of all hosts that run do nothing."""
        idle = [situation.rank for situation in situations if not situation.ended]
        runs = {host for host, told in self._answers.items() if not all(situation.ended for situation in told)}
        if not idle or any(situation.exit_code for situation in situations) or not all(map(self._idle_s.get, runs)):
            return
        if not self._has_stacks:
            self._ask(idle[:_MOST_STACKS], idle=True)
            return
        places = self._hosts.name_places(idle)
        text = self._observer.idle.report(situations, min(self._idle_s[host] for host in runs), places=places)
        if text:
            self._hosts.say({"do": "hang idle report", "text": text})
