"""`unisono stacks` in a job on several hosts: one agent asks the others what their ranks do, and shows all of them.

The command asks once, gets a question's name, and comes back with it until the answers are there: an agent's loop waits
for nobody. Start reading at `HostStacks.reply`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, Final

from unisono.launch.generation import Generation
from unisono.launch.hang.hang_report import render_stacks
from unisono.launch.hang.situation import Situation
from unisono.launch.hosts.job_hosts import JobHosts
from unisono.launch.hosts.rank_situations import decode_situation, encode_situation

__all__ = ["HostStacks"]

_PATIENCE_S = 3.0
"""How long to wait for a host. Its ranks take up to a second."""


class HostStacks:
    """Where the ranks of all hosts are, as one of their agents finds out.

    Args:
        hosts: The other hosts.
        generation: Returns the ranks of this one; None before they have been started.
    """

    MESSAGES: Final = frozenset({"stacks ask", "stacks ranks"})
    """The messages of agents about stacks."""

    def __init__(self, hosts: JobHosts, generation: Callable[[], Generation | None]) -> None:
        self._hosts, self._generation = hosts, generation
        self._numbers = count()
        self._question, self._asked_s = "none yet", -_PATIENCE_S
        self._answers: dict[int, list[Situation]] = {}

    def reply(self, question: str, *, full: bool) -> dict[str, Any]:
        """Return the text for the command that asks, or the question with which it comes back.

        Args:
            question: What the last reply gave; "" at first.
            full: True to show all frames.
        """
        hosts = self._hosts
        missing = [host for host in hosts.hosts if host not in self._answers]
        awaits = bool(missing) and time.monotonic() < self._asked_s + _PATIENCE_S
        if question != self._question and not awaits:
            assert hosts.place is not None
            self._question, awaits = f"{hosts.place.host}.{next(self._numbers)}", True
            self._asked_s, self._answers = time.monotonic(), {}
            hosts.say({"do": "stacks ask", "question": self._question})
        if question != self._question or awaits:  # two commands that ask at once get the same answers
            return {"question": self._question}
        situations = sorted((each for told in self._answers.values() for each in told), key=lambda each: each.rank)
        lines = [render_stacks(situations, now_ns=time.monotonic_ns(), folder=str(Path.cwd()), full=full)]
        lines += [hosts.name_places([situation.rank for situation in situations])] if situations else []
        lines += [f"{hosts.name(host)}, has not answered within {_PATIENCE_S:g} s" for host in missing]
        return {"text": "\n".join(filter(None, lines))}

    def on_said(self, host: int, entry: Mapping[str, Any]) -> None:
        """Handle what an agent has told all."""
        if entry["do"] == "stacks ask" and self._hosts.reaches_all:
            generation = self._generation()
            situations = generation.observer.snapshot() if generation is not None else []
            told = [encode_situation(situation) for situation in situations]
            self._hosts.say({"do": "stacks ranks", "question": entry["question"], "ranks": told})
        elif entry["do"] == "stacks ranks" and entry["question"] == self._question:
            self._answers[host] = [decode_situation(each) for each in entry["ranks"]]
