"""A backward pass in two parts: first the gradients that earlier stages need, later those of the stage's own weights.

The first part runs autograd on the paths to received values alone. What it leaves out is the part of matrix products
and convolutions that gives the gradients of weights: these nodes are called again in the second part, with the same
gradients, and compute only that. So nothing is computed twice, and each number comes from the same formula of autograd.

All other gradients of parameters (biases of sums, norm layers, weights that are used several times, whose order of
additions is autograd's) are computed in the first part, kept aside, and added in the second one. In both cases `grad`
changes in the second part alone, so that micro-batches are added in order.

The idea of two parts is from Qi et al., 2024 (arXiv:2401.10241). Start reading at `SplitBackward.of`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from unisono.parallel.graph_entry import ENTRY

__all__ = ["SplitBackward"]

_DEFERRED = frozenset(
    {
        "AddmmBackward0",
        "BaddbmmBackward0",
        "BmmBackward0",
        "ConvolutionBackward0",
        "LinearBackward0",
        "MmBackward0",
    }
)
"""Nodes that compute the gradients of their inputs independently of each other, and are worth a second call."""
_RESHAPING = frozenset(
    {
        "PermuteBackward0",
        "TBackward0",
        "ToCopyBackward0",
        "TransposeBackward0",
        "UnsqueezeBackward0",
        "ViewBackward0",
    }
)
"""Nodes that may lie between such a node and a parameter: views, and autocast's conversions."""


class _Edge(NamedTuple):
    """The way of a gradient from an output of a node to a parameter."""

    output: int
    path: tuple[tuple[Any, int], ...]
    """Nodes, each with the number of its input; the last one adds to the parameter's `grad`."""
    parameter: Tensor


@dataclass(slots=True)
class _Deferred:
    """A node that is called again."""

    node: Any
    edges: list[_Edge]
    gradients: list[Tensor | None] = field(default_factory=list)
    """Those of its results, once the first part has reached it."""


class SplitBackward:
    """The backward pass of one micro-batch through a stage, in two parts. `of` makes it."""

    def __init__(self, roots: Sequence[tuple[Tensor, Tensor | None]], entries: Sequence[Tensor], graph: _Graph) -> None:
        self._roots, self._entries = roots, entries
        self._early, self._deferred = graph.early, graph.deferred
        self._kept: list[tuple[Tensor, Tensor]] = []
        for each in self._deferred:
            # Not a method of `each`: the garbage collector does not see the references of hooks.
            each.node.register_prehook(partial(_note, each.gradients))

    @classmethod
    def of(
        cls,
        roots: Sequence[tuple[Tensor, Tensor | None]],
        entries: Sequence[Tensor],
        sent: Sequence[Tensor],
        parameters: Sequence[Tensor],
    ) -> SplitBackward | None:
        """Return the two parts, or None if the pass is to run as a whole.

        It is where nothing would be left for the second part, and where the graph has functions of the user's own
        (`torch.autograd.Function`, as compiled blocks have), which compute all gradients at once.

        Args:
            roots: The tensors from which backward starts, each with its gradient or None for 1.
            entries: The leaves below received values.
            sent: The parameters whose gradients earlier stages need.
            parameters: All parameters of the stage.
        """
        if not entries and not sent:
            return None
        if any(getattr(each, "_post_accumulate_grad_hooks", None) for each in parameters):
            return None  # they are to see `grad` after each addition
        graph = _Graph.of([root for root, _ in roots], sent)
        return cls(roots, entries, graph) if graph is not None and graph.deferred else None

    def backward_input(self) -> dict[int, Tensor]:
        """Run the first part: gradients reach the entries. Return those of the parameters in `sent`, by id."""
        leaves = self._early.values()
        kept = [(leaf, leaf.grad) for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward(
            [root for root, _ in self._roots],
            [gradient for _, gradient in self._roots],
            retain_graph=True,
            inputs=[*self._entries, *leaves],
        )
        self._roots = ()
        found = {id(leaf): leaf.grad for leaf in leaves if leaf.grad is not None}
        for leaf, gradient in kept:
            leaf.grad = gradient
        self._kept = [(leaf, found[id(leaf)]) for leaf in leaves if id(leaf) in found]
        return found

    def backward_weight(self, sent: Sequence[Tensor]) -> None:
        """Run the second part: gradients are added to `grad`, but for those of the parameters in `sent`."""
        elsewhere = {id(parameter) for parameter in sent}
        for leaf, gradient in self._kept:
            if id(leaf) not in elsewhere:
                leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)
        _within_backward(
            self._add_deferred,
            [GradientEdge(*step) for each in self._deferred for edge in each.edges for step in edge.path],
        )
        self._kept, self._deferred = [], []

    def _add_deferred(self) -> None:
        for each in self._deferred:
            if all(gradient is None for gradient in each.gradients):
                continue
            results = each.node(*each.gradients)
            each.gradients.clear()
            if not isinstance(results, tuple):
                results = (results,)
            for edge in each.edges:
                if results[edge.output] is not None:
                    _add(edge, results[edge.output])


