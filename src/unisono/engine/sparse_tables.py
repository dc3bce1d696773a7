"""Gradients of tables of which a step uses only some rows, as nn.Embedding(sparse=True) makes them.

Such a gradient is stored as row indices and values (a coalesced COO tensor), so that it takes no memory for the rest of
the table. Sums follow the plan's tree; a row that only one side has is kept as it is. Each rank sums its leaves, and
the sums of all come to all ranks (`engine.all_gather_v`): in shared memory, where each rank reads what it needs, or in
a message. Each rank finishes the tree separately, for all rows of a table or for those that it updates. Of a table
whose rows are divided over ranks, each gets the sums of its own rows alone. In a dynamic one, nobody knows which rank
will have the row of a new id, so its sums go to all, and so do the ids that change the map from ids to rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from unisono.embedding.located_rows import LocatedRows
from unisono.embedding.row_map import RowMap
from unisono.embedding.row_owners import RowOwners, range_by_sample
from unisono.embedding.row_sums import SummedRows, add_row_gradients, row_gradient, rows_of
from unisono.embedding.table_optimizer import TableOptimizer
from unisono.engine.all_gather_v import AllGatherV, GroupAllToAllV, MessageReader
from unisono.engine.base import Trained
from unisono.engine.joint_optimizer import parts_of, trained_by
from unisono.engine.node_sums import Gradients, NodeSum, take
from unisono.engine.row_dealing import by_rank, by_rank_and_news, counted_by
from unisono.engine.step_transaction import StepTransaction
from unisono.engine.tree_all_reduce import NodeLayout
from unisono.errors import LossError
from unisono.plan import Node, fold

__all__ = ["TableSums", "check_optimizers", "maps_of", "owners_of", "split_sparse"]

_WITHOUT: dict[type[Optimizer], tuple[str, ...]] = {
    optim.SparseAdam: (),
    optim.SGD: ("momentum", "weight_decay", "fused"),
    optim.Adagrad: ("weight_decay", "fused"),
}
"""The optimizers of torch that accept sparse gradients, and the options with which they do not."""
_Sums = list[SummedRows | None]
"""The sums of a node, by table."""


def split_sparse(trained: Trained, modules: Iterable[nn.Module]) -> tuple[Trained, Trained]:
    """Split parameters into those with dense gradients and those that a module of torch with sparse=True holds."""
    tables = {
        id(module._parameters.get("weight"))
        for root in modules
        for module in root.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    parts: tuple[list[int], list[int]] = ([], [])
    for i, p in enumerate(trained.parameters):
        parts[id(p) in tables].append(i)
    dense, sparse = (Trained(*(tuple(of_all[i] for i in part) for of_all in trained)) for part in parts)  # type: ignore[arg-type]
    return dense, sparse


def check_optimizers(optimizer: Optimizer, dense: Trained, sparse: Trained) -> None:
    """Raise ValueError if one of torch's optimizers would refuse its gradients in the middle of an update."""
    for part in parts_of(optimizer):
        if type(part) is not TableOptimizer:  # which refuses none, and has no other parameters
            _check(part, dense, sparse)


def _check(optimizer: Optimizer, dense: Trained, sparse: Trained) -> None:
    kind = type(optimizer)
    if kind is optim.SparseAdam and (names := trained_by(optimizer, dense).names):
        raise ValueError(
            f"SparseAdam takes sparse gradients only, and that of {names[0]!r} is dense: only modules with "
            "sparse=True give sparse ones. Give other parameters an optimizer of their own: Trainer takes several."
        )
    tables = set(map(id, sparse.parameters))
    groups = [group for group in optimizer.param_groups if not tables.isdisjoint(map(id, group["params"]))]
    if not groups:
        return
    obstacle = None
    if kind in _WITHOUT:
        obstacle = next((f"{key}={g[key]}" for g in groups for key in _WITHOUT[kind] if g.get(key)), None)
    if obstacle or (kind not in _WITHOUT and getattr(optim, kind.__name__, None) is kind):
        what = kind.__name__ + (f" with {obstacle}" if obstacle else "")
        raise ValueError(
            f"{what} takes no sparse gradients, and that of {trained_by(optimizer, sparse).names[0]!r} is sparse, "
            "since its module was made with sparse=True. Give it SparseAdam, or SGD or Adagrad without momentum and "
            "weight decay, and other parameters an optimizer of their own; or build the module with sparse=False."
        )


def maps_of(optimizer: Optimizer, tables: Trained) -> dict[int, LocatedRows]:
    """Return the rows of the dynamic tables among some tables, by number among these."""
    maps = {
        p: rows for part in parts_of(optimizer) if isinstance(part, TableOptimizer) for p, rows in part.maps.items()
    }
    return {i: maps[p] for i, p in enumerate(tables.parameters) if p in maps}


