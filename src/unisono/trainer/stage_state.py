"""The state that one rank of a cut model has alone: the weights, buffers, averages and optimizer state of its stages.

`StageState.content` describes it for copies in shared memory (`engine.staged.state_slots`); `put` takes it from there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unisono.engine.model_contents import member_name, named_parameters, plain_name
from unisono.engine.staged import StagedBuffers, StageMap
from unisono.engine.staged.state_slots import StateContent
from unisono.parallel.pipeline.cut_model import CutModel
from unisono.state.codec import decode, encode
from unisono.trainer.restoration import put_optimizer_state
from unisono.trainer.snapshot import Subjects, empty_buffers, extra_state, model_tensors

__all__ = ["StageState"]

_STATES = 16
"""The most room for optimizer state, in the memory of the parameters. Pages are allocated once they are written."""
_ENTRY_NBYTES = 4096
_PLAIN = (bool, int, float, str, type(None))


class StageState:
    """The state of the stages of this rank, once it is known which stage has what.

    Args:
        cut: The model.
        subjects: The objects of the run.
        buffers: The buffers of this rank's stages.
    """

    def __init__(self, cut: CutModel, subjects: Subjects, buffers: StagedBuffers) -> None:
        self._cut, self._subjects, self._buffers = cut, subjects, buffers
        self._content: StateContent | None = None
        self._signature: Hashable = None
        self._members: list[tuple[str, str, nn.Module, str]] | None = None
        self._parameters: dict[str, dict[str, nn.Parameter]] = {}
        self._has_extra = False

    @property
    def capacity(self) -> int:
        """The bytes that the state may come to take: more than of any usual optimizer."""
        self._find()
        tensors: list[Tensor] = [p for group in self._parameters.values() for p in group.values()]
        tensors += [b for *_, module, name in self._listed() if (b := module._buffers[name]) is not None]
        return _STATES * sum(t.numel() * t.element_size() for t in tensors) + _ENTRY_NBYTES * (len(tensors) + 16)

    def content(self) -> StateContent:
        """Return the present state. About 1 µs for each of its tensors, unless there are other ones than last time."""
        self._find()
        transient = self._buffers.own_state_dict()
        optimizers = {
            key: {name: optimizer.state[p] for name, p in self._parameters["model"].items() if p in optimizer.state}
            for key, optimizer in self._subjects.optimizers.items()
        }
        signature = None if self._has_extra else self._signature_of(transient, optimizers)
        if self._content is None or signature is None or signature != self._signature:
            self._content, self._signature = self._describe(transient, optimizers), signature
        return self._content

    def put(self, content: StateContent) -> None:
        """Take over what `content` has returned on a rank with these stages. Its tensors are copied."""
        self._put_weights(content, lambda _: True)
        for transaction in self._buffers.stages.values():
            transaction.load_state_dict(content.groups["buffers"])
        for key, optimizer in self._subjects.optimizers.items():
            for p in self._own_parameters().values():
                optimizer.state.pop(p, None)
            tensors = {name: tensor.clone() for name, tensor in content.groups[f"optimizer/{key}"].items()}
            state = decode(content.document["optimizers"][key], tensors)
            put_optimizer_state(self._subjects.modules, optimizer, {name: dict(each) for name, each in state.items()})
        tensors = {name: tensor.clone() for name, tensor in content.groups["extra"].items()}
        for prefix, states in decode(content.document["extra"], tensors).items():
            for path, value in states.items():
                self._subjects.modules[prefix].get_submodule(path).set_extra_state(value)
        self._content = None

    def put_shared(self, content: StateContent) -> None:
        """Take over the parameters that the stages of this rank use, from a rank that updates them."""
        self._put_weights(content, set(self._cut.used).__contains__)

    def version(self) -> int:
        """Return a number that changes with every write to parameters and persistent buffers. About 0.1 µs for each."""
        self._find()
        buffers = [b for *_, module, name in self._listed() if (b := module._buffers[name]) is not None]
        return sum(t._version for t in (*self._own_parameters().values(), *buffers) if not t.is_inference())

    def equals(self, content: StateContent) -> bool:
        """Return True if the weights and persistent buffers are those of a content."""
        own = model_tensors(self._subjects.modules)
        return all(torch.equal(own[name], value) for name, value in content.groups["model"].items() if name in own)

    def forget(self) -> None:
        """Look for the parameters and buffers of this rank anew, since stages may have others."""
        self._content, self._members, self._parameters = None, None, {}

    def _put_weights(self, content: StateContent, is_wanted: Callable[[str], bool]) -> None:
        models = {"model": self._subjects.modules, "ema": self._subjects.averages}
        with torch.no_grad():
            for group, modules in models.items():
                tensors, empty = model_tensors(modules), empty_buffers(modules)
                for name, value in content.groups[group].items():
                    if not is_wanted(name):
                        continue
                    if name in empty:
                        module, buffer, device = empty[name]
                        module._buffers[buffer] = value.to(device, copy=True)
                    else:
                        tensors[name].copy_(value)

    def _own_parameters(self) -> dict[str, nn.Parameter]:
        self._find()
        return self._parameters["model"]

    def _describe(self, transient: Mapping[str, Tensor], optimizers: Mapping[str, Any]) -> StateContent:
        groups: dict[str, Mapping[str, Tensor]] = {}
        for group in ("model", "ema"):
            groups[group] = {
                **self._parameters.get(group, {}),
                **{
                    full: tensor
                    for kind, full, module, name in self._listed()
                    if kind == group and (tensor := module._buffers[name]) is not None
                },
            }
        groups["buffers"] = transient
        documents = {}
        for key, state in optimizers.items():
            documents[key], groups[f"optimizer/{key}"] = encode({name: dict(each) for name, each in state.items()})
        extra, groups["extra"] = encode(extra_state(self._subjects.modules))
        return StateContent(groups, {"optimizers": documents, "extra": extra})

    def _signature_of(self, transient: Mapping[str, Tensor], optimizers: Mapping[str, Any]) -> Hashable | None:
        """Return what changes if there are other tensors or plain values; None if there are values of other kinds."""
        found: list[Any] = [id(module._buffers[name]) for *_, module, name in self._listed()]
        found += [(name, id(tensor)) for name, tensor in transient.items()]
        for key, states in optimizers.items():
            for name, state in states.items():
                found += [key, name, len(state)]
                for entry, value in state.items():
                    if isinstance(value, Tensor):
                        found.append(id(value))
                    elif isinstance(value, _PLAIN):
                        found += [entry, type(value), value]
                    else:
                        return None
        return tuple(found)

    def _listed(self) -> list[tuple[str, str, nn.Module, str]]:
        self._find()
        assert self._members is not None
        return self._members

    def _find(self) -> None:
        """List the parameters that this rank updates, and the persistent buffers that its stages may write."""
        if self._members is not None:
            return
        known, subjects = self._cut.ownership.map, self._subjects
        assert known is not None
        models = {"model": subjects.modules, "ema": subjects.averages}
        self._members = []
        for group, modules in models.items():
            self._parameters[group] = {
                name: p for name, p in named_parameters(modules).items() if self._owns_parameter(known, name)
            }
            self._members += [
                (group, full, module, name)
                for root in modules.values()
                for path, module in root.named_modules()
                for name in module._buffers
                if name not in module._non_persistent_buffers_set
                and self._owns_buffer(known, full := plain_name(member_name(path, name)))
            ]
        self._has_extra = any(map(len, extra_state(subjects.modules).values()))

    def _owns_parameter(self, known: StageMap, name: str) -> bool:
        ranks = self._cut.ranks
        return name in known.parameters and ranks.place_of(known.owner(name)) == ranks.place

    def _owns_buffer(self, known: StageMap, name: str) -> bool:
        ranks = self._cut.ranks
        return name in known.buffers and ranks.place_of(known.buffers[name]) == ranks.place
