"""What hosts tell each other within the term of one leader, at a real store."""

from __future__ import annotations

import queue
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from unisono.launch.hosts.endpoint import listen
from unisono.launch.hosts.term import Term
from unisono.tcp_store import LOOPBACK, serve_store

WAIT_S = 30.0


class Member:
    """A host in a term of which host 0 is the leader."""

    def __init__(self, host: int, hosts: int, port: int, *, timeout_s: float) -> None:
        self.told: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self.silent: queue.Queue[set[int]] = queue.Queue()
        self.broken: queue.Queue[str] = queue.Queue()
        self.fails, self.delay_s = False, 0.0

        def told(host: int, entry: dict[str, Any]) -> None:
            time.sleep(self.delay_s if entry["do"] == "slow" else 0)
            if self.fails:
                raise RuntimeError("a dictionary changed while it was read")
            self.told.put((host, entry))

        def connect() -> Any:
            store = dist.TCPStore(
                LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10)
            )
            return dist.PrefixStore("term/0", store)

        self.term = Term(
            0,
            0,
            host,
            members=range(hosts),
            connect=connect,
            timeout_s=timeout_s,
            told=told,
            silent=lambda hosts: self.silent.put({*hosts}),
            broken=self.broken.put,
        )
        self.term.begin()

    def hear(self, count: int) -> list[tuple[int, Any]]:
        """Return who has told what, for so many entries."""
        found = [self.told.get(timeout=WAIT_S) for _ in range(count)]
        return [(host, entry["do"]) for host, entry in found]


@contextmanager
def members(hosts: int, *, timeout_s: float = WAIT_S) -> Iterator[tuple[list[Any], list[Member]]]:
    """Yield the store, in a list, and the hosts."""
    stores = [serve_store(LOOPBACK, listen(LOOPBACK, 0))]
    every = [Member(host, hosts, stores[0].port, timeout_s=timeout_s) for host in range(hosts)]
    try:
        yield stores, every
    finally:
        for each in every:
            each.term.end()
        stores.clear()  # threads that wait for an entry end with it
        for thread in threading.enumerate():
            if thread.name.startswith("unisono-hosts"):
                thread.join(WAIT_S)


def test_all_hear_everything_in_one_order_and_the_leader_alone_what_is_for_it():
    with members(3) as (_, every):
        for number in range(5):
            for host, each in enumerate(every):
                each.term.say({"do": f"{host}.{number}"})
        heard = [each.hear(15) for each in every]
        assert heard[0] == heard[1] == heard[2]
        assert sorted(heard[0]) == [(host, f"{host}.{number}") for host in range(3) for number in range(5)]
        every[2].term.say_to_leader({"do": "for the leader"})
        every[0].term.say_to_leader({"do": "for itself"})
        assert sorted(every[0].hear(2)) == [(0, "for itself"), (2, "for the leader")]
        every[1].term.say({"do": "the end"})
        assert [each.hear(1) for each in every] == [[(1, "the end")]] * 3


def test_a_host_that_shows_no_sign_of_life_is_noticed_by_the_leader():
    with members(3, timeout_s=1.0) as (_, every):
        every[0].term.say({"do": "begun"})
        assert all(each.hear(1) for each in every)
        time.sleep(0.5)  # all have shown signs of life
        every[2].term.end()
        assert every[0].silent.get(timeout=WAIT_S) == {2}
        assert every[1].silent.empty()


def test_what_a_host_shows_is_seen_by_all_until_it_shows_something_else():
    with members(3) as (_, every):
        seen: queue.Queue[dict[int, Any]] = queue.Queue()
        every[1].term.show({"ranks": 1})
        every[1].term.show({"ranks": 2})
        every[2].term.show("nothing")
        every[1].term.say({"do": "shown"})
        every[2].term.say({"do": "shown"})
        assert every[0].hear(2)
        every[0].term.look(seen.put)
        assert seen.get(timeout=WAIT_S) == {1: {"ranks": 2}, 2: "nothing"}


def test_a_host_that_is_killed_while_it_writes_holds_nobody_up():
    with members(3) as (stores, every):
        every[0].term.say({"do": "begun"})
        assert all(each.hear(1) for each in every)
        dist.PrefixStore("term/0", stores[0]).add("log/count", 1)  # the place of an entry that never comes
        for each in every:
            each.term.say({"do": "next"})
        heard = every[0].hear(3)
        assert sorted(heard) == [(host, "next") for host in range(3)]
        assert every[1].hear(3) == every[2].hear(3) == heard


