"""Gradients of tables of which a step uses only some rows, as nn.Embedding(sparse=True) makes them.

Such a gradient is stored as row indices and values (a coalesced COO tensor), so that it takes no memory for the rest of
the table. Sums follow the plan's tree; a row that only one side has is kept as it is. Each rank sums its leaves, all
ranks get the sums of all (`engine.all_gather_v`), and each finishes the tree separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from unisono.embedding.row_sums import add_row_gradients, coalesce_rows, row_gradient
from unisono.engine.all_gather_v import AllGatherV, next_part
from unisono.engine.base import Trained
from unisono.engine.joint_optimizer import parts_of, trained_by
from unisono.engine.node_sums import Gradients, NodeSum, take
from unisono.engine.step_transaction import StepTransaction
from unisono.engine.tree_all_reduce import NodeLayout
from unisono.errors import LossError
from unisono.plan import Node, fold

__all__ = ["TableSums", "check_optimizers", "split_sparse"]

_WITHOUT: dict[type[Optimizer], tuple[str, ...]] = {
    optim.SparseAdam: (),
    optim.SGD: ("momentum", "weight_decay", "fused"),
    optim.Adagrad: ("weight_decay", "fused"),
}
"""The optimizers of torch that accept sparse gradients, and the options with which they do not."""


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
    parts = parts_of(optimizer)
    for part in parts:
        if len(parts) == 1:
            _check(part, dense, sparse)
        else:
            _check(part, trained_by(part, dense), trained_by(part, sparse))


def _check(optimizer: Optimizer, dense: Trained, sparse: Trained) -> None:
    kind = type(optimizer)
    if kind is optim.SparseAdam and dense.names:
        raise ValueError(
            f"SparseAdam takes sparse gradients only, and that of {dense.names[0]!r} is dense: only modules with "
            "sparse=True give sparse ones. Give other parameters an optimizer of their own: Trainer takes several."
        )
    if not sparse.names:
        return
    obstacle = None
    if kind in _WITHOUT:
        tables = set(map(id, sparse.parameters))
        groups = [group for group in optimizer.param_groups if any(id(p) in tables for p in group["params"])]
        obstacle = next((f"{key}={g[key]}" for g in groups for key in _WITHOUT[kind] if g.get(key)), None)
    if obstacle or (kind not in _WITHOUT and getattr(optim, kind.__name__, None) is kind):
        what = kind.__name__ + (f" with {obstacle}" if obstacle else "")
        raise ValueError(
            f"{what} takes no sparse gradients, and that of {sparse.names[0]!r} is sparse, since its module was made "
            "with sparse=True. Give it SparseAdam, or SGD or Adagrad without momentum and weight decay, and other "
            "parameters an optimizer of their own; or build the module with sparse=False."
        )


class TableSums:
    """The sums of sparse gradients over a step, for one engine.

    The calls of a step are `begin`, `close_leaf` for each leaf of this rank, `post` and `finish`.

    Args:
        tables: The parameters with sparse gradients.
        rank: This rank.
        all_gather: Exchanges the sums of ranks; None with one rank.
    """

    def __init__(self, tables: Trained, *, rank: int = 0, all_gather: AllGatherV | None = None) -> None:
        self.tables = tables
        self.totals: Gradients = []
        """The gradient of each table after `finish`. It is also p.grad, and lies in this process's private memory."""
        self._rank, self._all_gather = rank, all_gather
        self._layout = NodeLayout((), 0)
        self._sums: list[NodeSum[Gradients]] = []

    def begin(self, layout: NodeLayout) -> None:
        """Begin a step."""
        self._layout, self.totals = layout, []
        if self.tables.names:
            self._sums = [NodeSum(node, add=_add) for node in layout.nodes[self._rank]]

    def close_leaf(self, leaf: int) -> None:
        """Add the gradients of one leaf.

        Raises:
            LossError: If a gradient is not sparse.
        """
        if self.tables.names:
            total = next(total for total in self._sums if leaf < total.node.stop)
            gradients = take(self.tables.parameters)
            total.push(leaf, [_coalesced(*each) for each in zip(self.tables.names, gradients, strict=True)])

    def post(self) -> None:
        """Send this rank's sums. Every rank must call it, after its leaves."""
        if self._all_gather is None or not self.tables.names:
            return
        own = [gradient for total in self._sums for gradient in total.total()]
        parts = [torch.tensor([-1 if gradient is None else gradient._nnz() for gradient in own], dtype=torch.int64)]
        for gradient in own:
            if gradient is not None:
                parts += [gradient._indices().view(-1), gradient._values().reshape(-1)]
        self._all_gather.post(parts)

    def finish(self, step: StepTransaction) -> None:
        """Complete the sums, and set p.grad to them. Every rank must call it, after `post`."""
        if not self.tables.names:
            return
        if self._all_gather is None:
            (own,) = self._sums
            self.totals = own.total()
        else:
            nodes = self._layout.nodes
            messages = zip(nodes, self._all_gather.collect(step), strict=True)
            values = {node: sums for of_rank, message in messages for node, sums in self._read(message, of_rank)}
            # A gradient that was not added to another one still lies in its message.
            alone = [sum(sums[k] is not None for sums in values.values()) == 1 for k in range(len(self.tables.names))]
            totals = fold(values, leaves=self._layout.leaves, add=_add)
            self.totals = [t.clone() if t is not None and a else t for t, a in zip(totals, alone, strict=True)]
        self._sums = []
        for p, total in zip(self.tables.parameters, self.totals, strict=True):
            p.grad = total

    def take_changed(self) -> None:
        """Replace the sums by the present p.grad."""
        self.totals = [p.grad for p in self.tables.parameters]

    def vectors(self) -> list[Tensor]:
        """Return the values of each gradient's rows as one vector, a view to be read or written."""
        return [total._values().view(-1) for total in self.totals if total is not None]

    def _read(self, message: Tensor, nodes: Sequence[Node]) -> list[tuple[Node, Gradients]]:
        """Return a rank's sums by node, as views of its message where devices are the same."""
        tables = self.tables.parameters
        counts, message = next_part(message, torch.int64, len(nodes) * len(tables))
        left = iter(counts.tolist())
        found: list[tuple[Node, Gradients]] = []
        for node in nodes:
            sums: Gradients = []
            for p in tables:
                count = next(left)
                if count < 0:
                    sums.append(None)
                    continue
                indices, message = next_part(message, torch.int64, count)
                values, message = next_part(message, p.dtype, count * p.shape[1:].numel())
                indices, values = (part.to(p.device) for part in (indices, values))
                sums.append(row_gradient(indices, values.view(count, *p.shape[1:]), p.shape))
            found.append((node, sums))
        return found


def _coalesced(name: str, gradient: Tensor | None) -> Tensor | None:
    """Return a leaf's gradient with the values of repeated rows added up."""
    if gradient is None:
        return None
    if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
        raise LossError(
            f"parameter {name!r} of shape {list(gradient.shape)} belongs to a module with sparse=True, but its "
            f"gradient is not one of rows ({gradient.layout}): something else uses the parameter, too, as with tied "
            "weights. Build the module with sparse=False and use a dense optimizer, or do not tie the weights."
        )
    summed = coalesce_rows(gradient.detach())
    values = summed._values()
    if values.untyped_storage().data_ptr() == gradient._values().untyped_storage().data_ptr():
        # Nothing was added up, and the values may share memory with other gradients, or be expanded.
        values = values.clone(memory_format=torch.contiguous_format)
    return row_gradient(summed._indices()[0], values, gradient.shape)


def _add(left: Gradients, right: Gradients) -> Gradients:
    """Return the sum of two lists of gradients, entry by entry."""
    return [_add_tables(a, b) for a, b in zip(left, right, strict=True)]


def _add_tables(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return add_row_gradients(left, right)
