"""Buffers that a forward pass changes, such as BatchNorm's running statistics.

Each virtual rank starts from the values before the step. After it, a floating-point buffer is the mean over the step's
virtual ranks, summed in tree order, and any other buffer (a counter) has the value that virtual rank 0 gave it. Buffers
that no virtual rank changed are not touched. If the step fails, all buffers have the values from before it.
Changes are found by comparing values, since torch's own batch_norm writes without raising a tensor's version counter;
only buffers of torch's BatchNorm and InstanceNorm modules in training count as changed without a comparison, for speed.
A buffer that is None gets a value in the first step whose virtual ranks all give it one. A write to a parameter in a
forward pass is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from unisono.collectives.world import World
from unisono.embedding.tables import lagging
from unisono.engine.buffer_vector import BufferVector, LeafValues
from unisono.engine.model_contents import ModelContents, member_name
from unisono.engine.node_sums import NodeSum, add
from unisono.engine.norm_buffers import NormBuffers
from unisono.engine.outside_writes import OutsideWrites
from unisono.engine.step_transaction import StepTransaction
from unisono.engine.tracked_buffer import BufferKind, TrackedBuffer, commit
from unisono.engine.tree_all_reduce import AllReduce, MakeAllReduce, NodeLayout, NodeLayouts
from unisono.engine.write_detection import WriteDetector
from unisono.errors import CheckpointError, LossError
from unisono.job.current import confirm_group

__all__ = ["BufferTransaction"]


class BufferTransaction:
    """The buffers of a model over one step.

    The calls are `find` and `start`, then for each leaf `close_leaf`, then `launch`, `receive`, and `commit` or
    `roll_back`.

    Args:
        models: Modules, by the prefix of their names.
        make_all_reduce: Makes the all-reduce of the buffers' values.
        parameters_move: True if the memory of parameters comes and goes within a step.
        in_turn: True if virtual ranks are dealt to ranks in turn.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        world: World,
        make_all_reduce: MakeAllReduce,
        *,
        virtual_ranks: int,
        parameters_move: bool = False,
        in_turn: bool = False,
    ) -> None:
        self._world, self._virtual_ranks, self._parameters_move = world, virtual_ranks, parameters_move
        self._in_turn = in_turn
        self.contents = ModelContents(models)
        self._seen = -1
        self._tracked: list[TrackedBuffer] = []
        self._names: frozenset[str] | None = None
        """The buffers to track; None: all."""
        self._followed: set[tuple[int, str]] = set()
        """All buffers that there were when they were last looked for, as id of the module and name in it."""
        self._norm_buffers = NormBuffers(())
        self._leaves, self._damaged = 0, False
        self._committed: list[TrackedBuffer] = []
        self._makes = False
        """True if the step gave a first value to buffers that were None."""
        self._changes: dict[int, dict[int, Tensor]] = {}
        self._outside = OutsideWrites()
        self.connect(make_all_reduce)
        self._total: Tensor | None = None
        self._parameters = WriteDetector(())
        self.find()

    def connect(self, make_all_reduce: MakeAllReduce) -> None:
        """Sum over the ranks that there are now, which agree anew on the buffers to sum."""
        self._make_all_reduce = make_all_reduce
        self._layouts = NodeLayouts(self._world.size, virtual_ranks=self._virtual_ranks, in_turn=self._in_turn)
        self._know([])
        self._sent: AllReduce | None = None
        self.adopt()

    def restrict(self, names: Collection[str] | None) -> None:
        """Track the buffers with these plain names alone: the others are left to other ranks. None: all again."""
        self._names, self._seen = None if names is None else frozenset(names), -1
        self.find()

    def written_outside(self) -> dict[str, str]:
        """Return what the loop has written since the last step; see `OutsideWrites`. Call it before `start`."""
        return self._outside.find(self._tracked)

    def adopt(self) -> None:
        """Take the present values as those that all ranks have, before ranks that have them from another one go on."""
        self._outside.forget()
        if self._tracked:
            self._keep()

    def start(self, *, leaves: int) -> None:
        """Begin a step. Values that the user has written since the last one are the values before this step."""
        self._leaves, self._changes, self._committed = leaves, {}, []
        self._damaged = self._makes = False
        if self._tracked:
            self._keep()
        if self._virtual_ranks > 1:
            self._parameters.remember()

    def _keep(self) -> None:
        """Record the present values as those before the step."""
        if not self._norm_buffers.are_in_place():
            self._norm_buffers = NormBuffers(self._tracked)
        self._norm_buffers.keep()
        for i, tracked in self._norm_buffers.rest:
            if tracked.changed() and tracked.keep():
                # Its shape or dtype is another one, or it is None now, so ranks must agree on it again.
                self._know([k for k in self._known if k != i])

    def new_buffers(self, *, sends_early: bool = True) -> bool:
        """Return True if a buffer has changed that no earlier step changed; always False with one virtual rank.

        Args:
            sends_early: False if gradients are not sent before `launch`, which looks at parameters in any case.

        Raises:
            LossError: Before gradients are on their way, if the buffer cannot have one value for all virtual ranks, if
                the forward pass has added or deleted a buffer, or if it has written to a parameter.
        """
        if self._virtual_ranks == 1:
            return False
        if sends_early and not self._changes:  # later leaves do as the first one does; if not, `launch` finds it
            self.check_parameters()
        if self.contents.has_new_buffers():
            self._refuse_new_buffers()
        if not self._unknown:
            return False
        found = [tracked for tracked in self._unknown if tracked.changed()]
        for tracked in found:
            tracked.check()
        return bool(found)

    def stand_in(self) -> None:
        """Make the next forward pass write to copies. Call it before each pass whose graph is kept while others run."""
        for tracked in self._tracked:
            tracked.stand_in()

    def close_leaf(self, leaf: int) -> None:
        """Store this leaf's changes, and restore the values from before the step."""
        if self._virtual_ranks == 1:
            return  # The values that the one leaf left in place are the result.
        changes: dict[int, Tensor] = {}
        if not self._tracked:
            self._changes[leaf] = changes
            return
        rest: Iterable[tuple[int, TrackedBuffer]] = enumerate(self._tracked)
        if self._norm_buffers.are_in_place():
            changes, rest = self._norm_buffers.take(leaf), self._norm_buffers.rest
        for i, tracked in rest:
            if tracked.changed() and (value := tracked.taken()) is not None:
                changes[i] = value
            elif tracked.has_stand_in:
                tracked.put_back()
        self._changes[leaf] = changes

    def roll_back(self) -> bool:
        """Restore all values from before the step. Return False if a forward pass was found to write to a parameter."""
        for tracked in self._tracked:
            if tracked.changed() or tracked.has_stand_in:
                tracked.put_back()
        return not self._damaged

    def launch(self) -> None:
        """Send the changes while gradients are still on their way. Every rank must call it, after its leaves.

        Raises:
            LossError: If this rank's leaves have written to a parameter.
        """
        self.check_parameters()
        if self._known and self._world.group is not None:
            self._send()

    def receive(self, step: StepTransaction) -> None:
        """Wait for the sums of the changes. Every rank must call it, even if the step is going to fail."""
        if self._sent is not None:
            self._sent.advance()
            self._total = self._sent.finish(step)
            self._sent = None

    def commit(self, step: StepTransaction, *, new_buffers: bool) -> None:
        """Set every buffer to its value after the step, equal on all ranks. Every rank must call it.

        Args:
            new_buffers: `Totals.new_buffers`. If True, ranks agree anew on which buffers to sum.
        """
        self._outside.forget()
        if new_buffers and self._agree() and self._world.group is not None:
            self._send()
            self.receive(step)
            confirm_group()
        if not self._known:
            return
        if self._world.group is None:
            (self._total,) = self._node_sums(self._layouts.of(self._leaves))
        assert self._total is not None
        self._apply(self._total)

    def undo(self) -> bool:
        """Restore all values from before the last `commit`, in the same step. Return False if that is not possible."""
        for tracked in self._committed:
            tracked.undo()
        self._committed = []
        return not self._makes

    def copy(self) -> list[Tensor | None]:
        """Return copies of all buffers, for `put`; None for those that are None."""
        return [None if t.current is None else t.current.detach().clone() for t in self._tracked]

    def put(self, values: list[Tensor | None]) -> None:
        """Write the values that `copy` has returned, between two steps."""
        for tracked, value in zip(self._tracked, values, strict=True):
            if value is not None and tracked.tensor is not None and tracked.tensor.shape == value.shape:
                tracked.put(value)
            else:
                tracked.module._buffers[tracked.name] = value
            tracked.keep()

    def state_dict(self) -> dict[str, Tensor]:
        """Return buffers that the model's state_dict lacks: those with persistent=False that the run has written."""
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
        """Restore a saved state."""
        for tracked in self._tracked:
            if (value := state.get(tracked.path)) is None:
                continue
            if tracked.current is not None and tracked.current.shape == value.shape:
                tracked.current.copy_(value)
            else:
                tracked.module._buffers[tracked.name] = value.to(self._device(), copy=True)
            tracked.keep()
        self.adopt()

    def find(self) -> int:
        """Track the buffers that the models have now, and return the version of the models' contents."""
        version = self.contents.version()
        if version == self._seen:
            return version
        self._seen = version
        before = {(id(t.module), t.name): t for t in self._tracked}
        known = {id(self._tracked[i]) for i in self._known}
        self._tracked = [
            before.get((id(module), name)) or TrackedBuffer(member_name(path, name), module, name)
            for path, module in self.contents.modules().items()
            for name in module._buffers.keys()  # noqa: SIM118  a scripted module's are no dict
        ]
        self._followed = {(id(t.module), t.name) for t in self._tracked}
        if self._names is not None:
            self._tracked = [tracked for tracked in self._tracked if tracked.path in self._names]
        self._know([i for i, tracked in enumerate(self._tracked) if id(tracked) in known])
        self._norm_buffers = NormBuffers(self._tracked)
        self._parameters = WriteDetector(
            self.contents.parameters(), move=self._parameters_move, unread=lagging(self.contents.modules().values())
        )
        return version

    def _agree(self) -> bool:
        """Agree with all ranks on which buffers to sum. Return True if there are more than before.

        Raises:
            LossError: If a buffer that was None did not get the same shape and type in all virtual ranks.
        """
        own: dict[int, list[BufferKind]] = {}
        for changes in self._changes.values():
            for i, value in changes.items():
                own.setdefault(i, []).append(BufferKind(tuple(value.shape), value.dtype))
        found = self._world.gather(own)
        made: dict[int, BufferKind] = {}
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
        self._makes = bool(made)
        self._know(sorted({*self._known, *new}))
        return bool(new)

    def _know(self, numbers: list[int]) -> None:
        """Sum the buffers with these numbers, and no others."""
        known = set(numbers)
        self._known = numbers
        self._unknown = [tracked for i, tracked in enumerate(self._tracked) if i not in known]
        self._vector: BufferVector | None = None
        self._all_reduce: AllReduce | None = None

    def _places(self) -> BufferVector:
        """Return the places of the known buffers in the vector that is summed."""
        if self._vector is None:
            buffers = [tensor for i in self._known if (tensor := self._tracked[i].tensor) is not None]
            assert len(buffers) == len(self._known)
            self._vector = BufferVector(buffers, self._device())
        return self._vector

    def _send(self) -> None:
        layout = self._layouts.of(self._leaves)
        if self._all_reduce is None:
            self._all_reduce = self._make_all_reduce(
                self._places().numel, widest=self._layouts.widest, dtype=torch.float64, device=self._device()
            )
        self._all_reduce.start(layout)
        for row, vector in zip(self._all_reduce.rows, self._node_sums(layout), strict=False):
            row.narrow(0, 0, vector.numel()).copy_(vector)
        self._all_reduce.launch()
        self._sent = self._all_reduce

    def _node_sums(self, layout: NodeLayout) -> list[Tensor]:
        """Sum the changes of this rank's leaves by node."""
        sums = []
        for node in layout.nodes[self._world.rank]:
            total = NodeSum(node, add=add)
            values = [self._values_of(leaf) for leaf in range(node.start, node.stop)]
            for leaf, of_leaf in enumerate(self._places().pack(values, first=node.start), node.start):
                total.push(leaf, [of_leaf])
            sums += [vector for vector in total.total() if vector is not None]
        return sums

    def _values_of(self, leaf: int) -> LeafValues:
        changes, values = self._changes[leaf], []
        for i in self._known:
            value = changes.get(i, self._tracked[i].before)
            assert value is not None
            values.append(value)
        return values, [i in changes for i in self._known]

    def _apply(self, total: Tensor) -> None:
        changed, values = self._places().unpack(total, leaves=self._leaves)
        self._committed = [self._tracked[i] for i, flag in zip(self._known, changed, strict=True) if flag]
        commit(self._committed, [value for value, flag in zip(values, changed, strict=True) if flag])

    def _device(self) -> torch.device:
        parameters = self.contents.parameters()
        return parameters[0].device if parameters else self._world.device

    def _refuse_new_buffers(self) -> None:
        for path, module in self.contents.modules().items():
            for name in module._buffers.keys():  # noqa: SIM118
                if (id(module), name) not in self._followed:
                    raise LossError(
                        f"buffer {member_name(path, name)!r} was registered in the forward pass, where "
                        "other ranks do not learn of it. Register it in __init__: None will do until it has a value."
                    )
        raise LossError("a buffer was deleted in the forward pass: set it to a tensor, or leave it as it is.")

    def check_parameters(self) -> None:
        """Raise LossError if a forward pass has written to a parameter; not with one virtual rank."""
        written = self._parameters.written() if self._virtual_ranks > 1 else None
        if written is None:
            return
        self._damaged = True
        names = {
            id(p): member_name(path, name)
            for path, module in self.contents.modules().items()
            for name, p in module.named_parameters(recurse=False)
        }
        raise LossError(
            f"parameter {names[id(written)]!r} was written to in the forward pass, which runs once for each of the "
            f"{self._virtual_ranks} virtual ranks: how many of them a rank computes would change the result. Write it "
            "in your loop, after the step, once for each batch; or make it a buffer, of which the mean over "
            "virtual ranks is kept."
        )
