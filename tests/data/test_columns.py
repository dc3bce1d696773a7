"""Micro-batches that are collated together are those that default_collate makes one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from unisono.data.columns import collate_columns, collates_as_torch

generator = torch.Generator().manual_seed(0)
X = torch.randn(48, 3, 4, 4, generator=generator)

ALIKE = {
    "tensors": lambda i: (X[i], torch.tensor(i)),
    "one tensor": lambda i: X[i, 0, 0],
    "a byte each": lambda i: (torch.tensor(i, dtype=torch.uint8), torch.tensor(i % 2 == 0)),
    "rows of 3 bytes": lambda i: [torch.full((3,), i, dtype=torch.uint8)],
    "an int in the middle of a micro-batch": lambda i: X[i].long() if i == 14 else X[i],
    "empty rows": lambda i: (torch.empty(0), i),
    "numbers": lambda i: (i, i / 3, i % 2 == 0),
    "int32 labels": lambda i: (torch.tensor(i, dtype=torch.int32), torch.tensor(i / 7)),
    "strings": lambda i: (str(i), i, b"x"),
    "a string": str,
    "dict": lambda i: {"b": X[i], "a": [i, (str(i), {"c": i})], 5: "five"},
    "empty tuples": lambda i: ((), {}, i),
    "arrays": lambda i: (np.full((2, 3), i, dtype=np.float32), np.int64(i), np.float32(i / 3), np.bool_(i % 2)),
}
UNLIKE = {
    "shapes": lambda i: (X[i, 0, : 1 + i // 20],),
    "shapes of one element": lambda i: torch.tensor([i]) if i > 20 else torch.tensor(i),
    "dtypes": lambda i: X[i] if i < 20 else X[i].double(),
    "a double in the middle of a micro-batch": lambda i: X[i].double() if i == 14 else X[i],
    "int among floats": lambda i: X[i].long() if i >= 34 else X[i],
    "a float label in the middle of a micro-batch": lambda i: torch.tensor(i + 0.5) if i == 14 else torch.tensor(i),
    "types": lambda i: (i if i < 20 else i / 2,),
    "tuples and lists": lambda i: (i, 1) if i < 20 else [i, 1],
    "lengths": lambda i: (i,) * (1 + i // 20),
    "order of keys": lambda i: {"a": i, "b": i} if i < 20 else {"b": i, "a": i},
    "transposed": lambda i: X[i].transpose(1, 2) if i % 2 else X[i],
    "channels last": lambda i: X[i].permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "gradients": lambda i: X[i].clone().requires_grad_(),
    "a subclass": lambda i: torch.nn.Parameter(X[i], requires_grad=False),
    "sparse": lambda i: torch.eye(2).to_sparse(),
    "too large an int": lambda i: 2**64 + i,
    "None": lambda i: (i, None),
    "not divisible and large": lambda i: torch.zeros(4107, dtype=torch.uint8),
}
SIZES = [(5, 5, 5, 5), (8,) * 4, (6, 6, 5, 5), (3, 2), (1, 1, 1), (20,), (1,)]


def samples_of(make, sizes):
    samples = [make(i) for i in range(10, 10 + sum(sizes))]
    ends = np.cumsum(sizes).tolist()
    return samples, [samples[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a, b)
        assert a.data_ptr() % 64 == 0
        assert not a._is_view()
    elif isinstance(a, dict):
        assert [*a] == [*b]
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert a == b


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("name", ALIKE)
def test_micro_batches_are_those_of_default_collate(name, share):
    for sizes in SIZES:
        samples, each = samples_of(ALIKE[name], sizes)
        columns = collate_columns(samples, sizes, share=share)
        assert columns is not None
        assert_same(columns.parts(), [default_collate(own) for own in each])


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("name", UNLIKE)
def test_what_is_not_alike_is_left_to_default_collate(name, share):
    sizes = (8, 8, 8, 6)
    samples, _ = samples_of(UNLIKE[name], sizes)
    assert collate_columns(samples, sizes, share=share) is None


def test_a_write_to_one_micro_batch_is_none_to_another():
    samples, _ = samples_of(ALIKE["tensors"], (8, 8))
    columns = collate_columns(samples, (8, 8))
    assert columns is not None
    (first, _), (second, _) = columns.parts()
    weight = torch.ones((), requires_grad=True)
    loss = (first * weight).sum()
    second.add_(1)
    loss.backward()  # or an error: a tensor that is needed has been changed
    assert torch.equal(first, X[10:18])


def test_functions_that_a_program_registers_are_noticed(monkeypatch):
    assert collates_as_torch()
    monkeypatch.setitem(default_collate_fn_map, tuple, lambda batch, *, collate_fn_map: batch)
    assert not collates_as_torch()
