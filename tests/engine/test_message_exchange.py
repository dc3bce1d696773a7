"""Messages of any size come whole, in one collective where the slots are long enough."""

from itertools import pairwise

import pytest

from unisono.engine.message_exchange import next_slot

SCRIPT = """
import random
import sys
import torch
import torch.distributed as dist
import unisono
from unisono.collectives.world import World
from unisono.engine.message_exchange import MessageExchange

most, expects = int(sys.argv[1]), sys.argv[2] == "True"
unisono.init(backend="gloo")
rank, size = unisono.rank(), unisono.world_size()
group = dist.new_group()
world = World.connect(torch.device("cpu"))
exchange = MessageExchange(world, group=group, most=most, notes=2, tag=7 if expects else None)
collectives, original = [], dist.all_to_all_single

def counted(*args, **kwargs):
    collectives.append(args)
    return original(*args, **kwargs)

dist.all_to_all_single = counted
rng = random.Random(0)
LONGEST = [0, 0, 16, 96, 96, 80, 4992, 4992, 4000, 16, 0, 100_000, 100_000, 16, 16, 32]
taken = []
for turn, longest in enumerate(LONGEST):
    lengths = [[16 * rng.randint(0, longest // 16) for _ in range(size)] for _ in range(size)]
    lengths[rng.randrange(size)][rng.randrange(size)] = longest

    def message(sender, receiver):
        generator = torch.Generator().manual_seed(turn * 100 + sender * 10 + receiver)
        return torch.randint(0, 256, (lengths[sender][receiver],), dtype=torch.uint8, generator=generator)

    if turn % 3:
        exchange.expect()
    before = len(collectives)
    notes, found = exchange.exchange([message(rank, other) for other in range(size)], (turn - 5, rank))
    assert notes == [[turn - 5, other] for other in range(size)], notes
    for other in range(size):
        assert torch.equal(found[other], message(other, rank)), (turn, rank, other)
        assert not found[other].storage_offset() % 16, found[other].storage_offset()
    taken.append(len(collectives) - before + expects)
assert len(set(unisono.comm.all_gather(tuple(taken)))) == 1, taken
print("taken", *taken)
"""


@pytest.mark.parametrize("expects", [False, True])
@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1 << 20, [1, 1, 2, 2, 1, 1, 2, 1, 1, 1, 1, 2, 1, 1, 1, 1]),
        (4096, [1, 1, 2, 2, 1, 1, 2, 2, 1, 1, 1, 2, 2, 1, 1, 1]),
        (0, [1, 1] + 8 * [2] + [1] + 5 * [2]),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_messages_come_whole_and_mostly_in_one_collective(fork_ranks, ranks, most, expected, expects):
    out = fork_ranks(ranks, SCRIPT, most, expects).out
    lines = {line.partition("taken ")[2] for line in out.splitlines() if "taken" in line}
    assert lines == {" ".join(map(str, expected))}, out


def test_slots_follow_the_longest_message_and_shrink_slowly():
    slot, seen = 0, []
    for longest in (1000, 1000, 10, 10, 10, 1000):
        seen.append(slot := next_slot(slot, longest, 1 << 20))
    assert seen[0] == seen[1] == 1136
    assert all(1 < before / after < 1.2 for before, after in pairwise(seen[1:5]))
    assert all(length % 16 == 0 for length in seen) and seen[5] == 1136


GATHERED = """
import torch
import torch.distributed as dist
import unisono
from unisono.collectives.world import World
from unisono.engine import StepTransaction
from unisono.engine.all_gather_v import GroupAllGatherV, MessageReader

unisono.init(backend="gloo")
world = World.connect(torch.device("cpu"))
gather, collectives, original = GroupAllGatherV(world), [], dist.all_gather

def counted(*args, **kwargs):
    collectives.append(args)
    return original(*args, **kwargs)

dist.all_gather = counted
taken = []
for turn, longest in enumerate([0, 0, 16, 90, 90, 80, 0, 1000, 100_000, 100_000, 16, 16, 32]):

    def parts(rank):
        generator = torch.Generator().manual_seed(turn * 100 + rank)
        length = longest if rank == turn % world.size else longest // 3
        return [torch.randn(length, generator=generator), torch.full((rank,), turn)]

    before = len(collectives)
    gather.post(parts(world.rank))
    for rank, message in enumerate(gather.collect(StepTransaction())):
        reader = MessageReader(message)
        for part in parts(rank):
            assert torch.equal(reader.next(part.dtype, len(part)), part), (turn, rank)
    taken.append(len(collectives) - before)
assert len(set(unisono.comm.all_gather(tuple(taken)))) == 1, taken
print("taken", *taken)
"""


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_get_the_messages_of_all_mostly_in_one_collective(fork_ranks, ranks):
    """Long ones, of 400 KB here, are sent as a whole once their lengths are known."""
    out = fork_ranks(ranks, GATHERED).out
    first = 1 if ranks == 1 else 2  # the second vector of a message has no numbers on rank 0
    expected = [first, 1, 2, 2, 1, 1, 1, 2, 2, 2, 2, 1, 2]
    lines = {line.partition("taken ")[2] for line in out.splitlines() if "taken" in line}
    assert lines == {" ".join(map(str, expected))}, out
