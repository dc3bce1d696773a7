"""The page in which the agent and a rank tell each other about replaced ranks."""

from __future__ import annotations

import os

from unisono.launch.hang.status_block import create
from unisono.launch.recovery_page import Note, RankLink, RecoveryPage
from unisono.recovery_link import Membership


def test_a_reader_of_decisions_never_sees_one_without_its_ranks():
    file = create()
    agent, rank = RecoveryPage(file), RankLink(file)
    assert rank.membership() == Membership(0, (), 0) and not rank.is_new and not agent.armed and agent.note is None
    for number in range(1, 300):
        agent.decide(Membership(number, tuple(range(0, number, 2)), number))
        assert rank.membership() == Membership(number, tuple(range(0, number, 2)), number)
    agent.mark_new()
    assert RankLink(file).is_new
    rank.arm(8)
    rank.refuse("x" * 10000)
    rank.note_samples("ä" * 10000)
    rank.note("update", 2**40, -1)
    assert agent.armed and 1900 < len(agent.refusal) <= 2000 and agent.note == Note("update", 2**40, -1)
    assert agent.samples.startswith("ää")
    agent.close()
    os.close(file)


def test_a_process_that_a_rank_forks_does_not_write_into_its_page():
    file = create()
    agent, rank = RecoveryPage(file), RankLink(file)
    rank.note("loop", 1)
    if (child := os.fork()) == 0:
        rank.note("update", 2)
        rank.arm(8)
        rank.refuse("not mine")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert agent.note == Note("loop", 1, -1) and not agent.armed and not agent.refusal
    agent.close()
    os.close(file)
