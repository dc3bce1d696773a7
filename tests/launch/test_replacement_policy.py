"""The decision whether ranks that have died are replaced, and the count of their deaths."""

from __future__ import annotations

import pytest

from unisono.launch.failure.root_cause import RankFailure
from unisono.launch.replacement_policy import Await, Death, DeathCounts, GiveUp, Member, Replace, decide_replacement


def death(rank: int = 1, *, code: int = -9, step: int = 417, kind: str = "", **more) -> Death:
    account = {"type": kind, "frames": [{"file": "train.py", "line": 7}]} if kind else None
    return Death(
        failure=RankFailure(rank=rank, code=code, time_ns=0, reported=bool(kind), account=account), step=step, **more
    )


@pytest.mark.parametrize(
    ("deaths", "members", "expected"),
    [
        ([death(1)], [Member(rank=0), Member(rank=2)], Replace((1,))),
        ([death(2), death(1)], [Member(rank=0)], Replace((1, 2))),
        ([death(1)], [Member(rank=0), Member(rank=2, has_state=False, armed=False)], Replace((1,))),
        ([death(1)], [Member(rank=2, has_state=False)], GiveUp()),
        ([death(1)], [], GiveUp()),
        ([death(1)], [Member(rank=0), Member(rank=2, armed=False)], Await()),
        ([death(1, code=3, kind="SystemExit")], [Member(rank=0, armed=False)], GiveUp()),
        ([death(1)], [Member(rank=0, armed=False, refusal="so")], GiveUp("no rank can be replaced alone: so")),
        ([death(1, armed=False)], [Member(rank=0, armed=False)], GiveUp()),
        ([death(1)], [Member(rank=0), Member(rank=2, finished=True)], GiveUp()),
        ([death(1, armed=False)], [Member(rank=0)], GiveUp()),
        ([death(1, code=3, kind="SystemExit")], [Member(rank=0)], GiveUp()),
        ([death(1, code=130, kind="KeyboardInterrupt")], [Member(rank=0)], GiveUp()),
        ([death(1, code=1, kind="x.DataError")], [Member(rank=0)], Replace((1,))),
        ([death(1, code=3)], [Member(rank=0)], Replace((1,))),
        ([death(1, refusal="so")], [Member(rank=0)], GiveUp("no rank can be replaced alone: so")),
    ],
)
def test_the_decision(deaths, members, expected):
    counts = DeathCounts()
    for each in deaths:
        counts.add(each, again=False)
    assert decide_replacement(deaths, members, counts) == expected
    assert decide_replacement(deaths, members, counts, enabled=False) == GiveUp()


def test_deaths_are_counted_by_step_and_those_that_come_together_once():
    counts = DeathCounts()
    for step in range(5):  # every step kills a rank, once
        counts.add(death(step=step), again=False)
        assert not counts.excess(death(step=step))
        counts.next_round()
    for rank in range(6):
        counts.add(death(rank, step=9, code=1, kind="PeerError"), again=False)
    assert not counts.excess(death(0, step=9, code=1, kind="PeerError"))
    counts.next_round()
    counts.add(death(1, step=9), again=False)
    assert not counts.excess(death(1, step=9))
    counts.add(death(1, step=9, code=1, kind="PeerError"), again=True)
    assert "third death at step 10" in counts.excess(death(1, step=9, code=1, kind="PeerError"))
