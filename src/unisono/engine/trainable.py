"""Finds parameters and options that cannot be trained with equal bits on every number of ranks.

Cases that torch itself gets wrong, or that would work with one rank only, are refused on any number of ranks and with
the same message (`check_trained`). Cases that only the shared-memory engine cannot handle are obstacles to that engine
alone (`sharing_obstacle`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from unisono.engine.base import Trained
from unisono.engine.norm import dense_strides

__all__ = ["check_trained", "is_dense", "sharing_obstacle"]

# The alignment of torch's own allocations and of segments. Matrix libraries take different code paths below it: with
# MKL, weights at an odd multiple of 4 bytes change the bits of a linear layer's output.
_ALIGNMENT_NBYTES = 64


def check_trained(trained: Trained, optimizer: Optimizer, *, scaled: bool) -> None:
    """Refuse parameters that an optimizer cannot train with equal bits on every number of ranks.

    Pure: every rank finds the same. Call it when the parameters of a step have changed.

    Args:
        trained: The parameters that the optimizer is going to update.
        optimizer: The optimizer, whose options decide which kernels of torch run.
        scaled: True if gradients are scaled, as with autocast="fp16".

    Raises:
        ValueError: If a parameter is refused; the message names it and says what to do.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    kind = type(optimizer).__name__
    for name, p in zip(*trained, strict=True):
        what = f"parameter {name!r} of shape {list(p.shape)}"
        if torch._debug_has_internal_overlap(p) == 1:
            raise ValueError(
                f"{what} is expanded: several of its elements lie in one place of memory (strides {list(p.stride())}), "
                "and optimizers cannot write there. Train the tensor from before expand() and expand it in the forward "
                "pass, or clone() it."
            )
        if p.is_neg() or p.is_conj():
            raise ValueError(
                f"{what} is a lazy {'conjugate' if p.is_conj() else 'negative'} of other memory, where neither torch's "
                "fused kernels nor ranks that share memory can write. Build it of tensor.resolve_conj().resolve_neg()."
            )
        if p.grad_dtype != p.dtype:
            raise ValueError(
                f"{what} has dtype {p.dtype} and grad_dtype {p.grad_dtype}: a gradient whose type differs from its "
                "parameter's is not summed here. Leave grad_dtype alone, or keep the weights in float32 and use "
                'autocast="bf16".'
            )
        if scaled and (p.dtype == torch.float16 or p.is_complex()):
            raise ValueError(
                f'{what} has dtype {p.dtype}, whose gradient cannot be unscaled, as autocast="fp16" needs. Keep the '
                'weights in float32, which autocast casts automatically, or give Trainer autocast="bf16" or None.'
            )
        group = groups[id(p)]
        if group.get("differentiable"):
            raise ValueError(
                f"{kind} has differentiable=True, with which torch's optimizers refuse to write parameters such as "
                f"{name!r}. Leave it out: a Trainer's steps are not differentiated through."
            )
        if group.get("fused") and p.device.type == "cpu":
            _check_fused(what, p, optimizer)
    _check_epsilon(trained, optimizer)


def sharing_obstacle(trained: Trained, others: Iterable[Tensor]) -> str | None:
    """Return the first reason why parameters cannot move to shared memory without a change of bits, or None.

    Args:
        trained: The parameters that would move.
        others: All tensors of the models; those among the parameters count once.
    """
    names = {id(p): f"parameter {name!r}" for name, p in zip(*trained, strict=True) if p.numel()}
    for p in trained.parameters:
        if not is_dense(p):
            return f"{names[id(p)]} is not dense in memory (shape {list(p.shape)}, strides {list(p.stride())})"
        if p.numel() and p.data_ptr() % _ALIGNMENT_NBYTES:
            return (
                f"{names[id(p)]} lies at an address that is no multiple of {_ALIGNMENT_NBYTES} bytes, where matrix "
                "libraries may round differently"
            )
    tensors = {id(t): t for t in (*others, *trained.parameters)}
    extents = sorted((*extent, number) for number, t in tensors.items() for extent in _extent(t))
    end, last = 0, 0
    for start, stop, number in extents:
        if start < end and (number in names or last in names):
            first, second = sorted((number, last), key=lambda number: names.get(number, "~"))
            return f"{names[first]} shares its memory with {names.get(second, 'a tensor that is not trained')}"
        if stop > end:
            end, last = stop, number
    return None


def is_dense(parameter: Tensor) -> bool:
    """Return True if the elements fill one contiguous range of memory, in any order."""
    return parameter.numel() < 2 or dense_strides(parameter) == parameter.stride()


def _extent(tensor: Tensor) -> Sequence[tuple[int, int]]:
    """Return the first and the end address of a tensor, as one pair; none if it has no elements in memory."""
    if tensor.layout is not torch.strided or not tensor.numel() or tensor.is_meta:
        return ()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in steps)
    start = tensor.data_ptr()
    return ((start, start + length * tensor.element_size()),)


def _check_fused(what: str, parameter: Tensor, optimizer: Optimizer) -> None:
    kind = type(optimizer).__name__
    if not is_dense(parameter):
        raise ValueError(
            f"{what} is not dense in memory (its strides are {list(parameter.stride())}), and {kind} has fused=True: "
            "torch's fused kernels pay no heed to strides and would write over what lies between its elements. Leave "
            "fused out, or make the parameter contiguous."
        )
    if isinstance(optimizer, optim.SGD) and not _fused_sgd_writes(parameter.dtype):
        raise ValueError(
            f"{what} has dtype {parameter.dtype}, and SGD has fused=True: on the CPU this version of torch "
            f"({torch.__version__}) then leaves most elements as they are. Leave fused out, or keep weights in float32 "
            'and use autocast="bf16".'
        )


@cache
def _fused_sgd_writes(dtype: torch.dtype) -> bool:
    """Return True if fused SGD updates CPU parameters of a dtype; in low precision it may not (torch 2.13)."""
    values, momenta = torch.zeros(64, dtype=dtype), torch.zeros(64, dtype=dtype)
    for _ in range(2):
        torch._fused_sgd_(
            [values],
            [torch.ones_like(values)],
            [momenta],
            weight_decay=0.0,
            momentum=0.5,
            lr=1.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )
    return bool((values == -2.5).all())


def _check_epsilon(trained: Trained, optimizer: Optimizer) -> None:
    """Raise ValueError if Adafactor's epsilon would depend on which parameter comes first."""
    if not isinstance(optimizer, optim.Adafactor):
        return
    names = dict(zip(map(id, trained.parameters), trained.names, strict=True))
    for group in optimizer.param_groups:
        of_group = [p for p in group["params"] if id(p) in names]
        other = next((p for p in of_group if p.dtype != of_group[0].dtype), None)
        if other is not None and group["eps"][0] is None:
            first = of_group[0]
            raise ValueError(
                f"Adafactor has eps=(None, ...) and parameters of several types in one group: {names[id(first)]!r} is "
                f"{first.dtype}, {names[id(other)]!r} is {other.dtype}. torch then takes the epsilon of whichever type "
                "it meets first for all of them. Give each type a parameter group of its own, or give eps as numbers."
            )
