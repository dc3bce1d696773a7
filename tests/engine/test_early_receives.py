"""Receives that begin early take the messages of their length, in order, whatever was expected before."""

import pytest

SCRIPT = """
import random
import torch
import unisono
from unisono.collectives.world import World
from unisono.engine.early_receives import EarlyReceives

unisono.init(backend="gloo")
world = World.connect(torch.device("cpu"))
early, rng = EarlyReceives(world, 1 << 28), random.Random(0)
peers = [rank for rank in range(world.size) if rank != world.rank]
expected = 0
for turn in range(60):
    lengths = [rng.choice([128, 256, 384, 524288]) for _ in range(rng.randint(0, 4))]
    for peer in peers:  # what comes, and what does not
        for length in {*lengths, rng.choice([128, 256, 640])}:
            early.expect(peer, length, rng.randint(0, 2))
    sent = [torch.full((length,), (turn + k + world.rank) % 256, dtype=torch.uint8) for k, length in enumerate(lengths)]
    works = [early.send(peer, tensor)[1] for tensor in sent for peer in peers]
    for k, length in enumerate(lengths):
        for peer in peers:
            seen, work, memory = early.take(peer, length)
            work.wait()
            assert len(memory) == length and memory.eq((turn + k + peer) % 256).all(), (turn, k, peer)
            early.give_back(memory)
            expected += 1
    for work in works:
        work.wait()
print("taken", expected > 100)
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_are_taken_in_the_order_in_which_they_are_sent(fork_ranks, ranks):
    job = fork_ranks(ranks, SCRIPT)
    assert all(job.lines(rank)[-1] == "taken True" for rank in range(ranks)), job.out