def _note(noted: list[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
    noted[:] = gradients


def _add(edge: _Edge, gradient: Tensor) -> None:
    """Bring a gradient to its parameter, as autograd does."""
    for node, number in edge.path[:-1]:
        known = node._input_metadata[number]
        gradient = node(_fitting(gradient, known.shape, known.dtype))
    parameter = edge.parameter
    gradient = _fitting(gradient, parameter.shape, parameter.dtype)
    if parameter.grad is None and gradient.stride() == parameter.stride():
        parameter.grad = gradient  # the node would copy what it has no sole reference to
    else:
        edge.path[-1][0](gradient)


def _fitting(gradient: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a gradient as autograd hands it from node to node: summed where the value was expanded."""
    if gradient.shape != shape:
        gradient = gradient.sum_to_size(shape)
    return gradient if gradient.dtype == dtype else gradient.to(dtype)


class _Within(torch.autograd.Function):
    # Autograd tells nodes which of their results are asked for. Called outside of a backward pass, they compute all.

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, run: Callable[[], None]) -> Tensor:
        ctx.run = run
        return anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.run()
        return None, None


def _within_backward(run: Callable[[], None], edges: Sequence[GradientEdge]) -> None:
    """Call a function in a backward pass that asks for gradients at some edges."""
    with torch.enable_grad():
        anchor = torch.empty((), requires_grad=True)
        begin: Tensor = _Within.apply(anchor, run)  # type: ignore[no-untyped-call]
    asked: list[Any] = [anchor, *edges]
    torch.autograd.grad(begin, asked, allow_unused=True)


@dataclass(slots=True)
class _Graph:
    """The graph of a pass, and how its parameters are divided between the parts."""

    early: dict[int, Tensor] = field(default_factory=dict)
    """The leaves whose gradients are computed in the first part, by id."""
    deferred: list[_Deferred] = field(default_factory=list)

    @classmethod
    def of(cls, roots: Sequence[Tensor], sent: Sequence[Tensor]) -> _Graph | None:
        """Return the graph below some roots, or None if it has functions that cannot be called in parts."""
        found = cls({id(parameter): parameter for parameter in sent if parameter.requires_grad})
        for root in roots:
            if root.grad_fn is None:
                found.early[id(root)] = root
        walk = _walk([root.grad_fn for root in roots if root.grad_fn is not None])
        if walk is None:
            return None
        for root in roots:
            if root.grad_fn is not None and not walk.enters[root.grad_fn]:
                found._take_early(root.grad_fn)
        for node in walk.order:
            if not walk.enters[node] or _kind(node.__class__) == "entry":
                continue
            edges = []
            for output, (child, number) in enumerate(node.next_functions):
                if child is None or walk.enters[child]:
                    continue
                path = _path(child, number, walk) if _kind(node.__class__) == "deferred" else None
                if path is None or id(leaf := path[-1][0].variable) in found.early or leaf._backward_hooks:
                    found._take_early(child)
                else:
                    edges.append(_Edge(output, path, leaf))
            if edges:
                found.deferred.append(_Deferred(node, edges))
        return found

    def _take_early(self, node: Any) -> None:
        """Note the leaves below a node, from which no received value is reached."""
        waiting = [node]
        while waiting:
            each = waiting.pop()
            if _kind(each.__class__) == "leaf":
                self.early[id(each.variable)] = each.variable
            waiting += [child for child, _ in each.next_functions if child is not None]


@dataclass(slots=True)
class _Walk:
    """All nodes of a graph."""

    order: list[Any] = field(default_factory=list)
    """A node comes after those that it hands gradients to."""
    enters: dict[Any, bool] = field(default_factory=dict)
    """For each node, True if gradients of received values come through it."""
    uses: dict[Any, int] = field(default_factory=dict)
    """How many nodes and roots hand gradients to each."""


def _walk(roots: Sequence[Node]) -> _Walk | None:
    walk = _Walk()
    order, enters, uses = walk.order, walk.enters, walk.uses
    for root in roots:
        uses[root] = uses.get(root, 0) + 1
    waiting: list[tuple[Any, bool]] = [(root, False) for root in roots]
    while waiting:
        node, is_known = waiting.pop()
        if is_known:
            enters[node] = any(enters[child] for child, _ in node.next_functions if child is not None)
            order.append(node)
            continue
        if node in enters:
            continue
        kind = _kind(node.__class__)
        if kind == "function":
            return None
        enters[node] = kind == "entry"
        if kind in ("entry", "leaf"):
            order.append(node)
            continue
        waiting.append((node, True))
        for child, _ in node.next_functions:
            if child is not None:
                uses[child] = uses.get(child, 0) + 1
                waiting.append((child, False))
    return walk


def _path(node: Any, number: int, walk: _Walk) -> tuple[tuple[Any, int], ...] | None:
    """Return the way to a parameter that gets a single gradient, or None."""
    path = []
    while walk.uses[node] == 1:
        path.append((node, number))
        kind = _kind(node.__class__)
        if kind == "leaf":
            return tuple(path)
        following = [each for each in node.next_functions if each[0] is not None]
        if kind != "reshaping" or len(following) != 1:
            return None
        ((node, number),) = following
    return None


@cache
def _kind(cls: type) -> Literal["entry", "function", "leaf", "deferred", "reshaping", "other"]:
    if cls is ENTRY:
        return "entry"
    if issubclass(cls, torch.autograd.function.BackwardCFunction):
        return "function"
    if cls.__name__ == "AccumulateGrad":
        return "leaf"
    return "deferred" if cls.__name__ in _DEFERRED else "reshaping" if cls.__name__ in _RESHAPING else "other"
