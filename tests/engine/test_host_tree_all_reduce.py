"""The all-reduce between hosts has the bits of the tree, whatever the shares. Ranks here only say that hosts differ."""

import pytest

SCRIPT = """
import random
import sys
import time
import torch
import unisono
from unisono.collectives.world import World
from unisono.engine.copied_all_reduce import CopiedAllReduce
from unisono.engine.host_tree_all_reduce import HostGrid, HostRanks, HostTreeAllReduce
from unisono.engine.tree_all_reduce import NodeLayout
from unisono.plan import Node, fold
from unisono.shm.peers import own_process

per_host, virtual_ranks, shares = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "memory"
unisono.init(backend="gloo")
world = World.connect(torch.device("cpu"))
numel = 1000
leaves = {leaf: torch.randn(numel, generator=torch.Generator().manual_seed(leaf)) for leaf in range(virtual_ranks)}

def value(node, count):
    below = {Node(leaf - node.start, leaf - node.start + 1): leaves[leaf].clone() for leaf in range(*node)}
    return fold(below, leaves=node.stop - node.start, add=torch.add)

def layout(count):
    return NodeLayout.of(leaves=count, world_size=world.size, virtual_ranks=virtual_ranks)

hosts = HostRanks(HostGrid(world.size // per_host, per_host))
if shares:
    hosts = HostRanks.sharing(world, hosts.grid, world.gather((f"rank {world.rank}", own_process())))
options = {"widest": layout(virtual_ranks), "dtype": torch.float32}
if sys.argv[3] == "copies":
    exchange = CopiedAllReduce(world, numel, **options, device=torch.device("cpu"))
else:
    exchange = HostTreeAllReduce(world, hosts, numel, **options)
rng = random.Random(world.rank)
for turn, count in enumerate([virtual_ranks, 1, virtual_ranks - 1, virtual_ranks // 2, virtual_ranks] * 2):
    factor = 2.0 ** (turn % 8)
    exchange.start(step := layout(count))
    for row, node in zip(exchange.rows, step.nodes[world.rank]):
        row[:numel] = value(node, count) * factor
    exchange.launch()
    for _ in range(exchange.phases - 1):
        time.sleep(0.003 * rng.random())  # ranks are at different places
        exchange.advance()
    total = exchange.finish(None)[:numel]
    expected = fold({Node(i, i + 1): leaves[i].clone() for i in range(count)}, leaves=count, add=torch.add)
    assert torch.equal(total, expected * factor), (turn, count, world.rank)
print("equal")
"""


@pytest.mark.parametrize("within", ["memory", "group"])
@pytest.mark.parametrize(("hosts", "per_host", "virtual_ranks"), [(2, 2, 4), (3, 2, 11), (2, 3, 13)])
def test_the_sum_is_that_of_the_tree(fork_ranks, hosts, per_host, virtual_ranks, within):
    job = fork_ranks(hosts * per_host, SCRIPT, per_host, virtual_ranks, within)
    assert job.out.count("equal") == hosts * per_host


@pytest.mark.parametrize(("ranks", "virtual_ranks"), [(2, 2), (2, 6), (3, 11)])
def test_the_sum_of_copies_is_that_of_the_tree(fork_ranks, ranks, virtual_ranks):
    """As for ranks that share a GPU, whose rows are copied to the CPU."""
    assert fork_ranks(ranks, SCRIPT, 1, virtual_ranks, "copies").out.count("equal") == ranks


LEFT = """
import os
import time
import torch
import unisono
from unisono.collectives.world import World
from unisono.engine import select_engines
from unisono.engine.tree_all_reduce import NodeLayout
from unisono.errors import PeerError

os.environ["UNISONO_HOST"] = str(int(os.environ["RANK"]) // 2)
unisono.init(backend="gloo", timeout=20)
model = torch.nn.Linear(300, 300)
optimizer = torch.optim.SGD(model.parameters())
options = {"virtual_ranks": 4, "overlap": True}
world = World.connect(torch.device("cpu"))
engines = select_engines("collective", world, [model], [optimizer], **options)
widest = NodeLayout.of(leaves=4, world_size=4, virtual_ranks=4)
exchange = engines.all_reduce(100_000, widest=widest, dtype=torch.float32, device=torch.device("cpu"))
exchange.start(widest)
if world.rank:
    exchange.launch()
if world.rank == 1:
    try:
        exchange.advance()
    except PeerError as error:
        print(error, flush=True)
else:
    time.sleep(0.5)
    engines.close()
world.gather(None, "the end")
"""


def test_a_rank_that_waits_for_one_of_its_host_is_freed_when_that_one_leaves_the_step(fork_ranks):
    job = fork_ranks(4, LEFT)
    assert "the group was left by rank 0" in job.out
