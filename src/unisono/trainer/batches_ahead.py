"""The batches of an epoch whose lookups are known before they are made.

Where tables are in files, a batch is dealt after the rows that the next one looks up have been asked for: so it is read
one step before. The place of the run counts dealt batches, so nothing else changes: an error, in reading it or in the
user's function, is raised when the loop asks for the batch. Where rows are divided over ranks, those of a step are sent
at the end of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from unisono.arguments import function
from unisono.data.batch import Batch
from unisono.embedding.rows_ahead import RowsAhead
from unisono.embedding.tables import tables_in
from unisono.engine.row_exchange import RowExchange
from unisono.engine.row_requests import by_table

__all__ = ["BatchesAhead", "Lookups"]

_SOURCE = "what lookups returned"
Lookups = Callable[[Any], Mapping[str, Tensor]]
"""Returns the ids that a micro-batch will look up, by the name of the table."""


class BatchesAhead:
    """Reads rows for the batch after the present one, or says what both look up where rows are divided over ranks.

    Args:
        lookups: The user's function.
        modules: The models.
        exchange: Brings rows of tables that are divided over ranks; None without such tables.

    Raises:
        TypeError: It is no function.
        ValueError: The models have no tables.
    """

    def __init__(
        self, lookups: Lookups, modules: Mapping[str, nn.Module], *, exchange: RowExchange | None = None
    ) -> None:
        function("lookups", lookups, meant='give a function of a micro-batch, as lambda batch: {"item": batch[0]}')
        tables = tables_in(modules.values()).values()
        if not tables:
            raise ValueError("lookups= is for models with tables of unisono.embedding, and this one has none")
        self._lookups, self._rows, self._exchange = lookups, RowsAhead(tables), exchange

    def deal(self, batches: Iterator[Batch]) -> Generator[Batch, None, None]:
        """Yield batches, each after the next one is read and its rows are asked for, where that is of use."""
        if not self._rows.has_files and self._exchange is None:
            yield from batches
            return
        try:
            ahead = self._next(batches)
            while ahead is not None:
                if isinstance(ahead, Exception):
                    raise ahead
                (batch, ids), ahead = ahead, self._next(batches)
                if self._exchange is not None:
                    self._exchange.announce(ids)
                    self._exchange.announce_ahead(ahead[1] if isinstance(ahead, tuple) else None)
                yield batch
        finally:
            self._rows.end()

    def _next(self, batches: Iterator[Batch]) -> tuple[Batch, dict[int, Tensor]] | Exception | None:
        """Return the next batch with the ids that it looks up, by the number of the table where rows are divided.

        It is None after the last one, or what reading it has raised.
        """
        try:
            batch = next(batches, None)
            if batch is None:
                return None
            lookups = [self._lookups(each) for each in batch.micro_batches]
            if self._rows.has_files:
                self._rows.begin(lookups, source=_SOURCE)
            if self._exchange is None:
                return batch, {}
            named = [each for of_one in lookups for each in self._rows.named(of_one, source=_SOURCE)]
            return batch, by_table(self._exchange.tables, named)
        except Exception as error:  # of the user's dataset or function: it is raised when the loop asks for the batch
            return error
