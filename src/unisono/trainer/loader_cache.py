"""The loaders of a run: its training and test sets, divided into batches for this rank.

A loader is kept between epochs, so that worker processes start only once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from unisono.arguments import flag
from unisono.collectives.construction import construct_on_all
from unisono.collectives.group import known_group
from unisono.data.joined_loader import JoinedLoader
from unisono.data.map_loader import MapLoader, TrainerLoaderSettings
from unisono.data.reading_ranks import check_data_of_ranks
from unisono.data.sampled_loader import SampledLoader
from unisono.data.sampled_order import draw_order
from unisono.data.shard_loader import Counts, ShardLoader, Steps
from unisono.data.stream_loader import StreamLoader
from unisono.plan import derive_key
from unisono.trainer.order_comparison import agree_on_order
from unisono.trainer.run_context import RunContext

__all__ = ["Loader", "LoaderCache"]

Loader = MapLoader | StreamLoader | ShardLoader

# A script that makes a new dataset each epoch must not keep all of them alive.
_KEPT_LOADERS = 4


class LoaderCache:
    """Makes and keeps the loaders of one run.

    Args:
        run: The constants of the run.
        tell: Called with a sentence about a worker that is slow.
        compare: Called with the name of a call before ranks exchange anything, to detect ranks that make a different
            call.
    """

    def __init__(self, run: RunContext, tell: Callable[[str], None], compare: Callable[[str], None]) -> None:
        self._run, self._tell, self._compare = run, tell, compare
        self._loaders: dict[tuple[int, int | None, bool, TrainerLoaderSettings], Loader] = {}

    def loader(
        self,
        dataset: Any,
        *,
        shuffle: bool | None,
        sharded: bool = False,
        keep: bool = True,
        seed: int | None = None,
        **settings: Any,
    ) -> Loader:
        """Return the loader of a dataset. Every rank must call it: a new dataset is compared between ranks.

        Args:
            dataset: The dataset.
            shuffle: None: True for a map-style dataset and False for an iterable one.
            sharded: True to read an iterable dataset in shards.
            seed: The seed of the order and of random numbers. None: the run's.
            keep: False makes a loader that nothing else reads from, also in the middle of its epoch.
            settings: Further fields of TrainerLoaderSettings.

        Raises:
            TypeError, ValueError, DataError, RankMismatchError: See `Trainer.batches`.
        """
        stream = isinstance(dataset, IterableDataset)
        full = TrainerLoaderSettings(
            virtual_ranks=self._run.virtual_ranks,
            seed=self._run.seed if seed is None else seed,
            block=self._run.block,
            pin_memory=self._run.device.type == "cuda",
            shuffle=not stream if shuffle is None else shuffle,
            **settings,
        )
        if sharded and self._run.is_cut:
            raise ValueError(
                "sharded=True divides a dataset among ranks, and with parallel= several ranks compute the same "
                "samples: leave out one of the two"
            )
        # The loader keeps the dataset alive, so its id belongs to no other while the entry is here. It may have grown.
        length = len(dataset) if hasattr(dataset, "__len__") and not isinstance(dataset, type) else None
        key = (id(dataset), length, flag("sharded", sharded), full)
        if not keep or key not in self._loaders:
            loader: Loader
            if sharded:
                loader = ShardLoader(dataset, full, exchange=self._exchange, tell=self._tell)
            elif stream:
                loader = StreamLoader(dataset, full, tell=self._tell)
            else:
                loader = MapLoader(dataset, full, tell=self._tell, noting=self._run.noting)
            own = {"order": None, **loader.identity, "micro_batch_size": full.micro_batch_size}
            check_data_of_ranks(self._run.world.gather(own, "Trainer comparing data"))
            if not keep:
                return loader
            self._loaders[key] = loader
            if len(self._loaders) > _KEPT_LOADERS:
                del self._loaders[next(iter(self._loaders))]
        return self._loaders[key]

    def forget(self) -> None:
        """Make each loader anew when it is asked for: ranks compare new ones, and a new rank has none."""
        self._loaders.clear()

    def _exchange(self, read: Callable[[], Steps], describe: Callable[[Steps], Counts]) -> tuple[Steps, list[Counts]]:
        """Read the next steps of this rank's shards, and tell all ranks the numbers of samples."""
        if self._run.world.group is None:
            steps = read()
            return steps, [describe(steps)]
        self._compare("reading shards of a dataset")
        # The dataset is the user's: it may raise anything.
        group = known_group(self._run.world.group)
        return construct_on_all(group, "Trainer reading shards", read, describe, errors=(Exception,))

    def joined(
        self, datasets: Any, *, sizes: Mapping[str, int], drop_last: bool, batch_size: Any, **settings: Any
    ) -> JoinedLoader:
        """Return the loader of several datasets, of which the first one leads. Every rank must call it.

        Args:
            datasets: The datasets by name, which `check_joined` has checked.
            sizes: Their batch sizes, in the same order.
            drop_last: True to leave out the last batch of the first dataset if it is smaller.
            batch_size: Not used.
            settings: Further arguments of `loader`.

        Raises:
            TypeError, ValueError, DataError, RankMismatchError: See `Trainer.batches`.
        """
        del batch_size
        loaders = {}
        for number, (name, size) in enumerate(sizes.items()):
            # Datasets of one length would otherwise have one order.
            seed = derive_key(self._run.seed, "dataset", number) if number else None
            last = drop_last if not number else True
            loader = self.loader(datasets[name], batch_size=size, drop_last=last, seed=seed, **settings)
            assert isinstance(loader, MapLoader)
            loaders[name] = loader
        return JoinedLoader(loaders)

    def sampled(
        self,
        dataset: Any,
        samplers: tuple[Any, Any],
        *,
        epoch: int,
        batch_size: int | None,
        drop_last: bool,
        **settings: Any,
    ) -> SampledLoader:
        """Return the loader of one epoch in the order of a sampler. Every rank must call it: orders are compared.

        Args:
            dataset: The dataset.
            samplers: A sampler and a batch sampler, one of which is None.
            epoch: The epoch.
            batch_size: Samples of a global batch; None for a batch sampler.
            drop_last: True to leave out the last batch if it is smaller.
            settings: Further fields of TrainerLoaderSettings.

        Raises:
            TypeError, ValueError, DataError, RankMismatchError: See `Trainer.batches`.
            PeerError: Another rank's sampler failed.
        """
        if isinstance(dataset, IterableDataset):
            raise TypeError(
                f"{type(dataset).__name__} is an iterable dataset, whose samples have no indices: leave the sampler "
                "out, or give a dataset with __len__ and __getitem__"
            )
        size = self._run.virtual_ranks if batch_size is None else batch_size
        loader = self.loader(dataset, shuffle=False, batch_size=size, drop_last=False, **settings)
        assert isinstance(loader, MapLoader)
        order = agree_on_order(
            self._run.world,
            lambda: draw_order(
                *samplers,
                settings=loader.settings,
                epoch=epoch,
                num_samples=loader.length,
                batch_size=batch_size,
                drop_last=drop_last,
            ),
        )
        return SampledLoader(loader, order, batch_size=batch_size, drop_last=drop_last)
