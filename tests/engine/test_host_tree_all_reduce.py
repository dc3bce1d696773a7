"""The all-reduce between hosts has the bits of the tree, whatever the shares. Ranks here only say that hosts differ."""

import pytest

SCRIPT = """
import sys
import torch
import unisono
from unisono.collectives.world import World
from unisono.engine.host_tree_all_reduce import HostGrid, HostTreeAllReduce
from unisono.engine.tree_all_reduce import NodeLayout
from unisono.plan import Node, fold

per_host, virtual_ranks = int(sys.argv[1]), int(sys.argv[2])
unisono.init(backend="gloo")
world = World.connect(torch.device("cpu"))
numel = 1000
leaves = {leaf: torch.randn(numel, generator=torch.Generator().manual_seed(leaf)) for leaf in range(virtual_ranks)}

def value(node, count):
    below = {Node(leaf - node.start, leaf - node.start + 1): leaves[leaf].clone() for leaf in range(*node)}
    return fold(below, leaves=node.stop - node.start, add=torch.add)

def layout(count):
    return NodeLayout.of(leaves=count, world_size=world.size, virtual_ranks=virtual_ranks)

exchange = HostTreeAllReduce(
    world, HostGrid(world.size // per_host, per_host), numel, widest=layout(virtual_ranks), dtype=torch.float32
)
for count in (virtual_ranks, 1, virtual_ranks - 1, virtual_ranks // 2, virtual_ranks):
    exchange.start(step := layout(count))
    for row, node in zip(exchange.rows, step.nodes[world.rank]):
        row[:numel] = value(node, count)
    exchange.launch()
    total = exchange.finish(None)[:numel]
    expected = fold({Node(i, i + 1): leaves[i].clone() for i in range(count)}, leaves=count, add=torch.add)
    assert torch.equal(total, expected), (count, world.rank)
print("equal")
"""


@pytest.mark.parametrize(("hosts", "per_host", "virtual_ranks"), [(2, 2, 4), (3, 2, 11), (2, 3, 13)])
def test_the_sum_is_that_of_the_tree(fork_ranks, hosts, per_host, virtual_ranks):
    job = fork_ranks(hosts * per_host, SCRIPT, per_host, virtual_ranks)
    assert job.out.count("equal") == hosts * per_host
