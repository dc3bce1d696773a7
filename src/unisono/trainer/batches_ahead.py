"""The batches of an epoch, each dealt after the rows that the next one looks up have been asked for.

So a batch is read one step before it is dealt. The place of the run counts dealt batches, so nothing else changes: an
error, in reading it or in the user's function, is raised when the loop asks for the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from unisono.arguments import function
from unisono.data.batch import Batch
from unisono.embedding.rows_ahead import RowsAhead
from unisono.embedding.tables import tables_in

__all__ = ["BatchesAhead", "Lookups"]

Lookups = Callable[[Any], Mapping[str, Tensor]]
"""Returns the ids that a micro-batch will look up, by the name of the table."""


class BatchesAhead:
    """Reads rows for the batch after the present one.

    Args:
        lookups: The user's function.
        modules: The models.

    Raises:
        TypeError: It is no function.
        ValueError: The models have no tables.
    """

    def __init__(self, lookups: Lookups, modules: Mapping[str, nn.Module]) -> None:
        function("lookups", lookups, meant='give a function of a micro-batch, as lambda batch: {"item": batch[0]}')
        tables = tables_in(modules.values()).values()
        if not tables:
            raise ValueError("lookups= is for models with tables of unisono.embedding, and this one has none")
        self._lookups, self._rows = lookups, RowsAhead(tables)

    def deal(self, batches: Iterator[Batch]) -> Generator[Batch, None, None]:
        """Yield batches, each after the next one is read and its rows are asked for."""
        if not self._rows.has_files:
            yield from batches
            return
        try:
            ahead = self._next(batches)
            while ahead is not None:
                if isinstance(ahead, Exception):
                    raise ahead
                batch, ahead = ahead, self._next(batches)
                yield batch
        finally:
            self._rows.end()

    def _next(self, batches: Iterator[Batch]) -> Batch | Exception | None:
        """Return the next batch, None after the last one, or what reading it has raised."""
        try:
            batch = next(batches, None)
            if batch is not None:
                self._rows.begin([self._lookups(each) for each in batch.micro_batches], source="what lookups returned")
        except Exception as error:  # of the user's dataset or function: it is raised when the loop asks for the batch
            return error
        return batch
