"""An iterable dataset in shards: each virtual rank reads its own shard, so a rank reads only its part of the dataset.

The dataset has a method `shard(num_shards, index)`, as Hugging Face datasets do. Virtual rank v of V reads shard v of
V, whichever rank computes it, so bits do not depend on the number of ranks. An epoch ends where a shard has no sample
left for the next step. Only that shard's rank knows this, so ranks read ahead and exchange how many samples they have
for the next few steps. Start reading at `ShardLoader.batches`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count, islice
from typing import Any

from torch.utils.data import IterableDataset

from unisono.data.batch import Batch, Share
from unisono.data.dataset import read_ahead, stream_length
from unisono.data.loader_workers import warn_on_stderr
from unisono.data.map_loader import TrainerLoaderSettings
from unisono.data.stream_loader import read_share
from unisono.errors import DataError
from unisono.plan import num_dealt

__all__ = ["Counts", "ShardLoader", "Steps"]

Steps = list[list[Share]]
"""This rank's shares of some steps."""
Counts = list[Mapping[int, int]]
"""For each of some steps, the number of samples of each virtual rank of a rank."""

_MOST_AHEAD = 16
"""Steps for which ranks exchange numbers together: an exchange takes as long as some steps, and the steps memory."""


class ShardLoader:
    """This rank's part of every batch of an iterable dataset in shards.

    Args:
        dataset: The dataset.
        settings: The settings.
        exchange: Called as exchange(read, describe) on every rank. Returns the result of `read`, and the results of
            `describe` for it on all ranks; if `read` fails on one rank, all raise.
        tell: Called with a sentence about a slow worker.
    """

    num_samples = None
    """The number of samples in an epoch is not known."""
    steps = None
    """Neither is the number of steps."""

    def __init__(
        self,
        dataset: IterableDataset[Any],
        settings: TrainerLoaderSettings,
        *,
        exchange: Callable[[Callable[[], Steps], Callable[[Steps], Counts]], tuple[Steps, list[Counts]]],
        tell: Callable[[str], None] = warn_on_stderr,
    ) -> None:
        if not isinstance(dataset, IterableDataset) or not callable(getattr(dataset, "shard", None)):
            raise TypeError(
                f"sharded=True is for an IterableDataset with a method shard(num_shards, index), and "
                f"{type(dataset).__name__} is none: leave it out, and each rank reads what it needs of a map-style "
                "dataset, and all of an iterable one"
            )
        stream_length(dataset, settings)  # or an error
        self._settings, self._exchange, self._tell = settings, exchange, tell
        self._stream = _ShardStream(dataset, settings)

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that decide which samples are in which batch; see `LoaderSettings.identity`."""
        return {**self._settings.identity(None), "order": "shards"}

    def batches(self, *, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield this rank's part of each batch of an epoch, starting at `first_step`. Every rank must iterate.

        Raises:
            DataError: A shard yields nothing and `first_step` is 0, or a worker process has died.
            PeerError: Reading failed on another rank.
        """
        settings = self._settings
        self._stream.epoch, self._stream.first_step = epoch, first_step
        own = read_ahead(self._stream, settings, tell=self._tell)
        step, together = first_step, 1
        while True:
            steps, everyone = self._exchange(partial(_take, own, together), _counts)
            for number in range(together):
                counts = {v: n for theirs in everyone if number < len(theirs) for v, n in theirs[number].items()}
                ended = [v for v in range(settings.virtual_ranks) if not counts.get(v)]
                if ended and not step:
                    raise DataError(
                        f"shard {ended[0]} of {settings.virtual_ranks} of the iterable dataset yielded nothing in "
                        f"epoch {epoch}: it needs at least one sample in each of as many shards as virtual_ranks"
                    )
                size = sum(counts.values())
                if ended or (settings.drop_last and size < settings.batch_size):
                    return
                is_dealt = all(n == num_dealt(size, v, settings.virtual_ranks) for v, n in counts.items())
                yield Batch(epoch, step, size, steps[number], is_dealt)
                step += 1
            together = min(2 * together, _MOST_AHEAD)


class _ShardStream(IterableDataset[Any]):
    """Iterates over the shards of this rank's virtual ranks; yields their shares of a step."""

    def __init__(self, dataset: IterableDataset[Any], settings: TrainerLoaderSettings) -> None:
        self.dataset, self.settings = dataset, settings
        self.epoch = self.first_step = 0

    def __iter__(self) -> Iterator[list[Share]]:
        settings = self.settings
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        widths = {v: num_dealt(settings.batch_size, v, settings.virtual_ranks) for v in settings.block}
        shards = {v: self._samples(v, skipped=self.first_step * width) for v, width in widths.items()}
        for step in count(self.first_step):
            shares = []
            for virtual_rank, samples in shards.items():
                own = [*islice(samples, widths[virtual_rank])]
                if own:
                    # Numbered over all shards, as samples that are dealt in turn.
                    numbered = [(n * settings.virtual_ranks + virtual_rank, sample) for n, sample in own]
                    shares.append(read_share(settings, self.epoch, step, virtual_rank, numbered))
            yield shares
            if len(shares) < len(shards):
                return

    def _samples(self, virtual_rank: int, *, skipped: int) -> Iterator[tuple[int, Any]]:
        """Yield the samples of a shard after the first few, each with its position."""
        settings, dataset = self.settings, self.dataset
        settings.set_generators("shard", self.epoch, virtual_rank)
        shard = dataset.shard(num_shards=settings.virtual_ranks, index=virtual_rank)  # type: ignore[attr-defined]
        if shard is dataset and settings.virtual_ranks > 1:
            raise TypeError(
                f"{type(dataset).__name__}.shard returned the dataset itself: it must return a shard and leave the "
                "dataset as it is, since a rank reads several shards"
            )
        samples = settings.seeded(iter(shard), "shard/sample", self.epoch, virtual_rank)
        yield from islice(enumerate(samples), skipped, None)


def _take(steps: Iterator[list[Share]], number: int) -> Steps:
    return [*islice(steps, number)]


def _counts(steps: Steps) -> Counts:
    return [{s.virtual_rank: sum(len(m.indices) for m in s.micro_batches) for s in shares} for shares in steps]
