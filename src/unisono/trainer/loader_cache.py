"""Loaders of a run: the training and test sets that a trainer was given, made ready to deal out.

A loader is kept between epochs, so that worker processes are started once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import IterableDataset

from unisono.arguments import flag, whole
from unisono.data.fetch import check_collate
from unisono.data.map_loader import MapLoader, TrainerLoaderSettings
from unisono.data.stream_loader import StreamLoader
from unisono.trainer.run_context import RunContext
from unisono.trainer.setup import check_equal_data

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
            LoaderSettings.
        """
        settings["workers"] = whole("workers", settings["workers"])
        if settings["micro_batch_size"] is not None:
            settings["micro_batch_size"] = whole("micro_batch_size", settings["micro_batch_size"])
        flag("drop_last", settings["drop_last"])
        if shuffle is not None:
            flag("shuffle", shuffle)
        check_collate(settings["collate_fn"])
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
            check_equal_data(self._run.world, loader.num_samples, full)
            self._loaders[key] = loader
            if len(self._loaders) > _KEPT_LOADERS:
                del self._loaders[next(iter(self._loaders))]
        return self._loaders[key]
