"""Micro-batches of workers arrive as they were sent, in few pieces of memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import default_collate

from unisono.data.columns import collate_columns
from unisono.data.packing import PackedBatch, pack_tensors, unpack_tensors


class Pair(NamedTuple):
    x: Any
    y: Any


def same(a, b):
    if isinstance(a, torch.Tensor):
        return type(a) is type(b) and a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


MICRO_BATCHES = [
    [[torch.randn(3, 2), torch.tensor(1)], [torch.randn(1, 2), torch.tensor(2)]],
    [{"a": (torch.arange(3), "text"), 5: None}, {"a": (torch.arange(4), "other"), 5: 1.5}],
    [Pair(torch.zeros(2, dtype=torch.bool), [torch.tensor(1j)]), Pair(torch.ones(0), [torch.tensor(2.0)])],
    [[torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(4, 4).t(), torch.arange(9)[2:5]]],
    [torch.randn(2).to_sparse().coalesce().indices(), torch.randn(3).bfloat16()],
    [],
    [3, "a"],
]


@pytest.mark.parametrize("micro_batches", MICRO_BATCHES, ids=range(len(MICRO_BATCHES)))
def test_what_is_packed_is_unpacked(micro_batches):
    packed = pack_tensors(micro_batches)
    assert isinstance(packed, PackedBatch)
    assert same(unpack_tensors(packed), micro_batches)


def test_labels_and_images_travel_in_two_pieces_whatever_the_number_of_micro_batches():
    micro_batches = [[torch.randn(5, 700), torch.arange(5)] for _ in range(8)]
    for pinned in (False, True):
        packed = pack_tensors(micro_batches, pinned=pinned)
        images, labels = packed.pieces
        assert images.is_shared()
        assert labels.is_shared() if pinned else type(labels) is bytes  # few bytes need no shared memory
        found = unpack_tensors(packed)
        assert all(tensor.data_ptr() % 64 == 0 for items in found for tensor in items)
        assert found[0][1].untyped_storage().nbytes() == 8 * 64
        assert same(found, micro_batches)


def test_micro_batches_that_are_in_shared_memory_already_are_put_together():
    micro_batches = [[torch.arange(3.0 + i).share_memory_()] for i in range(3)]
    assert same(unpack_tensors(pack_tensors(micro_batches)), micro_batches)


@pytest.mark.parametrize("width", [3, 4096])
@pytest.mark.parametrize("pinned", [False, True])
def test_columns_are_cut_up_where_they_arrive(width, pinned):
    samples = [(torch.full((width,), float(i)), torch.tensor(i), str(i)) for i in range(11)]
    columns = collate_columns(samples, (4, 4, 3), share=True)
    packed = pack_tensors(columns, pinned=pinned)
    if pinned:  # what torch's copying into page-locked memory does to tuples
        packed = packed._replace(found=packed.found._replace(sizes=[*packed.found.sizes]))
    found = unpack_tensors(packed)
    assert len(packed.pieces) == 2
    assert same(found, [default_collate(samples[a:b]) for a, b in ((0, 4), (4, 8), (8, 11))])
    assert all(tensor.data_ptr() % 64 == 0 for items in found for tensor in items[:2])


def test_a_tensor_that_occurs_twice_is_one_and_a_write_is_none_to_others():
    ids = torch.arange(4.0)
    packed = pack_tensors([{"ids": ids, "labels": ids}, {"ids": ids.clone(), "labels": ids.clone()}])
    first, second = unpack_tensors(packed)
    assert first["ids"] is first["labels"]
    before = second["ids"]._version
    first["ids"].add_(1)
    assert second["ids"]._version == before
    assert torch.equal(second["ids"], torch.arange(4.0))
