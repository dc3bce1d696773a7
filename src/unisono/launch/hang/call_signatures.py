"""The recorded functions of torch.distributed: the positions of their arguments, and how calls are described.

Pure functions. `launch.hang.call_recorder` records the calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unisono.launch.hang.status_block import CallKind

__all__ = [
    "COLLECTIVES",
    "OTHERS",
    "Signature",
    "argument",
    "call_shape",
    "matched_text",
    "reduction_name",
    "tensor_facts",
]

_MOST_TENSORS = 8
_LISTS = (list, tuple)  # writing `list | tuple` at each test takes ten times as long


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """The positions of a function's arguments, and which of them must be equal on all ranks."""

    name: str
    """The name in reports; for a deprecated function, that of its replacement."""
    tensors: tuple[int, str] | None = None
    """Position and name of the argument with the tensor or tensors to describe."""
    group: tuple[int, str] = (99, "group")
    reduction: tuple[int, str] | None = None
    peer: tuple[int, str, str] | None = None
    """Position and name, and the name of the argument that has it as a rank within the group."""
    asynchronous: tuple[int, str] | None = None
    equal: str = "elements"
    """Which part of the tensors must be equal: "elements" (number and dtype), "dtype" or "nothing"."""
    kind: CallKind = "collective"


def _of(name: str, tensors: int | None, argument: str = "tensor", **more: Any) -> Signature:
    return Signature(name=name, tensors=None if tensors is None else (tensors, argument), **more)


def _at(position: int) -> dict[str, Any]:
    return {"group": (position, "group"), "asynchronous": (position + 1, "async_op")}


_TO = (1, "dst", "group_dst")
_FROM = (1, "src", "group_src")
_OP = (1, "op")
COLLECTIVES = {
    "all_reduce": _of("all_reduce", 0, reduction=_OP, **_at(2)),
    "all_reduce_coalesced": _of("all_reduce_coalesced", 0, "tensors", reduction=_OP, **_at(2)),
    "broadcast": _of("broadcast", 0, peer=_FROM, **_at(2)),
    "reduce": _of("reduce", 0, peer=_TO, reduction=(2, "op"), **_at(3)),
    # Backends may gather tensors of different sizes; the total size of the output must be equal on all ranks.
    "all_gather": _of("all_gather", 0, "tensor_list", **_at(2)),
    "all_gather_single": _of("all_gather_into_tensor", 0, "output_tensor", **_at(2)),
    "all_gather_into_tensor": _of("all_gather_into_tensor", 0, "output_tensor", **_at(2)),
    "_all_gather_base": _of("all_gather_into_tensor", 0, "output_tensor", **_at(2)),
    "all_gather_coalesced": _of("all_gather_coalesced", 1, "input_tensor_list", equal="dtype", **_at(2)),
    "gather": _of("gather", 0, peer=(2, "dst", "group_dst"), equal="dtype", **_at(3)),
    "scatter": _of("scatter", 0, peer=(2, "src", "group_src"), equal="dtype", **_at(3)),
    "reduce_scatter": _of("reduce_scatter", 1, "input_list", reduction=(2, "op"), **_at(3)),
    "reduce_scatter_single": _of("reduce_scatter_tensor", 1, "input", reduction=(2, "op"), **_at(3)),
    "reduce_scatter_tensor": _of("reduce_scatter_tensor", 1, "input", reduction=(2, "op"), **_at(3)),
    "_reduce_scatter_base": _of("reduce_scatter_tensor", 1, "input", reduction=(2, "op"), **_at(3)),
    "all_to_all": _of("all_to_all", 1, "input_tensor_list", equal="dtype", **_at(2)),
    "all_to_all_single": _of("all_to_all_single", 1, "input", equal="dtype", **_at(4)),
    "barrier": _of("barrier", None, **_at(0)),
    "monitored_barrier": _of("monitored_barrier", None, group=(0, "group")),
    "all_gather_object": _of("all_gather_object", None, group=(2, "group")),
    "gather_object": _of("gather_object", None, peer=(2, "dst", "group_dst"), group=(3, "group")),
    "broadcast_object_list": _of("broadcast_object_list", None, peer=_FROM, group=(2, "group")),
    "scatter_object_list": _of("scatter_object_list", None, peer=(2, "src", "group_src"), group=(3, "group")),
}
OTHERS = {
    "send": _of("send", 0, peer=_TO, group=(2, "group"), kind="point-to-point"),
    "recv": _of("recv", 0, peer=_FROM, group=(2, "group"), kind="point-to-point"),
    "send_object_list": _of("send_object_list", None, peer=_TO, group=(2, "group"), kind="point-to-point"),
    "recv_object_list": _of("recv_object_list", None, peer=_FROM, group=(2, "group"), kind="point-to-point"),
    "init_process_group": _of("init_process_group", None, kind="setup"),
    "new_group": _of("new_group", None, kind="setup"),
    "split_group": _of("split_group", None, kind="setup"),
}


def argument(args: Any, kwargs: Any, where: tuple[int, str] | None, default: Any = None) -> Any:
    """Return an argument by its position or name, or the default; None if the function has no such argument."""
    if where is None:
        return None
    return args[where[0]] if len(args) > where[0] else kwargs.get(where[1], default)


def call_shape(signature: Signature, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Return a hashable key of the arguments that the description of a call depends on. Fast."""
    given = argument(args, kwargs, signature.tensors)
    if isinstance(given, _LISTS):
        tensors: Any = (len(given), *((tensor.shape, tensor.dtype) for tensor in given[:_MOST_TENSORS]))
    else:
        tensors = given is not None and (given.shape, given.dtype)
    where = signature.peer
    peer = (argument(args, kwargs, where[:2]), kwargs.get(where[2])) if where else None
    reduction = argument(args, kwargs, signature.reduction)
    return tensors, peer, reduction, argument(args, kwargs, signature.asynchronous)


def tensor_facts(given: Any) -> list[tuple[str, tuple[int, ...], int]]:
    """Return the dtype, shape and number of elements of a tensor or of several."""
    listed = given if isinstance(given, _LISTS) else [] if given is None else [given]
    return [(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.numel()) for tensor in listed]


def matched_text(
    signature: Signature, tensors: list[tuple[str, tuple[int, ...], int]], reduction: str, peer: int | None
) -> str:
    """Return the properties of a call that must be equal on all ranks, as text."""
    parts = [signature.name, reduction, "" if peer is None else f"root {peer}"]
    if signature.equal == "elements":
        dtypes = sorted({dtype for dtype, _, _ in tensors})
        parts.append(f"{'/'.join(dtypes)} {sum(numel for _, _, numel in tensors)}")
    elif signature.equal == "dtype":
        parts.append("/".join(sorted({dtype for dtype, _, _ in tensors})))
    return "|".join(parts)


def reduction_name(op: Any) -> str:
    """Return the name of a reduction, such as "sum"."""
    kind = getattr(op, "op", op)  # operations with a factor keep it there
    name = getattr(kind, "name", None) or str(kind)
    return str(name).rpartition(".")[2].lower()
