"""Which samples a rank reads, and in which order."""

from unisono.data.rank_loader import RankLoader, loader
from unisono.data.sampler import DistributedSampler

__all__ = ["DistributedSampler", "RankLoader", "loader"]
