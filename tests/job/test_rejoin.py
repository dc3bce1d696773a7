"""Ranks that meet after a death believe only what ranks of the same job have written."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from unisono.errors import PeerError
from unisono.job.rejoin import RecoveryStore, SupersededError
from unisono.recovery_link import Membership


class Link:
    """The part of a `RecoveryLink` that a store needs."""

    def __init__(self, secret: bytes) -> None:
        self.secret, self.latest = secret, Membership(1, (2,), 3)

    def membership(self) -> Membership:
        return self.latest


@pytest.fixture
def open_store(monkeypatch):
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(host.port))

    def make(link: Link, *, timeout_s: float = 5.0) -> RecoveryStore:
        return RecoveryStore(link, link.latest, timeout_s=timeout_s)

    yield make
    del host


def test_a_rank_reads_what_another_has_written(open_store):
    one, other = (open_store(Link(b"a" * 32)) for _ in range(2))
    one.put("position/0", {"step": 7})
    assert other.read(["position/0"], doing="come") == [{"step": 7}]


def test_what_somebody_else_has_written_is_not_opened(open_store):
    open_store(Link(b"b" * 32)).put("position/0", {"step": 7})
    with pytest.raises(PeerError, match="that no rank of this job has written"):
        open_store(Link(b"a" * 32)).read(["position/0"], doing="come")


def test_a_value_of_another_place_is_not_opened(open_store):
    store = open_store(Link(b"a" * 32))
    store.put("position/0", 1)
    store.store.set("position/1", store.store.get("position/0"))
    with pytest.raises(PeerError, match="position/1"):
        store.read(["position/1"], doing="come")


def test_a_rank_that_does_not_come_is_named(open_store):
    with pytest.raises(PeerError, match=r"timed out: rank 3 did not come within 0\.2 s"):
        open_store(Link(b"a" * 32), timeout_s=0.2).read(["position/3"], doing="come")


def test_a_newer_decision_ends_the_wait(open_store):
    link = Link(b"a" * 32)
    store = open_store(link)
    link.latest = Membership(2, (1, 2), 3)
    with pytest.raises(SupersededError):
        store.read(["position/0"], doing="come")
