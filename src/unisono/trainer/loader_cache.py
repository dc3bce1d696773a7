"""Loaders of a run: the training and test sets that a trainer was given, made ready to deal out.

A loader is kept between epochs, so that worker processes are started once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import IterableDataset

from unisono.data.map_loader import MapLoader, TrainerLoaderSettings
from unisono.data.position import check_same_data
from unisono.data.stream_loader import StreamLoader
from unisono.trainer.run_context import RunContext

__all__ = ["LoaderCache"]

# A script that makes a new dataset each epoch must not keep all of them alive.
_KEPT_LOADERS = 4


class LoaderCache:
    """Makes and keeps the loaders of one run.

    Args:
        run: its constants.
        tell: gets a sentence about a worker that is slow.
    """

    def __init__(self, run: RunContext, tell: Callable[[str], None]) -> None:
        self._run, self._tell = run, tell
        self._loaders: dict[tuple[int, int | None, TrainerLoaderSettings], MapLoader | StreamLoader] = {}

    def loader(self, dataset: Any, *, shuffle: bool | None, **settings: Any) -> MapLoader | StreamLoader:
        """Give the loader of a dataset; a new one is compared between ranks, so every rank must call it.

        Args: shuffle None means yes for a map-style dataset and no for an iterable one; settings are further fields of
            TrainerLoaderSettings.
        """
        stream = isinstance(dataset, IterableDataset)
        full = TrainerLoaderSettings(
            virtual_ranks=self._run.virtual_ranks,
            seed=self._run.seed,
            block=self._run.block,
            pin_memory=self._run.device.type == "cuda",
            shuffle=not stream if shuffle is None else shuffle,
            **settings,
        )
        # The loader keeps the dataset alive, so its id belongs to no other while the entry is here. It may have grown.
        length = len(dataset) if hasattr(dataset, "__len__") and not isinstance(dataset, type) else None
        key = (id(dataset), length, full)
        if key not in self._loaders:
            loader = (
                StreamLoader(dataset, full, tell=self._tell) if stream else MapLoader(dataset, full, tell=self._tell)
            )
            own = {**loader.identity, "micro_batch_size": full.micro_batch_size}
            check_same_data(self._run.world.gather(own, "Trainer comparing data"))
            self._loaders[key] = loader
            if len(self._loaders) > _KEPT_LOADERS:
                del self._loaders[next(iter(self._loaders))]
        return self._loaders[key]
