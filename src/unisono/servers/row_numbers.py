"""Numbers of whole rows, where each server has some columns: what `clip_row_norm` and row-wise rules make of a row.

Each server computes those of some rows and puts them beside the gradients, where all servers find them: the factor that
clips the row, and its new state. In a step with such numbers, a server
1. waits until all have applied the step before, as it reads the state, and with weight decay whole rows;
2. computes its part of the numbers. Nothing that they depend on is written before all servers have done that, so a
   server that is killed here is followed by one that computes the same;
3. waits until all have done so, and goes on with its columns. It also writes the state of the rows of which it has
   computed the numbers: a copy of these, which may be made twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from unisono.embedding.row_memory import RowStore
from unisono.embedding.row_optimizers import RowOptimizer, rows_per_chunk
from unisono.embedding.row_updates import change_columns, number_rows
from unisono.servers.hand_over import TableUpdate

__all__ = ["RowNumbers", "change_own_columns", "count_numbers"]


def count_numbers(rule: type[RowOptimizer]) -> int:
    """Return how many numbers of a row there may be: its factor, and its state."""
    return 1 + len(rule.per_row)


class RowNumbers(NamedTuple):
    """The numbers of a table's rows of which one server computes a part."""

    rule: type[RowOptimizer]
    weight: RowStore
    """Whole rows."""
    state: dict[str, RowStore]
    """What has a number for each row."""
    server: int
    servers: int

    def are_needed(self, update: TableUpdate) -> bool:
        """Return True if an update depends on whole rows."""
        return bool(self.state) or update.group["clip_row_norm"] is not None

    def compute(self, update: TableUpdate) -> None:
        """Compute this server's part of the numbers of an update."""
        assert update.numbers is not None
        group, part = update.group, self._part(update)
        chunk = rows_per_chunk(self.rule, self.weight.tensor.shape[1] * self.weight.tensor.element_size())
        for start in range(part.start, part.stop, chunk):
            entries = slice(start, min(start + chunk, part.stop))
            gradient, (factors, *states) = update.values[entries], update.numbers[:, entries]
            which = update.rows[entries]
            state = {
                key: store.read(which, out=out) for (key, store), out in zip(self.state.items(), states, strict=True)
            }
            needs_rows = bool(state) and group["weight_decay"] != 0
            rows = self.weight.read(which) if needs_rows else gradient
            number_rows(self.rule, rows, gradient, factors, state, group)

    def write_state(self, update: TableUpdate) -> None:
        """Write the state of the rows of which this server has computed the numbers."""
        assert update.numbers is not None
        part = self._part(update)
        for store, numbers in zip(self.state.values(), update.numbers[1:], strict=True):
            store.write(update.rows[part], numbers[part])

    def _part(self, update: TableUpdate) -> slice:
        count = len(update.rows)
        return slice(count * self.server // self.servers, count * (self.server + 1) // self.servers)


def change_own_columns(  # noqa: PLR0917  as `change_columns`
    rule: type[RowOptimizer],
    columns: slice,
    rows: Tensor,
    update: TableUpdate,
    entries: slice,
    state: Mapping[str, Tensor],
) -> None:
    """Change columns of rows in place, as `change_rows` does whole rows.

    Args:
        rule: How rows are updated.
        columns: The columns.
        rows: Copies of these columns of the table, [k, columns].
        update: The update.
        entries: The rows, by number in the update.
        state: Copies of the state that has a number for each element, [k, columns].
    """
    numbers = update.numbers
    assert numbers is not None
    gradient, (factors, *states) = update.values[entries, columns], numbers[:, entries]
    known = {**state, **dict(zip(rule.per_row, states, strict=True))}
    change_columns(rule, rows, gradient, factors, known, update.group, update.step)
