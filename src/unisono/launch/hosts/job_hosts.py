"""The hosts of a job as this host's agent sees them: what to tell them, and what they have told.

The other end is `launch.hosts.member`, in the process that hosts stores. Does not import torch. Start reading at
`JobHosts`.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from unisono.launch.channel import Channel, Message
from unisono.launch.hosts.addresses import HostAddresses
from unisono.launch.hosts.host_settings import HostPlace, HostSettings
from unisono.text import name_ranks
from unisono.watch.figures import plural

__all__ = ["HostReport", "JobHosts"]

_MOST_HOSTS = 4
"""The hosts that a sentence names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostReport:
    """How the job has ended on a host."""

    kind: str
    """"failed": one of its ranks has; "ended": a signal or a user; "lost": the host cannot be reached."""
    headline: str
    """The event, without the host."""
    code: int
    """The exit code of the job."""
    host: str
    """The name of the host; "" if the headline says it."""

    @property
    def reason(self) -> str:
        """The event, as a sentence."""
        if not self.host:
            return self.headline
        return f"host {self.host}: {self.headline}" if self.kind != "lost" else f"host {self.host} {self.headline}"


class JobHosts:
    """The other hosts of a job.

    Args:
        settings: Where all meet.
        addresses: The addresses of this host.
        ranks: The number of ranks of this host.
        role: ROLE_NAME of its ranks.
        flags: The flags that all hosts must be given alike, with this host's values.
    """

    def __init__(
        self, settings: HostSettings, addresses: HostAddresses, *, ranks: int, role: str, flags: Mapping[str, str]
    ) -> None:
        self.settings, self._addresses = settings, addresses
        ours, self._theirs = socket.socketpair()
        self.channel = Channel(ours)
        self._ranks, self._role, self._flags = ranks, role, dict(flags)
        self._names: dict[str, str] = {}
        self.place: HostPlace | None = None
        """The place of this host; None before all have met."""
        self.members: tuple[int, ...] = ()
        """The hosts that take part."""
        self.leader = 0
        """The one of them that decides."""
        self.term = -1
        """Counts the leaders."""
        self.store = ""
        """Where ranks of this host reach the leader's store."""
        self.lost: dict[int, str] = {}
        """By number, what has happened to hosts that take no part any more."""
        self.placement: dict[int, list[int]] = {}
        """By host, its ranks. A host that has none has not joined yet."""
        self.homes: dict[int, int] = {}
        """By rank, the host that it was on at first."""
        self.capacities: dict[int, int] = {}
        """By host, the number of ranks that it was started with."""
        self.attempt = 0
        """How often the ranks of all hosts have been started again."""
        self.joins = False
        """True if this host joins a job that runs, and has no ranks in it yet."""
        self.secret = b""
        """Known to all ranks of the job, and to whoever can read what the hosts say unless they have a token."""
        self.has_torchrun = False
        """True if torchrun's launcher is on one of the hosts, which tells nothing of its ranks."""
        self.replaces = False
        """True if ranks can be replaced: torchrun's launchers take no part in that, nor do several roles."""
        self.report: HostReport | None = None
        """The first that was told of another host."""
        self.restart_without: Callable[[str], bool] = lambda what: False
        """Starts all ranks again after the loss of a host, given as words, and returns True; otherwise False."""
        self.told = False
        """True if this host has told the others how the job has ended here."""
        self.finished = False
        """True if the ranks of all hosts have succeeded."""

    @property
    def interface(self) -> str:
        """The network interface over which this host reaches the others; "" if it is not known."""
        return self._addresses.interface

    @property
    def facts(self) -> dict[str, Any]:
        """The facts for the process that meets the other hosts."""
        return {
            "settings": {**asdict(self.settings), "conf": dict(self.settings.conf)},
            "addresses": asdict(self._addresses),
            "ranks": self._ranks,
            "role": self._role,
            "flags": self._flags,
        }

    @property
    def link(self) -> int:
        """The file over which that process is told about the job, and tells about the other hosts."""
        return self._theirs.fileno()

    def started(self) -> None:
        """Close the other end: the process that has it has been started."""
        self._theirs.close()

    @property
    def reaches_all(self) -> bool:
        """True if other agents can be asked: not those of torchrun, and not before this host has a part in the job."""
        return self.place is not None and not self.has_torchrun and not self.joins

    @property
    def leads(self) -> bool:
        """True if this host decides."""
        return self.place is not None and self.place.host == self.leader

    def receive(self) -> Iterator[Message]:
        """Yield what has been told, after taking note of it."""
        for message, _ in self.channel.receive():
            if message["type"] == "joined":
                self._on_joined(message)
            elif message["type"] == "hosts":
                self.members, self.leader, self.term = tuple(message["members"]), message["leader"], message["term"]
                self.store = ":".join(map(str, message["store"]))
                self.lost |= {int(host): reason for host, reason in message["lost"].items()}
                self._meet(message)
            elif message["type"] == "finished":
                self.finished = True
            elif message["type"] == "report" and self.report is None:
                self.report = self._read(message)
            yield message

    def _on_joined(self, message: Message) -> None:
        self.place = place = HostPlace(**message["place"])
        self.joins = message["is_late"]
        self._meet(message)
        self.has_torchrun = message["has_torchrun"]
        if self.has_torchrun:  # its hosts do not tell how many ranks they have, so only this one's are known
            own = list(range(place.first_rank, place.first_rank + self._ranks))
            self.placement = {host: own if host == place.host else [] for host in self.capacities}
        elif not self.joins:
            ends = accumulate(self.capacities[host] for host in sorted(self.capacities))
            self.placement = {host: list(range(*pair)) for host, pair in enumerate(pairwise([0, *ends]))}
        self.homes = {rank: host for host, ranks in self.placement.items() for rank in ranks}
        self.secret = hmac.digest(self.settings.token.encode() or b"none", message["nonce"].encode(), "sha256")
        self.replaces = not self.has_torchrun and place.role_world_size == place.world_size

    def accept(self, entry: Mapping[str, Any]) -> HostPlace:
        """Return the place of this host in the job that it joins, from the leader's invitation."""
        assert self.place is not None
        self.placement = {int(host): list(ranks) for host, ranks in entry["placement"].items()}
        self.homes = {int(rank): host for rank, host in entry["homes"].items()}
        self.capacities = {int(host): ranks for host, ranks in entry["capacities"].items()}
        self.attempt = entry["attempt"]
        ranks, (address, _, port) = tuple(entry["ranks"]), self.store.rpartition(":")
        return replace(
            self.place,
            host=len(self.placement),
            hosts=len(self.placement) + 1,
            first_rank=ranks[0],
            world_size=entry["size"],
            first_role_rank=ranks[0],
            role_world_size=entry["size"],
            master_addr=address,
            master_port=int(port),
            ranks=ranks,
            joins=True,
        )

    def current_place(self) -> HostPlace:
        """Return the place of this host by `placement`. Its first rank is still that from the start."""
        assert self.place is not None
        world_size = sum(map(len, self.placement.values()))
        address, _, port = self.store.rpartition(":")  # the store from the start may be lost
        return replace(
            self.place,
            hosts=len(self.placement),
            host=sorted(self.placement).index(self.place.host),
            world_size=world_size,
            role_world_size=world_size,
            master_addr=address,
            master_port=int(port),
        )

    def place_to_restart(self) -> HostPlace:
        """Return the place of this host once all ranks start again where `placement` has them."""
        assert self.place is not None
        if not self.replaces:  # then none has moved
            return self.place
        ranks = tuple(self.placement[self.place.host])
        return replace(self.current_place(), ranks=ranks, first_rank=ranks[0], first_role_rank=ranks[0])

    def _meet(self, message: Message) -> None:
        self._names |= message.get("names", {})
        self.capacities |= {int(host): ranks for host, ranks in message.get("ranks", {}).items()}

    @property
    def hosts(self) -> list[int]:
        """The members that have ranks."""
        return [host for host in self.members if host in self.placement]

    @property
    def newcomers(self) -> list[int]:
        """The members that have none yet: they are about to join."""
        return [host for host in self.members if host not in self.placement]

    @property
    def lost_with_ranks(self) -> list[int]:
        """Those that are no members any more, and whose ranks are not on other hosts yet."""
        return [host for host in sorted(self.placement) if self.placement[host] and host not in self.members]

    def name(self, host: int) -> str:
        """Return a host in words, with its name."""
        return f"host {host}, {self._names[str(host)]}" if str(host) in self._names else f"host {host}"

    def name_places(self, ranks: Collection[int]) -> str:
        """Return on which hosts these ranks are, as a sentence."""
        by_host = {host: [r for r in ranks if r in own] for host, own in sorted(self.placement.items())}
        found = [(host, own) for host, own in by_host.items() if own]
        parts = [f"{name_ranks(own)} on {self.name(host)}" for host, own in found[:_MOST_HOSTS]]
        if len(found) > _MOST_HOSTS:
            parts.append(f"the others on {plural(len(found) - _MOST_HOSTS, 'more host')}")
        text = "; ".join(parts)
        return f"{text[:1].upper()}{text[1:]}."

    def say(self, entry: Mapping[str, Any]) -> None:
        """Tell the agents of all hosts something, this one too: all hear everything in the same order."""
        self.channel.send({"type": "say", "entry": entry})

    def say_to_leader(self, entry: Mapping[str, Any]) -> None:
        """Tell the agent of the leader something. It is lost with the leader: the next one asks anew."""
        self.channel.send({"type": "say to leader", "entry": entry})

    def show(self, what: Mapping[str, Any]) -> None:
        """Let other hosts see something, in place of what this one has shown before."""
        self.channel.send({"type": "show", "what": what})

    def look(self) -> None:
        """Ask for what all hosts show, which comes as a message `shown`."""
        self.channel.send({"type": "look"})

    def tell_lost(self, host: int, reason: str) -> None:
        """Tell all hosts that the job ends because one is lost."""
        if not self.told:
            self.told = True
            self.channel.send({"type": "report", "kind": "lost", "host": host, "headline": reason, "code": 1})

    def tell(self, kind: str, headline: str, code: int) -> None:
        """Tell the other hosts how the job ends here, once. If this host only joins, it goes on there."""
        if not self.told:
            self.told = True
            joins = None if self.place is None else self.joins  # before it has a place, the other process may know
            self.channel.send({"type": "report", "kind": kind, "headline": headline, "code": code, "joins": joins})

    def finish(self) -> None:
        """Tell the other hosts that the ranks of this one have succeeded."""
        self.channel.send({"type": "finish"})

    def describe(self) -> str:
        """Return this host's place in words."""
        assert self.place is not None
        return describe(self.place, self._ranks)

    def close(self) -> None:
        """Close both ends."""
        self._theirs.close()
        self.channel.close()

    def _read(self, message: Mapping[str, Any]) -> HostReport:
        host = str(message["host"])
        name = self._names.get(host, "")
        return HostReport(
            kind=message["kind"],
            headline=message["headline"],
            code=message["code"],
            host=f"{host}, {name}," if name and message["kind"] == "lost" else f"{host}, {name}" if name else "",
        )


def describe(place: HostPlace, ranks: int) -> str:
    """Return this host's place in words.

    >>> describe(HostPlace(host=1, hosts=2, first_rank=4, world_size=8, first_role_rank=4, role_world_size=8,
    ...                    master_addr="a", master_port=1, identity=""), 4)
    'host 1 of 2, ranks 4-7 of 8'
    """
    last = place.first_rank + ranks - 1
    names = f"rank {last}" if ranks == 1 else f"ranks {place.first_rank}-{last}"
    return f"host {place.host} of {place.hosts}, {names} of {place.world_size}"
