"""Pure functions that decide which rank computes what, and in which order."""

from unisono.plan.keys import derive_key, derive_keys
from unisono.plan.permutation import permute
from unisono.plan.shares import dealt, even_range, even_steps, num_dealt, num_steps, owner, rank_block
from unisono.plan.tree import Node, fold, merges_after, nodes_of

__all__ = [
    "Node",
    "dealt",
    "derive_key",
    "derive_keys",
    "even_range",
    "even_steps",
    "fold",
    "merges_after",
    "nodes_of",
    "num_dealt",
    "num_steps",
    "owner",
    "permute",
    "rank_block",
]
