"""Simulate the launchers of many hosts in one process, and time changes of who the ranks are.

`membership_change.py unisono|torchrun HOSTS CHANGES` prints the seconds of each change, as JSON. A host is a client of
a store on the loopback address, with threads of its own.

- unisono: a rank of one host dies. The leader's agent asks all for what they know of their ranks, decides, and all hear
  the decision. The log, the policy and the messages are those of `unisono run`; that ranks end and join takes no time.
- torchrun: all hosts meet anew in a round of torch's rendezvous, as its agents do for every change.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from unisono.launch.failure.root_cause import RankFailure
from unisono.launch.hosts.rank_places import place_ranks
from unisono.launch.hosts.rank_states import (
    changed_places,
    decode_death,
    decode_members,
    encode_death,
    encode_members,
    new_places,
)
from unisono.launch.hosts.term import Term
from unisono.launch.replacement_policy import Death, DeathCounts, Member, Replace, decide_replacement

_RANKS = 8
"""On each host."""
_TIMEOUT_S = 120.0
_STEP = 100


def _connect(port: int) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_TIMEOUT_S)
    )


class _Host:
    """A host of unisono. Host 0 leads."""

    def __init__(self, number: int, hosts: int, port: int) -> None:
        self.number, self.hosts = number, hosts
        self.own = range(number * _RANKS, (number + 1) * _RANKS)
        self.placement = {host: [*range(host * _RANKS, (host + 1) * _RANKS)] for host in range(hosts)}
        self.dead: int | None = None
        self.heard = threading.Event()
        self.answers: dict[int, dict[str, Any]] = {}
        self.term = Term(
            0,
            0,
            number,
            members=range(hosts),
            connect=lambda: _connect(port),
            timeout_s=_TIMEOUT_S,
            told=self._told,
            silent=lambda _: None,
            broken=lambda reason: None,
        )

    def _told(self, host: int, entry: dict[str, Any]) -> None:
        do = entry["do"]
        if do == "died":
            self.answers = {}
            self.term.say({"do": "ask", "round": 1})
        elif do == "ask":
            self._answer()
        elif do == "ranks":
            self.answers[host] = entry
            if len(self.answers) == self.hosts:
                self._decide()
        elif do == "decide":
            self.dead = None
            self.placement = new_places(self.placement, entry["places"])
            self.heard.set()

    def die(self, rank: int) -> None:
        """Let a rank of this host die."""
        self.dead = rank
        self.term.say_to_leader({"do": "died"})

    def _answer(self) -> None:
        deaths = []
        if self.dead is not None:
            failure = RankFailure(rank=self.dead, code=-9, time_ns=time.monotonic_ns(), reported=False)
            deaths = [encode_death(Death(failure=failure, step=_STEP))]
        members = encode_members(Member(rank=rank) for rank in self.own if rank != self.dead)
        self.term.say_to_leader(
            {"do": "ranks", "round": 1, "number": 0, "members": members, "deaths": deaths, "step": _STEP}
        )

    def _decide(self) -> None:
        deaths = [decode_death(death) for answer in self.answers.values() for death in answer["deaths"]]
        members = [member for answer in self.answers.values() for member in decode_members(answer["members"])]
        counts = DeathCounts()
        for death in deaths:
            counts.add(death, again=False)
        choice = decide_replacement(deaths, members, counts)
        assert isinstance(choice, Replace) and len(members) == _RANKS * self.hosts - 1
        placement = place_ranks(self.placement, hosts=range(self.hosts))
        places = changed_places(self.placement, placement)
        self.term.say({"do": "decide", "number": 1, "refill": choice.ranks, "places": places, "step": _STEP})


def _unisono(hosts: int, port: int) -> Callable[[], None]:
    every = [_Host(number, hosts, port) for number in range(hosts)]
    for host in every:
        host.term.begin()

    def change() -> None:
        for host in every:
            host.heard.clear()
        every[hosts // 2].die(every[hosts // 2].own[1])
        assert all(host.heard.wait(_TIMEOUT_S) for host in every)

    change()  # all have connected
    return change


def _torchrun(hosts: int, port: int) -> Callable[[], None]:
    made = [0]

    def meet(name: str, store: Any, ready: threading.Barrier) -> None:
        handler = DynamicRendezvousHandler.from_backend(
            name,
            store,
            C10dRendezvousBackend(store, name),
            hosts,
            hosts,
            "127.0.0.1",
            RendezvousTimeout(join=timedelta(seconds=_TIMEOUT_S)),
        )
        ready.wait()
        handler.next_rendezvous()

    stores = [_connect(port) for _ in range(hosts)]

    def change() -> None:
        made[0] += 1
        ready = threading.Barrier(hosts)
        threads = [threading.Thread(target=meet, args=(str(made[0]), store, ready), daemon=True) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return change


if __name__ == "__main__":
    system, hosts, changes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    change = {"unisono": _unisono, "torchrun": _torchrun}[system](hosts, server.port)
    seconds = []
    for _ in range(changes):
        time.sleep(0.1)
        began_s = time.perf_counter()
        change()
        seconds.append(time.perf_counter() - began_s)
    print(json.dumps(seconds), flush=True)
    os._exit(0)  # threads of the hosts wait for ever
