"""The check of a job's hosts: they meet as for a job, then measure the network between them pair by pair.

All hosts end with the same facts and links. Pairs are measured in rounds in which no host has two partners, one
direction after the other, so no measurement disturbs another at a host. Imports torch.
Start reading at `HostCheck.run`.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from unisono.errors import LaunchError
from unisono.launch.host_check.facts import HostFacts, own_facts
from unisono.launch.host_check.findings import pair_rounds
from unisono.launch.host_check.links import Link, LinkServer, measure_link
from unisono.launch.hosts.addresses import HostAddresses
from unisono.launch.hosts.endpoint import HostRefusedError
from unisono.launch.hosts.host_differences import find_difference
from unisono.launch.hosts.host_settings import HostSettings
from unisono.launch.hosts.meeting import Meeting, meet
from unisono.launch.hosts.name_wait import await_addresses
from unisono.machine import host_id

__all__ = ["HostCheck"]

_POLL_S = 0.02
_SILENCE_S = 25.0
"""How long nothing may happen; a host takes 13 s at most for a measurement."""
_LINGER_S = 5.0
_PREFIX = "unisono/check"


def _pause(seconds: float) -> bool:
    time.sleep(seconds)
    return True


class HostCheck:
    """A check in progress, and its result.

    Args:
        settings: Where hosts meet.
        notice: Called with a line about what is waited for.
        warn: Called with a sentence about strangers.
    """

    def __init__(self, settings: HostSettings, *, notice: Callable[[str], None], warn: Callable[[str], None]) -> None:
        self._settings, self._notice, self._warn = settings, notice, warn
        self.hosts: list[HostFacts] = []
        """The facts of all hosts, by number."""
        self.links: dict[tuple[int, int], Link] = {}
        """The measurements from one host to another."""
        self.own = 0
        """The number of this host."""
        self._progress_s = time.monotonic()
        self._meeting: Meeting | None = None
        self._waiting: set[int] = set()
        self._problem: str | None = None

    def run(self) -> None:
        """Run the check to its end.

        Raises:
            LaunchError: Hosts do not meet, or one of them does not answer any more.
        """
        addresses = await_addresses(self._settings, say=self._warn, notice=self._notice, pause=_pause)
        assert addresses is not None
        # A store whose host is gone may not answer at all, so another thread asks it.
        thread = threading.Thread(target=self._check, args=(addresses,), daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
            if self._meeting is not None and time.monotonic() - self._progress_s > _SILENCE_S:
                raise LaunchError(self._silence())
        if self._problem is not None:
            raise LaunchError(self._problem)

    def _check(self, addresses: HostAddresses) -> None:
        try:
            self._meeting = self._meet(addresses)
            self._progress_s = time.monotonic()
            self._measure(self._meeting, addresses)
            self._leave(self._meeting)
        except HostRefusedError as error:
            self._problem = str(error)
        except (RuntimeError, ValueError, OSError) as error:  # torch's DistError is a RuntimeError
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._problem = f"the check at {self._settings.endpoint} broke off: {reason}; start it again on all hosts"

    def _meet(self, addresses: HostAddresses) -> Meeting:
        facts = own_facts(address=addresses.local, interface=addresses.interface)
        hello = {
            "name": facts.title,
            "address": addresses.local,
            "system": host_id(with_network=True),
            "nonce": secrets.token_hex(16),
            "versions": {},  # a difference is one of the findings, and no reason to stop
            "facts": asdict(facts),
        }
        return meet(self._settings, addresses, ranks=1, role="check", hello=hello, notice=self._notice, warn=self._warn)

    def _measure(self, meeting: Meeting, addresses: HostAddresses) -> None:
        store, number, count = meeting.store, meeting.place.host, meeting.place.hosts
        strangers = sorted(set(range(count)) - {host for host, hello in meeting.hellos.items() if "facts" in hello})
        if strangers:
            raise HostRefusedError(
                f"{len(strangers)} of {count} hosts at {self._settings.endpoint} run something else than this check: "
                "start `unisono hosts check` on all"
            )
        if (problem := find_difference(meeting.hellos)) is not None:
            raise HostRefusedError(problem)
        facts = [meeting.hellos[host]["facts"] for host in range(count)]
        self.own, self.hosts = number, [HostFacts(**{**each, "gpus": tuple(each["gpus"])}) for each in facts]
        secret = meeting.hellos[0]["nonce"]
        server = LinkServer(addresses.local, secret)
        try:
            store.set(f"{_PREFIX}/port/{number}", str(server.port))
            self._await(store, "port", range(count))
            ports = [int(store.get(f"{_PREFIX}/port/{host}")) for host in range(count)]
            rounds = pair_rounds(count)
            own: dict[int, Link] = {}
            for turn, pairs in enumerate(rounds):
                self._notice(f"unisono: measuring the links of {count} hosts, {turn + 1} of {len(rounds)} ...")
                for direction, stage in ((1, f"{turn}.0"), (-1, f"{turn}.1")):
                    for one, other in (pair[::direction] for pair in pairs):
                        if one == number:
                            own[other] = measure_link(self.hosts[other].address, ports[other], secret)
                    store.set(f"{_PREFIX}/{stage}/{number}", "1")
                    self._await(store, stage, range(count))
            store.set(f"{_PREFIX}/links/{number}", json.dumps({other: asdict(link) for other, link in own.items()}))
            self._await(store, "links", range(count))
        finally:
            server.close()
        for one in range(count):
            found = json.loads(store.get(f"{_PREFIX}/links/{one}"))
            self.links |= {(one, int(other)): Link(**link) for other, link in found.items()}

    def _await(self, store: Any, stage: str, hosts: Iterable[int]) -> None:
        """Wait until hosts have written that they have come to a stage. `run` bounds the wait."""
        self._waiting = set(hosts)
        while self._waiting:
            came = {host for host in self._waiting if store.check([f"{_PREFIX}/{stage}/{host}"])}
            if came:
                self._progress_s = time.monotonic()
                self._waiting = self._waiting - came
            else:
                time.sleep(_POLL_S)

    def _leave(self, meeting: Meeting) -> None:
        """Wait for the others where they need the store of this process."""
        store = meeting.store
        store.set(f"{_PREFIX}/done/{self.own}", "1")
        if meeting.hosts_store:
            end_s = time.monotonic() + _LINGER_S
            while time.monotonic() < end_s and not store.check(
                [f"{_PREFIX}/done/{host}" for host in range(len(self.hosts))]
            ):
                time.sleep(_POLL_S)
        if meeting.handler is not None:
            meeting.handler.shutdown()

    def _silence(self) -> str:
        names = [f"host {host}, {self.hosts[host].title}" for host in sorted(self._waiting) if host < len(self.hosts)]
        who = "; ".join(names) or f"the host of the rendezvous, {self._settings.endpoint}"
        return f"no answer for {_SILENCE_S:g} s from {who}: see what its terminal says, and start the check again"
