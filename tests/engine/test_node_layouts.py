"""Which rank has which nodes: every leaf has one owner, on any number of ranks."""

from __future__ import annotations

import random

import pytest

from unisono.engine.tree_all_reduce import NodeLayouts
from unisono.plan import fold


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_each_leaf_belongs_to_one_node_of_one_rank(seed, in_turn):
    rng = random.Random(seed)
    virtual_ranks = rng.randint(1, 40)
    layouts = NodeLayouts(rng.randint(1, virtual_ranks), virtual_ranks=virtual_ranks, in_turn=in_turn)
    for leaves in {1, virtual_ranks, rng.randint(1, virtual_ranks)}:
        layout = layouts.of(leaves)
        assert layouts.of(leaves) is layout
        nodes = [node for of_rank in layout.nodes for node in of_rank]
        if in_turn:
            nodes.sort()
        assert [leaf for node in nodes for leaf in range(node.start, node.stop)] == [*range(leaves)]
        total = fold({node: range(*node) for node in nodes}, leaves=leaves, add=lambda a, b: range(a.start, b.stop))
        assert total == range(leaves)


def test_the_widest_layout_has_the_most_nodes_on_every_rank():
    layouts = NodeLayouts(3, virtual_ranks=11)
    for leaves in range(1, 12):
        for few, most in zip(layouts.of(leaves).nodes, layouts.widest.nodes, strict=True):
            assert len(few) <= len(most)
