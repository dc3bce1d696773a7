"""What a forward pass changes besides gradients: buffers, such as BatchNorm's running statistics.

Each virtual rank starts from the values before the step. After it, a floating-point buffer is the mean over the step's
virtual ranks, summed in tree order, and any other buffer (a counter) has the value that virtual rank 0 gave it. Buffers
that no virtual rank changed are not touched. If the step fails, all have the values from before it.
Changes are found by comparing values, since torch's own batch_norm writes without raising a tensor's version counter;
only buffers of torch's BatchNorm and InstanceNorm modules are taken as changed unseen, for speed. A buffer that is None
gets a value in the first step whose virtual ranks all give it one. Parameters that a forward pass writes are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from unisono.comm import World
from unisono.engine.contents import Contents, member_name
from unisono.engine.exchange import Layout, MakeExchange, SumOverRanks
from unisono.engine.gradients import NodeSum, add
from unisono.engine.writes import ParameterWrites
from unisono.errors import CheckpointError, LossError

__all__ = ["BufferTransaction"]


class _Kind(NamedTuple):
    """What a buffer that was None before the step has become, in one virtual rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Tracked:
    """One buffer, the place that holds it, and its value before the step."""

    def __init__(self, path: str, module: nn.Module, name: str) -> None:
        self.path, self.module, self.name = path, module, name
        self.tensor: Tensor | None = None
        self.before: Tensor | None = None
        self.version = 0
        self.written = False
        """Whether somebody has written to it since the run began."""
        self._take()

    @property
    def current(self) -> Tensor | None:
        """What the module has now."""
        buffers = self.module._buffers
        return buffers[self.name] if self.name in buffers else None  # noqa: SIM401  a scripted module has no dict

    @property
    def is_persistent(self) -> bool:
        """Whether it is a part of the model's state_dict."""
        return self.name not in getattr(self.module, "_non_persistent_buffers_set", ())

    @property
    def numel(self) -> int:
        """How many elements it has; none if it is None."""
        return 0 if self.tensor is None else self.tensor.numel()

    def changed(self) -> bool:
        """Whether the buffer was written to, or another tensor put in its place, since the last look."""
        if self.current is not self.tensor:
            return True
        if self.tensor is None or self.before is None:
            return False
        if _version(self.tensor) != self.version:
            return True
        if isinstance(self.module, _NormBase):
            return self.module.training
        return not torch.equal(self.tensor, self.before)

    def keep(self) -> bool:
        """Take the present value as the one before the step. Returns: whether it has another size than the last."""
        numel, self.written = self.numel, True
        if self.current is not self.tensor or self.tensor is None or self.before is None:
            self._take()
        else:
            self.before.copy_(self.tensor.detach())
            self.version = _version(self.tensor)
        return self.numel != numel

    def put_back(self) -> None:
        """Restore the value from before the step."""
        if self.tensor is None or self.before is None:
            self.module._buffers[self.name] = None
        else:
            self.put(self.before)

    def put(self, value: Tensor) -> None:
        """Write a value into the tensor that was there before the step, and put that back in its place."""
        assert self.tensor is not None
        with torch.no_grad():
            self.tensor.copy_(value)
        self.module._buffers[self.name] = self.tensor
        self.version = _version(self.tensor)

    def make(self, kind: _Kind, device: torch.device) -> None:
        """Make a tensor for a buffer that was None."""
        self.tensor = torch.zeros(kind.shape, dtype=kind.dtype, device=device)
        self.before, self.version = self.tensor.clone(), _version(self.tensor)

    def taken(self) -> Tensor | None:
        """Copy what a leaf made of the buffer, and restore the value from before the step. None: not to be kept.

        Raises: LossError for what cannot be told for all virtual ranks together.
        """
        value, before = self.current, self.before
        if value is not None and value is self.tensor:
            value = value.detach().clone()  # before the next line writes there
        self.put_back()
        where = f"buffer {self.path!r} of {type(self.module).__name__}"
        if value is None:
            raise LossError(
                f"{where} was set to None in the forward pass: virtual ranks could not agree on its value. Leave the "
                "tensor in its place, or keep what is no state of the model in an attribute that is no buffer."
            )
        if value.is_complex():
            raise LossError(
                f"{where} is complex and changes in the forward pass; its mean over virtual ranks is not defined here. "
                "Keep its parts as real buffers."
            )
        if before is not None and value.shape != before.shape:
            if self.is_persistent:
                raise LossError(
                    f"{where} had shape {list(before.shape)} before the forward pass and has {list(value.shape)} after "
                    "it, of which virtual ranks can have no mean. Give it its final shape from the beginning; or, if "
                    "it is only a cache, register it with persistent=False."
                )
            return None  # a cache, which each virtual rank makes anew
        return value.detach().to(value.dtype if before is None else before.dtype)

    def _take(self) -> None:
        self.tensor = self.current
        if self.tensor is None:
            self.before, self.version = None, 0
        else:
            self.before, self.version = self.tensor.detach().clone(), _version(self.tensor)