def owners_of(maps: Mapping[int, LocatedRows]) -> dict[int, RowOwners]:
    """Return the owners of rows that are divided over ranks, by number."""
    return {k: rows.owners for k, rows in maps.items() if rows.owners is not None}


class TableSums:
    """The sums of sparse gradients over a step, for one engine.

    The calls of a step are `begin`, `close_leaf` for each leaf of this rank, `post`, `collect`, and `complete`, or
    `share` where ranks divide the rows of a table.

    Args:
        tables: The parameters with sparse gradients.
        rank: This rank.
        all_gather: Exchanges the sums of ranks; None with one rank.
        divided: The numbers of the tables whose sums `collect` leaves to `complete` or `share`.
        maps: The rows of dynamic tables, by number. Ids take the place of rows in their sums.
        all_to_all: Takes the place of `all_gather` where rows of tables are divided over ranks.
    """

    def __init__(
        self,
        tables: Trained,
        *,
        rank: int = 0,
        all_gather: AllGatherV | None = None,
        divided: Collection[int] = (),
        maps: Mapping[int, LocatedRows] | None = None,
        all_to_all: GroupAllToAllV | None = None,
    ) -> None:
        self.tables, self.divided, self._maps = tables, frozenset(divided), maps or {}
        self._owners, self._all_to_all = owners_of(self._maps), all_to_all
        self._divided_maps = {
            k: rows for k, rows in self._maps.items() if k in self._owners and isinstance(rows, RowMap)
        }
        """The maps of dynamic tables whose rows are divided over ranks."""
        self.exist = bool(tables.names)
        """False if there is no table. The calls of a step then do nothing, and may be left out."""
        self.totals: Gradients = []
        """The gradient of each table, once it is complete. It is also p.grad, and lies in this process's memory."""
        self.used: list[bool] = []
        """For each table, True if it got a gradient on any rank."""
        self.is_whole_wanted = False
        """True, on all ranks, if one wants the whole gradient of divided tables in this step."""
        self.entries: list[int] = []
        """For each table, the number of rows in the sums that ranks have sent: no rank has more in its share."""
        self._rank, self._all_gather = rank, all_gather
        self._layout = NodeLayout((), 0)
        self._sums: list[NodeSum[_Sums]] = []
        self._parts: list[dict[Node, SummedRows]] = []
        """For each table, the sums of nodes whose total has not been computed."""

    def begin(self, layout: NodeLayout) -> None:
        """Begin a step."""
        self._layout, self.totals, self.used, self._parts, self.is_whole_wanted = layout, [], [], [], False
        if self.tables.names:
            self._sums = [NodeSum(node, add=self._add) for node in layout.nodes[self._rank]]

    def close_leaf(self, leaf: int) -> None:
        """Add the gradients of one leaf.

        Raises:
            LossError: If a gradient is not sparse.
        """
        if self.tables.names:
            total = next(total for total in self._sums if leaf < total.node.stop)
            gradients = take(self.tables.parameters)
            total.push(leaf, [_coalesced(*each) for each in zip(self.tables.names, gradients, strict=True)])

    def post(self, *, wants_whole: bool = False) -> None:
        """Send this rank's sums. Every rank must call it, after its leaves.

        Args:
            wants_whole: True if this rank needs the whole gradient of divided tables; see `assemble`.
        """
        if not self.tables.names:
            return
        own = [summed for total in self._sums for summed in total.total()]
        if self._all_to_all is not None:
            wants = torch.tensor([int(wants_whole)])
            messages = self._divided_messages(own, ranks=len(self._layout.nodes))
            self._all_to_all.post([[wants, *parts] for parts in messages])
        elif self._all_gather is not None:
            self._all_gather.post(self._message(own))

    @staticmethod
    def _message(own: _Sums) -> list[Tensor]:
        parts = [torch.tensor([-1 if summed is None else len(summed.rows) for summed in own], dtype=torch.int64)]
        for summed in own:
            if summed is not None:
                parts += [summed.rows, summed.values.reshape(-1)]
        return parts

    def _divided_messages(self, own: _Sums, *, ranks: int) -> list[list[Tensor]]:
        """Return the message to each rank: of divided tables, with its rows alone.

        The ids that change the maps of dynamic tables come last.
        """
        of_ranks: list[_Sums] = [[] for _ in range(ranks)]
        announced: dict[int, list[Tensor]] = {k: [] for k in self._divided_maps}
        for number, summed in enumerate(own):
            k = number % len(self.tables.names)
            if summed is None or k not in self._owners:
                parts: Iterable[SummedRows | None] = [summed] * ranks
            elif k in self._divided_maps:
                parts, noted = by_rank_and_news(summed, self._divided_maps[k], self._owners[k], ranks)
                announced[k].append(noted)
            else:
                parts = by_rank(summed, self._owners[k], ranks)
            for of_rank, part in zip(of_ranks, parts, strict=True):
                of_rank.append(part)
        lists = [torch.cat(ids or [torch.empty(0, dtype=torch.int64)]) for ids in announced.values()]
        ids = [torch.tensor([*map(len, lists)], dtype=torch.int64), *lists] if lists else []
        return [self._message(of_rank) + ids for of_rank in of_ranks]

    def collect(self, step: StepTransaction) -> None:
        """Receive the sums of all ranks, and complete those of tables that are not divided.

        Every rank must call it, after `post`.
        """
        if not self.tables.names:
            return
        exchange = self._all_gather if self._all_to_all is None else self._all_to_all
        found: dict[Node, _Sums] = {}
        announced: list[list[Tensor]] = [[] for _ in self._divided_maps]
        messages: Sequence[Tensor | None] = [None] if exchange is None else exchange.collect(step)
        for rank, (nodes, message) in enumerate(zip(self._layout.nodes, messages, strict=True)):
            if message is None or (rank == self._rank and self._all_to_all is None):  # it need not be read again
                found.update((own.node, own.total()) for own in self._sums)
                continue
            reader = MessageReader(message)
            if self._all_to_all is not None and reader.next(torch.int64, 1).item():
                self.is_whole_wanted = True
            found.update(self._read(reader, nodes, message.device))
            if announced:
                for ids, count in zip(announced, reader.next(torch.int64, len(announced)).tolist(), strict=True):
                    ids.append(reader.next(torch.int64, count))
        self._sums = []
        for rows, ids in zip(self._divided_maps.values(), announced, strict=True):
            rows.announced = ids
        tables = range(len(self.tables.names))
        self._parts = [
            {node: summed for node, sums in found.items() if (summed := sums[k]) is not None} for k in tables
        ]
        self.used = [bool(parts) for parts in self._parts]
        self.entries = [sum(len(summed.rows) for summed in parts.values()) for parts in self._parts]
        self.totals = [None] * len(tables)
        for k in tables:
            if k not in self.divided:
                self._complete(k)

    def check_room(self) -> None:
        """Raise TableFullError, on all ranks, if a dynamic table has no rows for new ids. Call it after `collect`."""
        for k, rows in self._maps.items():
            rows.check_room(self.rows(k))

    def rows(self, table: int) -> list[Tensor]:
        """Return the rows of a table in this step's sums, or the ids of a dynamic one. They may be repeated."""
        total = self.totals[table]
        if table in self._divided_maps and (announced := self._divided_maps[table].announced) is not None:
            return [*announced]
        if total is None:
            return [summed.rows for summed in self._parts[table].values()]
        return [rows_of(total).rows] if total.is_sparse else []

    def complete(self, factor: float) -> None:
        """Compute the sums that `collect` has left, on this rank as on the others, and multiply them."""
        for k in self.divided:
            self._complete(k)
        if factor != 1.0 and (totals := [total for k in self.divided if (total := self.totals[k]) is not None]):
            torch._foreach_mul_([total._values() for total in totals], factor)

    def assemble(self, step: StepTransaction) -> None:
        """Bring the sums of divided tables together, so that p.grad is the whole on all ranks. Every rank must call it.

        Traffic: an all-gather of the rows of this step.
        """
        divided = [k for k in self._owners if self.totals[k] is not None]
        if not divided or self._all_gather is None:
            return
        own: _Sums = [None] * len(self.tables.names)
        for k in divided:
            total = self.totals[k]
            assert total is not None
            own[k] = counted_by(self._rank, rows_of(total), self._maps[k], self._owners[k])
            if k in self._divided_maps:
                self._divided_maps[k].announced = None  # p.grad has all ids
        self._all_gather.post(self._message(own))
        whole = Node(0, self._layout.leaves)
        found = [
            sums
            for message in self._all_gather.collect(step)
            for _, sums in self._read(MessageReader(message), [whole], message.device)
        ]
        for k in divided:
            p, of_ranks = self.tables.parameters[k], [each for sums in found if (each := sums[k]) is not None]
            rows, order = torch.sort(torch.cat([each.rows for each in of_ranks]))
            values = torch.cat([each.values for each in of_ranks])[order]
            self.totals[k] = p.grad = row_gradient(SummedRows(rows, values), p.shape)

    def share(self, table: int, *, ranks: int) -> Tensor | None:
        """Return the gradient of those rows of a table that this rank updates in this step; None without any gradient.

        The rows are divided anew in each step, by ranges with about equally many entries. All ranks find the same ones.
        It is called at most once for a table, after `collect` or `complete`.
        """
        p, total = self.tables.parameters[table], self.totals[table]
        if not self.used[table] or (total is not None and not total.is_sparse):  # the optimizer refuses that one
            return total
        parts = {Node(0, self._layout.leaves): rows_of(total)} if total is not None else self._parts[table]
        bounds = range_by_sample((self._rank - table) % ranks, ranks, [summed.rows for summed in parts.values()])
        if bounds is None:
            nothing = SummedRows(torch.empty(0, dtype=torch.int64, device=p.device), p.detach()[:0])
            return row_gradient(nothing, p.shape)
        own = {node: summed.within(*bounds) for node, summed in parts.items()}
        return row_gradient(self._fold(own, p.shape), p.shape)

    def scale(self, factor: float) -> None:
        """Multiply the sums that are complete."""
        if factor != 1.0 and (vectors := self.vectors()):
            torch._foreach_mul_(vectors, factor)

    def take_changed(self) -> None:
        """Replace the sums by the present p.grad."""
        self.totals = [p.grad for p in self.tables.parameters]
        self.used = [total is not None for total in self.totals]

    def vectors(self) -> list[Tensor]:
        """Return the values of each complete gradient's rows as one vector, a view to be read or written."""
        return [total._values().view(-1) for total in self.totals if total is not None]

    def _complete(self, table: int) -> None:
        p = self.tables.parameters[table]
        if self._parts[table]:
            self.totals[table] = row_gradient(self._fold(self._parts[table], p.shape), p.shape)
        p.grad = self.totals[table]

    def _fold(self, parts: Mapping[Node, SummedRows], shape: torch.Size) -> SummedRows:
        """Return the sum of nodes, in memory of this process."""
        if len(parts) == 1:
            ((rows, values),) = parts.values()
            if self._all_gather is None and self._all_to_all is None:
                return SummedRows(rows, values)
            return SummedRows(rows.clone(), values.clone())  # they still lie in a message
        nodes = [node for of_rank in self._layout.nodes for node in of_rank]

        def add(left: _Sums, right: _Sums) -> _Sums:
            return [_add_tables(left[0], right[0], shape)]

        (total,) = fold({node: [parts.get(node)] for node in nodes}, leaves=self._layout.leaves, add=add)
        assert total is not None
        return total

    def _add(self, left: _Sums, right: _Sums) -> _Sums:
        """Return the sum of two lists of sums, entry by entry."""
        shapes = [p.shape for p in self.tables.parameters]
        return [_add_tables(*each) for each in zip(left, right, shapes, strict=True)]

    def _read(self, reader: MessageReader, nodes: Sequence[Node], device: torch.device) -> list[tuple[Node, _Sums]]:
        """Return a rank's sums by node, as views of its message where devices are the same."""
        tables = self.tables.parameters
        left = iter(reader.next(torch.int64, len(nodes) * len(tables)).tolist())
        found: list[tuple[Node, _Sums]] = []
        for node in nodes:
            sums: _Sums = []
            for p in tables:
                count = next(left)
                if count < 0:
                    sums.append(None)
                    continue
                indices = reader.next(torch.int64, count)
                values = reader.next(p.dtype, count * p.shape[1:].numel()).view(count, *p.shape[1:])
                if p.device != device:
                    indices, values = indices.to(p.device), values.to(p.device)
                sums.append(SummedRows(indices, values))
            found.append((node, sums))
        return found


def _coalesced(name: str, gradient: Tensor | None) -> SummedRows | None:
    """Return a leaf's gradient with the values of repeated rows added up."""
    if gradient is None:
        return None
    if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
        raise LossError(
            f"parameter {name!r} of shape {list(gradient.shape)} belongs to a module with sparse=True, but its "
            f"gradient is not one of rows ({gradient.layout}): something else uses the parameter, too, as with tied "
            "weights. Build the module with sparse=False and use a dense optimizer, or do not tie the weights."
        )
    gradient = gradient.detach()
    rows, values = rows_of(gradient)
    if values.untyped_storage().data_ptr() == gradient._values().untyped_storage().data_ptr():
        # Nothing was added up, and the values may share memory with other gradients, or be expanded.
        values = values.clone(memory_format=torch.contiguous_format)
    return SummedRows(rows, values)


def _add_tables(left: SummedRows | None, right: SummedRows | None, shape: torch.Size) -> SummedRows | None:
    if left is None or right is None:
        return right if left is None else left
    return add_row_gradients(left, right, shape)
