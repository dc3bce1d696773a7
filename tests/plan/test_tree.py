import gc
import itertools
import weakref

import pytest

from unisono.plan import Node, fold, merges_after, nodes_of, rank_block


def join(left: str, right: str) -> str:
    """Add in symbols, so that two sums are equal only if they were added in the same order."""
    return f"({left} {right})"


def whole(leaves: int) -> str:
    return fold({Node(leaf, leaf + 1): str(leaf) for leaf in range(leaves)}, leaves=leaves, add=join)


def sum_in_order(node: Node) -> tuple[str, int]:
    """Sum a node's leaves as they come, as a rank does; also say how many values were held at most."""
    stack, held = [], 0
    for leaf in range(node.start, node.stop):
        stack.append(str(leaf))
        held = max(held, len(stack))
        for _ in range(merges_after(leaf, node)):
            right = stack.pop()
            stack.append(join(stack.pop(), right))
    (value,) = stack
    return value, held


def test_the_tree_is_pairwise():
    assert [whole(leaves) for leaves in range(1, 6)] == [
        "0",
        "(0 1)",
        "((0 1) 2)",
        "((0 1) (2 3))",
        "(((0 1) (2 3)) 4)",
    ]


@pytest.mark.parametrize("leaves", range(1, 70))
def test_any_number_of_ranks_adds_in_the_same_order(leaves):
    expected = whole(leaves)
    for world_size in range(1, leaves + 1):
        values = {}
        for rank in range(world_size):
            for node in nodes_of(rank_block(rank, world_size=world_size, virtual_ranks=leaves), leaves=leaves):
                values[node] = sum_in_order(node)[0]
        assert fold(values, leaves=leaves, add=join) == expected


@pytest.mark.parametrize("virtual_ranks", range(1, 18))
def test_a_short_step_without_its_last_leaves_adds_in_the_same_order(virtual_ranks):
    # The last step of an epoch may have fewer samples than there are virtual ranks; then the last ones have no leaf.
    for leaves in range(1, virtual_ranks + 1):
        for world_size in range(1, virtual_ranks + 1):
            blocks = [
                rank_block(rank, world_size=world_size, virtual_ranks=virtual_ranks) for rank in range(world_size)
            ]
            values = {node: sum_in_order(node)[0] for block in blocks for node in nodes_of(block, leaves=leaves)}
            assert fold(values, leaves=leaves, add=join) == whole(leaves)


@pytest.mark.parametrize("leaves", range(1, 34))
def test_any_block_is_few_whole_nodes_in_order(leaves):
    for start in range(leaves):
        for stop in range(start, leaves + 3):
            nodes = nodes_of(range(start, stop), leaves=leaves)
            covered = [leaf for node in nodes for leaf in range(node.start, node.stop)]
            assert covered == list(range(start, min(stop, leaves)))
            assert len(nodes) <= 2 * leaves.bit_length()
            # As large as can be: no two neighbours are the halves of one node.
            for left, right in itertools.pairwise(nodes):
                assert nodes_of(range(left.start, right.stop), leaves=leaves) == [left, right]


def test_the_whole_tree_is_one_node():
    assert all(nodes_of(range(leaves), leaves=leaves) == [Node(0, leaves)] for leaves in range(1, 200))


@pytest.mark.parametrize("leaves", range(1, 70))
def test_leaves_in_order_need_a_small_stack(leaves):
    for start in range(leaves):
        for node in nodes_of(range(start, leaves), leaves=leaves):
            value, held = sum_in_order(node)
            inside = {Node(leaf, leaf + 1): str(leaf) for leaf in range(node.start, node.stop)}
            outside = {Node(leaf, leaf + 1): str(leaf) for leaf in range(leaves) if not node.start <= leaf < node.stop}
            assert fold({**outside, node: value}, leaves=leaves, add=join) == whole(leaves)
            assert held <= (len(inside) - 1).bit_length() + 1


def test_fold_uses_each_value_once_and_may_work_in_place():
    used = []

    def add(left, right):
        used.extend((id(left), id(right)))
        left.extend(right)
        return left

    values = {Node(leaf, leaf + 1): [leaf] for leaf in range(11)}
    assert fold(values, leaves=11, add=add) == list(range(11))
    assert len(used) == 2 * 10


def test_values_are_let_go_without_a_garbage_collection():
    values = {Node(leaf, leaf + 1): {leaf} for leaf in range(3)}
    first = weakref.ref(values[Node(0, 1)])
    gc.disable()
    try:
        fold(values, leaves=3, add=lambda left, right: left | right)
        del values
        assert first() is None
    finally:
        gc.enable()


def test_a_leaf_that_no_node_covers_is_named():
    with pytest.raises(ValueError, match="no given node covers leaf 3 of 5"):
        fold({Node(0, 2): "a", Node(2, 3): "b", Node(4, 5): "c"}, leaves=5, add=join)


@pytest.mark.parametrize("leaves", [0, -1])
def test_a_tree_without_leaves_is_refused(leaves):
    with pytest.raises(ValueError, match=f"leaves={leaves}: a tree has at least one leaf"):
        fold({}, leaves=leaves, add=join)