class BufferTransaction:
    """The buffers of a model over one step.

    The calls are `start`, then for each leaf `close_leaf`, then `launch`, `receive`, and `commit` or `roll_back`.
    Args: models are modules by the prefix of their names.
    """

    def __init__(
        self, models: Mapping[str, nn.Module], world: World, make_exchange: MakeExchange, *, virtual_ranks: int
    ) -> None:
        self._world, self._virtual_ranks, self._make_exchange = world, virtual_ranks, make_exchange
        self.contents = Contents(models)
        self._seen = -1
        self._tracked: list[_Tracked] = []
        self._known: list[int] = []
        self._leaves = 0
        self._changes: dict[int, dict[int, Tensor]] = {}
        self._exchange: SumOverRanks | None = None
        self._sent: SumOverRanks | None = None
        self._total: Tensor | None = None
        self._parameters = ParameterWrites(())
        self._damaged = False
        self._find()

    def start(self, *, leaves: int) -> None:
        """Begin a step: what the user wrote since the last one counts as the value before it."""
        self._find()
        self._leaves = leaves
        self._changes, self._damaged = {}, False
        for i, tracked in enumerate(self._tracked):
            if tracked.changed() and tracked.keep():
                # It has another size now, or is None, so ranks agree on it anew.
                self._known = [k for k in self._known if k != i]
                self._exchange = None
        if self._virtual_ranks > 1:
            self._parameters.remember()

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
        if self.contents.has_new_buffers():
            self._refuse_new_buffers()
        changes = {}
        for i, tracked in enumerate(self._tracked):
            if tracked.changed() and (value := tracked.taken()) is not None:
                changes[i] = value
        self._changes[leaf] = changes

    def roll_back(self) -> bool:
        """Restore all values from before the step. Returns: False if a forward pass has written to parameters."""
        for tracked in self._tracked:
            if tracked.changed():
                tracked.put_back()
        return not self._damaged

    def launch(self) -> None:
        """Send the changes while gradients are still on their way. Every rank must call it, after its leaves.

        Raises: LossError if this rank's leaves have written to a parameter.
        """
        if self._virtual_ranks > 1 and (written := self._parameters.written()) is not None:
            self._refuse_written(written)
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
        if surprised and self._agree():
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

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a state_dict of the model lacks: the buffers with persistent=False that the run has written."""
        return {
            tracked.path: value
            for tracked in self._tracked
            if not tracked.is_persistent and (tracked.written or tracked.changed())
            if (value := tracked.current) is not None
        }

    def check_state_dict(self, state: Mapping[str, Tensor], source: str) -> None:
        """Raise CheckpointError if a saved state has buffers that the models do not have."""
        missing = sorted(state.keys() - {tracked.path for tracked in self._tracked})
        if missing:
            raise CheckpointError(
                f"{source} holds a buffer {missing[0]!r}, which the run had changed and this model does not have. "
                "Register it as then, or start anew in another directory."
            )

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take a saved state back."""
        for tracked in self._tracked:
            if (value := state.get(tracked.path)) is None:
                continue
            if tracked.current is not None and tracked.current.shape == value.shape:
                tracked.current.copy_(value)
            else:
                tracked.module._buffers[tracked.name] = value.to(self._device(), copy=True)
            tracked.keep()

    def _find(self) -> None:
        """Follow the buffers that the models have now."""
        version = self.contents.look()
        if version == self._seen:
            return
        self._seen = version
        before = {(id(t.module), t.name): t for t in self._tracked}
        known = {id(self._tracked[i]) for i in self._known}
        self._tracked = [
            before.get((id(module), name)) or _Tracked(member_name(path, name), module, name)
            for path, module in self.contents.modules().items()
            for name in module._buffers.keys()  # noqa: SIM118  a scripted module's are no dict
        ]
        self._known = [i for i, tracked in enumerate(self._tracked) if id(tracked) in known]
        self._exchange = None
        self._parameters = ParameterWrites(self.contents.parameters())

    def _agree(self) -> bool:
        """Agree with all ranks on which buffers to exchange. Returns: whether there are more than before.

        Raises: LossError if a buffer that was None did not become the same for all virtual ranks.
        """
        own: dict[int, list[_Kind]] = {}
        for changes in self._changes.values():
            for i, value in changes.items():
                own.setdefault(i, []).append(_Kind(tuple(value.shape), value.dtype))
        found = self._world.gather(own)
        made: dict[int, _Kind] = {}
        new = {i for of_rank in found for i in of_rank} - {*self._known}
        for i in sorted(new):
            tracked = self._tracked[i]
            if tracked.tensor is not None:
                continue
            kinds = [kind for of_rank in found for kind in of_rank.get(i, [])]
            if len(kinds) == self._leaves and len(set(kinds)) == 1:
                made[i] = kinds[0]
            elif tracked.is_persistent:
                shapes = ", ".join(sorted({str(list(kind.shape)) for kind in kinds}))
                raise LossError(
                    f"buffer {tracked.path!r} was None before the step, and {len(kinds)} of {self._leaves} virtual "
                    f"ranks gave it a value, of shape {shapes}: all must give it one of the same shape and type. Give "
                    "it a tensor in __init__; or, if it is only a cache, register it with persistent=False."
                )
            else:
                new.discard(i)  # a cache, which each virtual rank makes anew
        for i, kind in made.items():
            self._tracked[i].make(kind, self._device())
        self._known = sorted({*self._known, *new})
        return bool(new)

    def _send(self) -> None:
        layout = self._layout_of(self._leaves)
        if self._exchange is None:
            numel = sum(1 + self._width(i) for i in self._known)
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
            assert value is not None
            if not value.is_floating_point() and leaf:
                value = torch.zeros_like(value)
            parts.append(_as_numbers(value.flatten().to(self._world.device)))
        return torch.cat(parts)

    def _apply(self, total: Tensor) -> None:
        flags = total[: len(self._known)].tolist()
        offset = len(self._known)
        for flag, i in zip(flags, self._known, strict=True):
            tracked = self._tracked[i]
            width = self._width(i)
            value = total[offset : offset + width]
            offset += width
            if flag:
                assert tracked.tensor is not None
                is_mean = tracked.tensor.is_floating_point()
                value = value / self._leaves if is_mean else _as_whole(value, tracked.tensor.dtype)
                tracked.put(value.view(tracked.tensor.shape))
                tracked.keep()

    def _width(self, i: int) -> int:
        """Say how many numbers a known buffer travels as."""
        tensor = self._tracked[i].tensor
        assert tensor is not None
        return tensor.numel() * (1 if tensor.is_floating_point() else 2)

    def _device(self) -> torch.device:
        parameters = self.contents.parameters()
        return parameters[0].device if parameters else self._world.device

    def _refuse_new_buffers(self) -> None:
        followed = {(id(t.module), t.name) for t in self._tracked}
        for path, module in self.contents.modules().items():
            for name in module._buffers.keys():  # noqa: SIM118
                if (id(module), name) not in followed:
                    raise LossError(
                        f"buffer {member_name(path, name)!r} was registered in the forward pass, where "
                        "other ranks do not learn of it. Register it in __init__: None will do until it has a value."
                    )
        raise LossError("a buffer was deleted in the forward pass: set it to a tensor, or leave it as it is.")

    def _refuse_written(self, written: Tensor) -> None:
        self._damaged = True
        names = {
            id(p): member_name(path, name)
            for path, module in self.contents.modules().items()
            for name, p in module.named_parameters(recurse=False)
        }
        raise LossError(
            f"parameter {names[id(written)]!r} was written to in the forward pass, which runs once for each of the "
            f"{self._virtual_ranks} virtual ranks: how many of them a rank computes would change the result. Write it "
            "in your loop, after trainer.step, as once for each batch; or make it a buffer, of which the mean over "
            "virtual ranks is kept."
        )

    def _layout_of(self, leaves: int) -> Layout:
        return Layout.of(leaves=leaves, world_size=self._world.size, virtual_ranks=self._virtual_ranks)


def _as_numbers(value: Tensor) -> Tensor:
    """Write a vector as float64; whole numbers as two, since one holds 53 bits: the upper and then the lower 32."""
    if value.is_floating_point():
        return value.double()
    whole = value.view(torch.int64) if value.dtype == torch.uint64 else value.long()
    return torch.cat([whole >> 32, whole & 0xFFFFFFFF]).double()


def _as_whole(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Read what `_as_numbers` has written of whole numbers."""
    upper, lower = numbers.long().chunk(2)
    whole = (upper << 32) | lower
    return whole.view(dtype) if dtype == torch.uint64 else whole.to(dtype)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
