"""Which rank writes which bytes of a file of tensors, where several ranks have parts of them. Pure.

All ranks compute the plan from what each of them has, or share out what all have. Start reading at `plan_parts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.errors import CheckpointError
from unisono.state.digest import check_storable
from unisono.state.safetensors_format import FileLayout, lay_out

__all__ = ["Claim", "PartPlan", "TensorForm", "even_claims", "even_plan", "form_of", "plan_parts"]


class TensorForm(NamedTuple):
    """A tensor without its values, as ranks tell each other what they have."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        """Return a tensor of this form on the meta device."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def form_of(tensor: Tensor) -> TensorForm:
    """Return the form of a tensor."""
    return TensorForm(tuple(tensor.shape), tensor.dtype)


class Claim(NamedTuple):
    """Elements of a tensor that a rank has: start <= element < stop, in the order of indices."""

    name: str
    start: int
    stop: int


class PartPlan(NamedTuple):
    """The layout of a file, and what each rank writes into it."""

    layout: FileLayout
    starts: list[dict[Claim, int]]
    """For each rank, where in the file each of its ranges begins."""


def even_claims(forms: Mapping[str, Tensor], parts: int) -> list[list[Claim]]:
    """Divide tensors that every rank has into parts that follow each other and have about equally many bytes.

    Args:
        forms: A tensor of the dtype and shape of each one, by name; it needs no values.
        parts: The number of parts.

    >>> import torch
    >>> even_claims({"w": torch.empty(3, device="meta"), "b": torch.empty(1, device="meta")}, 2)
    [[Claim(name='w', start=0, stop=2)], [Claim(name='w', start=2, stop=3), Claim(name='b', start=0, stop=1)]]
    """
    total = sum(form.numel() * form.element_size() for form in forms.values())
    ends = [total * part // parts for part in range(1, parts + 1)]
    claims: list[list[Claim]] = [[] for _ in ends]
    before = 0
    for name, form in forms.items():
        first, width = 0, form.element_size()
        for own, end in zip(claims, ends, strict=True):
            stop = min(form.numel(), -((before - end) // width))  # the first element that begins at the end or after it
            if stop > first:
                own.append(Claim(name, first, stop))
                first = stop
        before += form.numel() * width
    return claims


def plan_parts(
    group: str, forms: Mapping[str, Tensor], aliases: Mapping[str, str], claims: Sequence[Sequence[Claim]]
) -> PartPlan:
    """Plan a file. A range that several ranks have is written by the first of them.

    Args:
        group: What precedes a name in errors.
        forms: See `safetensors_format.lay_out`.
        aliases: See there.
        claims: What each rank has.

    Raises:
        CheckpointError: No rank has some elements, or the format cannot hold a name.

    >>> import torch
    >>> form = torch.empty(4, device="meta")
    >>> plan = plan_parts("model", {"w": form}, {}, [[Claim("w", 0, 3)], [Claim("w", 3, 4), Claim("w", 0, 3)]])
    >>> plan.layout.nbytes - 16, plan.starts
    (96, [{Claim(name='w', start=0, stop=3): 96}, {Claim(name='w', start=3, stop=4): 108}])
    """
    layout = lay_out(forms, aliases, group)
    starts: list[dict[Claim, int]] = [{} for _ in claims]
    reached: dict[str, int] = {}
    owned = sorted((claim.name, claim.start, claim.stop, rank) for rank, own in enumerate(claims) for claim in own)
    for name, start, stop, rank in owned:
        if name in layout.starts and start == reached.get(name, 0) and stop > start:
            starts[rank][Claim(name, start, stop)] = layout.starts[name] + start * forms[name].element_size()
            reached[name] = stop
    missing = [name for name in layout.starts if reached.get(name, 0) != forms[name].numel()]
    if missing:
        name = missing[0]
        raise CheckpointError(
            f"no rank has the elements of {group}.{name} from {reached.get(name, 0):,} on, of {forms[name].numel():,}: "
            "the parts of ranks do not fit together."
        )
    return PartPlan(layout, starts)


def even_plan(group: str, tensors: Mapping[str, Tensor], aliases: Mapping[str, str], parts: int) -> PartPlan:
    """Plan a file of tensors that every rank has: each writes one piece of it, of about equally many bytes.

    Args:
        group: See `plan_parts`.
        tensors: The tensors by name.
        aliases: See `plan_parts`.
        parts: The number of ranks.

    Raises:
        CheckpointError: A tensor cannot be stored.
    """
    for name, tensor in tensors.items():
        check_storable(tensor, f"{group}.{name}")
    order = lay_out(tensors, aliases, group).starts
    return plan_parts(group, tensors, aliases, even_claims({name: tensors[name] for name in order}, parts))
