"""Pure functions that decide which rank computes what, and in which order."""

from unisono.plan.keys import derive_key, derive_keys
from unisono.plan.permutation import permute
from unisono.plan.shares import even_range, even_steps, num_steps, rank_block, share_positions, step_size
from unisono.plan.tree import Node, fold, merges_after, nodes_of

__all__ = [
    "Node",
    "derive_key",
    "derive_keys",
    "even_range",
    "even_steps",
    "fold",
    "merges_after",
    "nodes_of",
    "num_steps",
    "permute",
    "rank_block",
    "share_positions",
    "step_size",
]
