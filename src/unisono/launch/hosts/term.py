"""The messages between the hosts of a job: a log in the store of one of them, the leader, and signs of life.

All read the entries in the same order. What only the leader needs goes into a queue of the store, its mail: if all of
many hosts read what each of them answers, that would take most of a second for a hundred. As long as one host leads is
a *term*, as in Raft; when it is lost, the others begin the next term at the store of another one
(`launch.hosts.job_membership`). Start reading at `Term`.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import QueueEmptyError

__all__ = ["STORE_ERRORS", "Term"]

STORE_ERRORS = (RuntimeError, ValueError, OSError)
"""The errors that torch's stores raise when the other side is gone; its DistError is a RuntimeError."""

_POLL_S = 0.3
"""How often hosts show that they are alive. An entry goes out at once."""
_PAUSE_S = 2.0
"""A longer time between two looks is a pause of this process, and none of the others."""
_FOREVER = timedelta(days=365)
_WRITING_S = 1.0
"""How long a host may take to write an entry into its place, which it gets before."""
_CLOSED = "has closed its connection: its launcher has ended, or was killed"
_LOG, _MAIL, _NOTHING = "log", "mail", "{}"


class Term:
    """One leader's term, as one host sees it.

    Args:
        number: Counts the terms of a job.
        leader: The host that serves the store.
        host: This host.
        members: The hosts that take part; they may become fewer or more.
        connect: Opens a connection to the store, with a prefix that belongs to the term.
        timeout_s: How long a host may be silent.
        told: Called with the host that wrote an entry, and the entry. By threads of this object: one for the log, and
            one for the leader's mail.
        silent: Called on the leader with the hosts that are silent, once all others have shown that they are not: where
            the network is divided, all of the other side are silent together.
        broken: Called once, with the reason, if the store cannot be used any more.
    """

    def __init__(
        self,
        number: int,
        leader: int,
        host: int,
        *,
        members: Collection[int],
        connect: Callable[[], Any],
        timeout_s: float,
        told: Callable[[int, dict[str, Any]], None],
        silent: Callable[[Collection[int]], None],
        broken: Callable[[str], None],
    ) -> None:
        self.number, self.leader, self._host = number, leader, host
        self._timeout_s, self._told, self._silent, self._broken = timeout_s, told, silent, broken
        self._connect = connect
        self._members = set(members)
        self._awaited = 1  # the place in the log of the next entry, or of the one that is being told
        self._is_told = threading.Condition()  # whether the entry at that place has been
        self._heard = 0  # the place of the last entry that this host has read
        self._due: tuple[int, float] | None = None  # on the leader: that place if it has no entry, and since when
        self._noticed_s: float | None = None  # when a host was silent for too long
        self._order = threading.Lock()  # in which requests are made
        self._waiting = 0  # what the thread that writes has to do, and has not done
        self._store: Any = None  # its connection
        self._requests: queue.SimpleQueue[Callable[[Any], None] | None] = queue.SimpleQueue()  # to do with the store
        self._round_s = time.monotonic()
        self._over = threading.Event()
        self._has_failed = False  # by an error of what `told` calls, which is none of the store
        self._once = threading.Lock()
        self._writer = threading.Thread(target=self._run, args=(self._write,), name="unisono-hosts-write", daemon=True)

    def begin(self) -> None:
        """Begin to read and to write."""
        for read in (self._read_log, self._read_mail) if self.leader == self._host else (self._read_log,):
            threading.Thread(target=self._run, args=(read,), name="unisono-hosts-read", daemon=True).start()
        self._writer.start()

    def say(self, entry: Mapping[str, Any]) -> None:
        """Append an entry to the log. Does not wait."""
        self._request(partial(self._append, entry))

    def say_to_leader(self, entry: Mapping[str, Any]) -> None:
        """Send an entry to the leader, which reads it after all entries that this host has read. Does not wait.

        It is lost with the leader.
        """
        text = json.dumps([self._heard, {**entry, "from": self._host}])
        self._request(lambda store: store.queue_push(_MAIL, text), at_once=True)  # one message, which needs no answer

    def show(self, what: Any) -> None:
        """Let other hosts see something, in place of what this one has shown in this term. Does not wait."""
        self._request(lambda store: store.set(f"shown/{self._host}", json.dumps(what)))

    def look(self, seen: Callable[[dict[int, Any]], None]) -> None:
        """Call a function with what the hosts show, by host. Does not wait."""

        def look(store: Any) -> None:
            keys = {host: f"shown/{host}" for host in sorted(self._members)}
            seen({host: json.loads(store.get(key)) for host, key in keys.items() if store.check([key])})

        self._request(look)

    def watch(self, members: Collection[int]) -> None:
        """Watch these hosts from now on."""
        self._members = set(members)

    def check(self) -> None:
        """Look whether the store answers. Called several times a second."""
        if time.monotonic() - self._round_s > self._timeout_s:
            self._break(f"has not answered for {self._timeout_s:g} s: it, or the link to it, is down")

    def end(self) -> None:
        """Take no more part. Threads that wait for an answer are left behind."""
        self._over.set()

    def leave(self, *, linger_s: float) -> None:
        """Write what is left, note that this host needs the store no more, and end.

        Args:
            linger_s: On the leader, how long to wait for the others to do the same.
        """
        self._requests.put(None)
        self._writer.join(linger_s)
        if self._over.is_set():
            return
        if self.leader == self._host:
            with suppress(*STORE_ERRORS):
                store = self._connect()
                waiting, deadline_s = set(self._members) - {self._host}, time.monotonic() + linger_s
                while waiting and time.monotonic() < deadline_s:
                    waiting = {host for host in waiting if not store.check([f"done/{host}"])}
                    time.sleep(_POLL_S / 3)
        self._over.set()

    def _request(self, request: Callable[[Any], None], *, at_once: bool = False) -> None:
        """Do something with the store, after all that was requested before.

        Args:
            request: Called with the store.
            at_once: True for what waits for no answer: this thread does it, unless something else comes first.
        """
        is_lost = False
        with self._order:
            if not at_once or self._store is None or self._waiting:
                self._waiting += 1
                self._requests.put(request)
                return
            try:
                request(self._store)
            except STORE_ERRORS:
                is_lost = True
        if is_lost:
            self._break(_CLOSED)

    def _count(self, more: int) -> None:
        with self._order:
            self._waiting += more

    def _run(self, body: Callable[[], None]) -> None:
        try:
            body()
        except STORE_ERRORS:
            if self._has_failed:
                raise
            self._break(_CLOSED)

    def _break(self, reason: str) -> None:
        with self._once:
            if self._over.is_set():
                return
            self._over.set()
        self._broken(reason)

    def _read_log(self) -> None:
        store = self._connect()
        store.set_timeout(_FOREVER)
        while not self._over.is_set():
            text = store.get(f"{_LOG}/{self._awaited}")  # waits for it
            self._heard = self._awaited
            self._tell(json.loads(text))
            with self._is_told:
                self._awaited += 1
                self._is_told.notify()

    def _read_mail(self) -> None:
        store = self._connect()
        store.set_timeout(_FOREVER)
        for text in self._mail(store):
            place, entry = json.loads(text)
            with self._is_told:  # it may answer an entry that this host has written, and not read yet
                while self._awaited <= place and not self._over.is_set():
                    self._is_told.wait(_POLL_S)
            self._tell(entry)

    def _mail(self, store: Any) -> Iterator[bytes]:
        """Yield the mail as it comes. To wait for some takes two messages to the store; what is there takes one."""
        while not self._over.is_set():
            yield store.queue_pop(_MAIL)  # waits for one
            with suppress(QueueEmptyError):
                while not self._over.is_set():
                    yield store.queue_pop(_MAIL, block=False)

    def _tell(self, entry: dict[str, Any]) -> None:
        if not entry or self._over.is_set():
            return
        is_told = False
        try:
            self._told(entry.pop("from"), entry)
            is_told = True
        finally:
            if not is_told:
                self._has_failed = True
                self._break("cannot be followed: this host's launcher has failed, as the error above says")

    def _write(self) -> None:
        self._store = store = self._connect()
        beats: dict[int, bytes] = {}
        changed_s: dict[int, float] = {}
        due_s = time.monotonic()
        while not self._over.is_set():
            with suppress(queue.Empty):
                if (request := self._requests.get(timeout=max(0.0, due_s - time.monotonic()))) is None:
                    # Over this connection: to open one to a leader that has just ended takes 10 s.
                    store.set(f"done/{self._host}", "1")
                    _await_arrival(store)
                    return
                request(store)
                self._count(-1)
            if time.monotonic() < due_s:
                continue
            self._count(1)  # a leader that is silent does not answer
            store.add(f"beat/{self._host}", 1)  # which is answered, so the store is there
            if self.leader == self._host:
                self._find_silent(store, beats, changed_s)
                self._give_up_place(store)
            self._count(-1)
            self._round_s = time.monotonic()
            due_s = self._round_s + _POLL_S

    def _append(self, entry: Mapping[str, Any], store: Any) -> None:
        self._fill(store.add(f"{_LOG}/count", 1), entry, store)

    def _fill(self, place: int, entry: Mapping[str, Any], store: Any) -> None:
        """Write an entry into its place, or into a new one if the leader has given that up meanwhile."""
        text = json.dumps({**entry, "from": self._host})
        while store.compare_set(f"{_LOG}/{place}", "", text).decode() != text:
            place = store.add(f"{_LOG}/count", 1)

    def _give_up_place(self, store: Any) -> None:
        """Let readers go on beyond an entry whose writer has been killed between its place and its text."""
        place, now_s = self._awaited, time.monotonic()
        if store.add(f"{_LOG}/count", 0) < place or store.check([f"{_LOG}/{place}"]):
            self._due = None
        elif self._due is None or self._due[0] != place:
            self._due = place, now_s
        elif now_s - self._due[1] > _WRITING_S:
            store.compare_set(f"{_LOG}/{place}", "", _NOTHING)

    def _find_silent(self, store: Any, beats: dict[int, bytes], changed_s: dict[int, float]) -> None:
        now_s = time.monotonic()
        was_paused = now_s - self._round_s > _PAUSE_S
        for host, beat in self._look_at_beats(store, beats).items():
            if beat != beats.get(host) or was_paused:
                beats[host], changed_s[host] = beat, now_s
        silent = {host for host in self._members & changed_s.keys() if now_s - changed_s[host] > self._timeout_s}
        if not silent:
            self._noticed_s = None
            return
        if self._noticed_s is None:
            self._noticed_s = now_s
        if all(changed_s[host] > self._noticed_s for host in self._members - silent - {self._host}):
            self._noticed_s = None
            self._silent(silent)

    def _look_at_beats(self, store: Any, before: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return what each of the others has counted up to; b"" for one that has not begun."""
        others = self._members - {self._host}
        begun = [host for host in others if before.get(host) or store.check([f"beat/{host}"])]
        beats = store.multi_get([f"beat/{host}" for host in begun]) if begun else []  # one message for all of them
        return {**dict.fromkeys(others, b""), **dict(zip(begun, beats, strict=True))}


def _await_arrival(store: Any) -> None:
    """Wait until the store has what was set: to set is not answered, and is lost if this process ends before."""
    store.check([f"{_LOG}/count"])
