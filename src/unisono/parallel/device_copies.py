"""Copies a module to other devices for one forward pass, and adds up the gradients of the copies.

Parameters travel as flat vectors of up to 25 MiB (or one larger parameter), in a tree over the devices. Gradients
return the same way in reverse: each device makes vectors of its gradients, and pairs of devices add them up.
`data_parallel` runs the copies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from unisono.plan.bucketing import Item, group_by_size

__all__ = ["carry", "copy_to"]

BUCKET_BYTES = 25 * 2**20
_MOST_HELD = 1000
"""The most entries of a container that is searched: a larger one is a vocabulary rather than a list of modules."""
_TABLES = {"_parameters", "_buffers", "_modules"}
_PLAIN = {bool, int, float, str, type(None), OrderedDict}
"""The types of most attributes, whose values are never copied; torch keeps hooks in the last."""


def carry(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. This waits for the copy only on the CPU; on other devices, later operations do."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def copy_to(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """Return one copy of a module per device, with copies of its parameters and buffers there.

    A backward pass through the copies adds their gradients to those of the module's parameters; a parameter that no
    copy has used gets none. Values that the copies write into their buffers are lost.
    """
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    recorded = [tensor for tensor in tensors.values() if tensor.requires_grad and torch.is_grad_enabled()]
    others = [tensor for tensor in tensors.values() if not (tensor.requires_grad and torch.is_grad_enabled())]
    made: list[dict[int, Tensor]] = [{} for _ in devices]
    if recorded:
        flat: tuple[Tensor, ...] = _Broadcast.apply(list(devices), *recorded)  # type: ignore[no-untyped-call]
        for i, table in enumerate(made):
            own = flat[i * len(recorded) : (i + 1) * len(recorded)]
            table.update((id(tensor), copied) for tensor, copied in zip(recorded, own, strict=True))
    with torch.no_grad():
        for table, copies in zip(made, _broadcast(others, devices), strict=True):
            table.update((id(tensor), copied) for tensor, copied in zip(others, copies, strict=True))
    return [_rebuild(module, table) for table in made]


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, devices: list[torch.device], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.devices, ctx.home = devices, tensors[0].device
        ctx.layouts = [(tensor.shape, tensor.dtype) for tensor in tensors]
        ctx.set_materialize_grads(False)  # a parameter that was not used has no gradient, rather than zeros
        return tuple(copied for copies in _broadcast(tensors, devices) for copied in copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        count = len(ctx.layouts)
        rows = [grads[i * count : (i + 1) * count] for i in range(len(ctx.devices))]
        used = [i for i in range(count) if any(row[i] is not None for row in rows)]
        sparse = [i for i in used if any(grad is not None and grad.is_sparse for grad in (row[i] for row in rows))]
        sums: list[Tensor | None] = [None] * count
        for i in sparse:
            sums[i] = _tree_sum([grad for row in rows if (grad := row[i]) is not None]).to(ctx.home)
        dense = [i for i in used if i not in set(sparse)]
        for bucket in _buckets([ctx.layouts[i] for i in dense]):
            chosen = [dense[i] for i in bucket]
            parts = []
            for device, row in zip(ctx.devices, rows, strict=True):
                if any(row[i] is not None for i in chosen):
                    parts.append(torch.cat([_flat(row[i], ctx.layouts[i], device) for i in chosen]))
            total = carry(_tree_sum(parts), ctx.home)
            for i, summed in zip(chosen, _views(total, [ctx.layouts[i][0] for i in chosen]), strict=True):
                sums[i] = summed
        return None, *sums


def _broadcast(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """Return copies of tensors on other devices, one list per device."""
    made: list[list[Tensor]] = [[*tensors] for _ in devices]
    for bucket in _buckets([(tensor.shape, tensor.dtype) for tensor in tensors]):
        chosen = [tensors[i] for i in bucket]
        held = [torch.cat([tensor.reshape(-1) for tensor in chosen])]
        for number, device in enumerate(devices):
            # Device n copies from device n/2, which already has the data, so that all links are used, not only one's.
            held.append(held[(number + 1) // 2].to(device, non_blocking=device.type != "cpu", copy=True))
        for i, flat in enumerate(held[1:]):
            for place, view in zip(bucket, _views(flat, [tensor.shape for tensor in chosen]), strict=True):
                made[i][place] = view
    return made


def _buckets(layouts: Sequence[tuple[torch.Size, torch.dtype]]) -> list[list[int]]:
    items = [Item(shape.numel() * dtype.itemsize, dtype=dtype) for shape, dtype in layouts]
    return group_by_size(items, limit_nbytes=BUCKET_BYTES)


def _views(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    pieces = torch.split(flat, [shape.numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _flat(grad: Tensor | None, layout: tuple[torch.Size, torch.dtype], device: torch.device) -> Tensor:
    shape, dtype = layout
    return torch.zeros(shape.numel(), dtype=dtype, device=device) if grad is None else grad.reshape(-1)


def _tree_sum(parts: list[Tensor]) -> Tensor:
    """Return the sum of vectors on several devices, added in pairs, on the device of the first one."""
    while len(parts) > 1:
        pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
        parts = [pair[0] if len(pair) == 1 else pair[0] + pair[1].to(pair[0].device) for pair in pairs]
    return parts[0]


def _rebuild(module: nn.Module, tensors: dict[int, Tensor]) -> nn.Module:
    """Return a copy of a module and its submodules: the same classes and attributes, but with other tensors."""
    originals = list(module.modules())
    made = {id(each): _twin(each) for each in originals}
    replaced = _Replacer({**made, **tensors})
    for each in originals:
        attributes = made[id(each)].__dict__
        for name, value in vars(each).items():
            if name in _TABLES:
                attributes[name] = {key: replaced(entry) for key, entry in value.items()}
            elif type(value) not in _PLAIN:
                attributes[name] = replaced(value)
    return made[id(module)]


def _twin(module: nn.Module) -> nn.Module:
    """Return a module of the same class with the same attributes, as torch makes one for its DataParallel."""
    if type(module)._replicate_for_data_parallel is not nn.Module._replicate_for_data_parallel:
        special: nn.Module = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        return special
    twin = module.__new__(type(module))
    twin.__dict__.update(vars(module))  # faster than torch's way through Module.__setattr__
    return twin


class _Replacer:
    """Replaces values that have a copy: tensors, modules, their methods, and lists, tuples and dicts of these."""

    def __init__(self, copies: Mapping[int, Any]) -> None:
        self._copies = copies

    def __call__(self, value: Any) -> Any:
        found = self._copies.get(id(value))
        if found is not None:
            return found
        kind = type(value)
        if kind is MethodType and id(value.__self__) in self._copies:
            return MethodType(value.__func__, self._copies[id(value.__self__)])
        if kind not in (list, tuple, dict) or not value or len(value) > _MOST_HELD:
            return value
        held = list(value.values()) if kind is dict else list(value)
        new = [self(each) for each in held]
        if all(a is b for a, b in zip(new, held, strict=True)):
            return value  # so that a list to which forward appends is the same one
        return dict(zip(value, new, strict=True)) if kind is dict else kind(new)
