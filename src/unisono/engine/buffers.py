"""What a forward pass changes besides gradients: buffers, such as BatchNorm's running statistics.

Each virtual rank starts from the values before the step. After it, a floating-point buffer is the mean over the step's
virtual ranks, summed in tree order, and any other buffer (a counter) has the value that virtual rank 0 gave it. Buffers
that no virtual rank changed are not touched. If the step fails, all have the values from before it.
Changes are found by comparing values, since torch's own batch_norm writes without raising a tensor's version counter;
only buffers of torch's BatchNorm and InstanceNorm modules are taken as changed unseen, for speed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from unisono.comm import World
from unisono.engine.exchange import Layout, MakeExchange, SumOverRanks
from unisono.engine.gradients import NodeSum, add
from unisono.errors import UnisonoError

__all__ = ["BufferTransaction"]


class _Tracked:
    """One buffer, the place that holds it, and its value before the step."""

    def __init__(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        self.module, self.name, self.tensor = module, name, tensor
        self.before = tensor.detach().clone()
        self.version = _version(tensor)

    def changed(self) -> bool:
        """Whether the buffer was written to, or another tensor put in its place, since the last look."""
        if self.module._buffers[self.name] is not self.tensor or _version(self.tensor) != self.version:
            return True
        if isinstance(self.module, _NormBase):
            return self.module.training
        return not torch.equal(self.tensor, self.before)

    def keep(self) -> None:
        """Take the present value as the one before the step."""
        current = self.module._buffers[self.name]
        if current is not self.tensor:
            assert current is not None
            self.tensor = current
            self.before = current.detach().clone()
        else:
            self.before.copy_(self.tensor.detach())
        self.version = _version(self.tensor)

    def put(self, value: Tensor) -> None:
        """Write a value into the tensor that was there before the step, and put that back in its place."""
        with torch.no_grad():
            self.tensor.copy_(value)
        self.module._buffers[self.name] = self.tensor
        self.version = _version(self.tensor)


class BufferTransaction:
    """The buffers of a model over one step.

    The calls are `start`, then for each leaf `close_leaf`, then `launch`, `receive`, and `commit` or `roll_back`.
    """

    def __init__(
        self, modules: Iterable[nn.Module], world: World, make_exchange: MakeExchange, *, virtual_ranks: int
    ) -> None:
        self._world, self._virtual_ranks, self._make_exchange = world, virtual_ranks, make_exchange
        self._tracked = [
            _Tracked(module, name, tensor)
            for root in modules
            for module in root.modules()
            for name, tensor in module._buffers.items()
            if tensor is not None
        ]
        self._known: list[int] = []
        self._leaves = 0
        self._changes: dict[int, dict[int, Tensor]] = {}
        self._exchange: SumOverRanks | None = None
        self._sent: SumOverRanks | None = None
        self._total: Tensor | None = None

    def start(self, *, leaves: int) -> None:
        """Begin a step: what the user wrote into buffers since the last one counts as their value before it."""
        self._leaves = leaves
        self._changes = {}
        for tracked in self._tracked:
            if tracked.changed():
                tracked.keep()

    def surprised(self) -> bool:
        """Whether a buffer has changed that no earlier step changed. Only several virtual ranks need to know."""
        if not self._tracked:
            return False
        known = set(self._known)
        return self._virtual_ranks > 1 and any(t.changed() for i, t in enumerate(self._tracked) if i not in known)

    def close_leaf(self, leaf: int) -> None:
        """Put this leaf's changes aside and restore the values from before the step."""
        if self._virtual_ranks == 1:
            return  # What the one leaf left in place is the result.
        changes = {}
        for i, tracked in enumerate(self._tracked):
            if tracked.changed():
                value = tracked.module._buffers[tracked.name]
                assert value is not None
                if value.is_complex():
                    raise UnisonoError(
                        f"buffer {tracked.name!r} of {type(tracked.module).__name__} is complex and changes in the "
                        "forward pass; its mean over virtual ranks is not defined here. Keep its parts as real buffers."
                    )
                changes[i] = value.detach().clone()
                tracked.put(tracked.before)
        self._changes[leaf] = changes

    def roll_back(self) -> None:
        """Restore all values from before the step."""
        for tracked in self._tracked:
            if tracked.changed():
                tracked.put(tracked.before)

    def launch(self) -> None:
        """Send the changes while gradients are still on their way. Every rank must call it, after its leaves."""
        if self._known and self._world.group is not None:
            self._send()

    def receive(self) -> None:
        """Wait for what was sent. Every rank must call it, also if the step is going to fail."""
        if self._sent is not None:
            self._sent.advance()
            self._total = self._sent.finish()
            self._sent = None

    def commit(self, *, surprised: bool) -> None:
        """Give every buffer its value after the step, equal on all ranks. Every rank must call it.

        Args: surprised is whether any rank's leaf was (`Totals.surprised`): then ranks agree anew on which to exchange.
        """
        if surprised:
            found = self._world.gather(sorted({i for changes in self._changes.values() for i in changes}))
            self._known = sorted({*self._known, *(i for indices in found for i in indices)})
            self._exchange = None
            if self._world.group is not None:
                self._send()
                self.receive()
        if not self._known:
            return
        if self._world.group is None:
            (self._total,) = self._node_sums(Layout.of(leaves=self._leaves, world_size=1, virtual_ranks=self._leaves))
        assert self._total is not None
        self._apply(self._total)

    def _send(self) -> None:
        layout = self._layout_of(self._leaves)
        if self._exchange is None:
            numel = len(self._known) + sum(self._tracked[i].tensor.numel() for i in self._known)
            widest = self._layout_of(self._virtual_ranks)
            self._exchange = self._make_exchange(numel, widest=widest, dtype=torch.float64, device=self._world.device)
        self._exchange.start(layout)
        for row, vector in zip(self._exchange.rows, self._node_sums(layout), strict=False):
            row[: vector.numel()] = vector
        self._exchange.launch()
        self._sent = self._exchange

    def _node_sums(self, layout: Layout) -> list[Tensor]:
        """Sum the changes of this rank's leaves: float64, a flag for each known buffer and then their values."""
        sums = []
        for node in layout.nodes[self._world.rank]:
            total = NodeSum(node, add=add)
            for leaf in range(node.start, node.stop):
                total.push(leaf, [self._vector(leaf)])
            (vector,) = total.total()
            assert vector is not None
            sums.append(vector)
        return sums

    def _vector(self, leaf: int) -> Tensor:
        changes = self._changes[leaf]
        flags = torch.tensor([float(i in changes) for i in self._known], dtype=torch.float64)
        parts = [flags.to(self._world.device)]
        for i in self._known:
            value = changes.get(i, self._tracked[i].before)
            if not value.is_floating_point() and leaf:
                value = torch.zeros_like(value)
            parts.append(value.flatten().to(self._world.device, torch.float64))
        return torch.cat(parts)

    def _apply(self, total: Tensor) -> None:
        flags = total[: len(self._known)].tolist()
        offset = len(self._known)
        for flag, i in zip(flags, self._known, strict=True):
            tracked = self._tracked[i]
            value = total[offset : offset + tracked.tensor.numel()]
            offset += tracked.tensor.numel()
            if flag:
                if tracked.tensor.is_floating_point():
                    value = value / self._leaves
                tracked.put(value.view(tracked.tensor.shape))
                tracked.keep()

    def _layout_of(self, leaves: int) -> Layout:
        return Layout.of(leaves=leaves, world_size=self._world.size, virtual_ranks=self._virtual_ranks)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