def test_an_answer_comes_after_what_it_answers():
    with members(2) as (_, every):
        every[0].delay_s = 0.5  # the other host reads the entry, and answers it, before the leader has
        every[0].term.say({"do": "slow"})
        assert every[1].hear(1) == [(0, "slow")]
        every[1].term.say_to_leader({"do": "answer", "after": 812})
        assert every[0].hear(1) == [(0, "slow")]
        assert every[0].told.get(timeout=WAIT_S) == (1, {"do": "answer", "after": 812})


@pytest.mark.parametrize("is_mail", [False, True])
def test_an_error_of_a_listener_is_not_taken_for_the_end_of_the_store(is_mail, monkeypatch):
    raised: queue.Queue[Any] = queue.Queue()
    monkeypatch.setattr(threading, "excepthook", raised.put)
    with members(2) as (_, every):
        every[0].fails = True
        (every[1].term.say_to_leader if is_mail else every[1].term.say)({"do": "something"})
        assert raised.get(timeout=WAIT_S).exc_type is RuntimeError
        assert "launcher has failed, as the error above says" in every[0].broken.get(timeout=WAIT_S)
        assert is_mail or every[1].hear(1) == [(1, "something")]
        assert every[1].broken.empty()


def test_a_host_that_writes_late_into_a_place_that_was_given_up_writes_into_another():
    with members(2) as (stores, every):
        hold, go_on = threading.Event(), threading.Event()

        def write(store: Any) -> None:
            place = store.add("log/count", 1)
            hold.set()
            assert go_on.wait(WAIT_S)
            every[1].term._fill(place, {"do": "late"}, store)

        every[1].term._request(write)
        assert hold.wait(WAIT_S)
        every[0].term.say({"do": "meanwhile"})
        assert every[0].hear(1) == every[1].hear(1) == [(0, "meanwhile")]
        go_on.set()
        assert every[0].hear(1) == every[1].hear(1) == [(1, "late")]
        assert stores


class SlowWay:
    """A port that passes on what comes to a store a while later, and its answers at once."""

    def __init__(self, port: int, delay_s: float) -> None:
        self._store, self.delay_s = port, delay_s
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port = self._listener.getsockname()[1]
        self._is_cut = False
        self._threads = [threading.Thread(target=self._listen, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        """Lose what has not been passed on."""
        self._is_cut = True
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)

    def _listen(self) -> None:
        with self._listener, suppress(OSError):  # it was cut
            while True:
                connection, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._pass_on, args=(connection,), daemon=True))
                self._threads[-1].start()

    def _pass_on(self, connection: socket.socket) -> None:
        with connection, socket.create_connection((LOOPBACK, self._store)) as store, suppress(OSError):
            while not self._is_cut:
                for source in select.select([connection, store], [], [], 0.01)[0]:
                    if not (data := source.recv(1 << 16)):
                        return
                    if source is connection:
                        time.sleep(self.delay_s)
                        if self._is_cut:
                            return
                    (store if source is connection else connection).sendall(data)


def test_what_a_host_says_last_has_arrived_when_it_has_left():
    with members(2) as (stores, every):
        way = SlowWay(stores[0].port, 0.1)
        last = Member(1, 2, way.port, timeout_s=WAIT_S)
        last.term.say({"do": "report"})
        last.term.leave(linger_s=WAIT_S)
        way.cut()  # as the process does that passes it on, which ends
        assert every[0].hear(1) == [(1, "report")]
        has_left = dist.PrefixStore("term/0", stores[0]).check(["done/1"])
        assert has_left


def test_what_one_host_tells_the_leader_comes_in_order():
    """Some of it is sent by the thread that says it, and some by the one that waits for answers."""
    with members(2) as (_, every):
        for number in range(300):
            every[1].term.say_to_leader({"do": str(number)})
            if number % 7 == 0:
                every[1].term.show(number)
            if number % 50 == 0:
                time.sleep(0.01)
        assert every[0].hear(300) == [(1, str(number)) for number in range(300)]


def test_nobody_who_speaks_waits_for_a_leader_that_is_silent():
    with members(2) as (stores, every):
        way = SlowWay(stores[0].port, 0.0)
        other = Member(1, 2, way.port, timeout_s=1.0)
        other.term.say({"do": "begun"})
        assert other.hear(1) == every[0].hear(1)
        way.delay_s = 3.0  # signs of life are not answered
        time.sleep(1.5)
        began_s = time.monotonic()
        other.term.say_to_leader({"do": "answer"})
        other.term.check()
        assert time.monotonic() - began_s < 1.0
        assert "has not answered for 1 s" in other.broken.get(timeout=WAIT_S)
        way.cut()


def test_the_end_of_the_store_is_noticed_once():
    with members(2) as (stores, every):
        every[0].term.say({"do": "begun"})
        assert all(each.hear(1) for each in every)
        stores.clear()
        for each in every:
            assert "has closed its connection" in each.broken.get(timeout=WAIT_S)
    assert [each.broken.empty() for each in every] == [True, True]
