"""Equal values have equal digests, whatever their layout; different values have different ones."""

import hashlib
import itertools
import math
import struct

import pytest
import torch

from unisono.errors import CheckpointError
from unisono.state.digest import digest, exact, memory

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e8m0fnu,
]  # fmt: skip


def test_all_these_values_differ():
    zeros = torch.zeros(6)
    values = [
        None, True, False, 0, 1, -1, 2**70, 0.0, -0.0, 1.0, math.nan, -math.nan, 0j, complex(0.0, -0.0), "", "1", b"",
        b"1", torch.float32, torch.int32, [], (), {}, [[]], [1, 2], [[1, 2]], [[1], 2], (1, 2), {"a": 1}, {"a": {}},
        {1: 0}, {"1": 0}, ["ab", "c"], ["a", "bc"], ["abc"], zeros, zeros.view(2, 3), zeros.view(3, 2), zeros.double(),
        zeros.int(), -zeros, zeros[:0], zeros[:0].view(0, 5), torch.tensor(0.0), torch.zeros(1), [zeros, zeros],
        *(torch.zeros(2, dtype=dtype) for dtype in DTYPES),
    ]  # fmt: skip
    digests = [digest({"x": value}) for value in values]
    pairs = [(a, b) for a, b in itertools.combinations(range(len(values)), 2) if digests[a] == digests[b]]
    assert pairs == []


def test_names_and_their_borders_count():
    entries = [{"ab": 1, "c": 2}, {"a": 1, "bc": 2}, {"ab": 2, "c": 1}, {"ab": 1}, {"ab": 1, "c": {}}, {}]
    assert len({digest(entry) for entry in entries}) == len(entries)


def test_order_strides_parameters_and_views_do_not_count():
    base = torch.randn(4, 6, dtype=torch.bfloat16)
    plain = digest({"a": base, "b": {"x": 1, 2: "y"}})
    assert plain == digest({"b": {2: "y", "x": 1}, "a": base.t().contiguous().t()})
    assert plain == digest({"a": torch.nn.Parameter(base), "b": {"x": 1, 2: "y"}})
    wide = torch.zeros(4, 12, dtype=torch.bfloat16)
    wide[:, ::2] = base
    assert plain == digest({"a": wide[:, ::2], "b": {"x": 1, 2: "y"}})
    number = torch.tensor([1 + 2j])
    assert digest({"a": number.conj()}) == digest({"a": torch.tensor([1 - 2j])})
    assert digest({"a": torch.ones(1).expand(3)}) == digest({"a": torch.ones(3)})


def test_every_bit_counts():
    value = torch.randn(1000)
    bits = value.view(torch.int32)
    before = digest({"a": value})
    for index in (0, 500, 999):
        for bit in (0, 17, 31):
            bits[index] ^= 1 << bit if bit < 31 else -(2**31)
            assert digest({"a": value}) != before
            bits[index] ^= 1 << bit if bit < 31 else -(2**31)
    assert digest({"a": value}) == before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (2, 3)], ids=str)
def test_memory_is_the_tensors_bytes(dtype, shape):
    raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
    tensor = raw.view(dtype).view(shape)
    assert memory(tensor).tobytes() == bytes(raw.flatten().tolist())


def test_memory_keeps_what_it_sees_alive():
    views = [memory(torch.full((1000,), index, dtype=torch.int32)) for index in range(50)]
    assert [struct.unpack("<1000i", view)[999] for view in views] == list(range(50))


def test_the_digest_is_stable_over_versions():
    # A change of this value makes every digest that users wrote down worthless.
    data = b"".join(struct.pack("<f", value) for value in (1.0, -0.0))
    part = b"S" + struct.pack("<Q", 1) + b"w"
    head = b"T" + struct.pack("<Q", 15) + b"torch.float32;2" + struct.pack("<Q", 8)
    expected = hashlib.sha256(
        b"M" + struct.pack("<Q", 1) + b"K" + struct.pack("<Q", len(part)) + part + head + data
    ).hexdigest()
    assert digest({"w": torch.tensor([1.0, -0.0])}) == expected


def test_other_values_are_refused_by_path():
    with pytest.raises(TypeError, match=r"a\.b\.1 is a <class 'object'>"):
        digest({"a": {"b": [1, object()]}})
    with pytest.raises(TypeError, match="tensor as a key"):
        digest({"a": {torch.ones(1): 1}})


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.eye(3).to_sparse(), "to_dense"),
        (torch.ones(3, device="meta"), "meta device"),
    ],
    ids=["sparse", "meta"],
)
def test_tensors_without_plain_memory_are_refused(tensor, reason):
    with pytest.raises(CheckpointError, match=rf"tensor 'model\.w' .*{reason}"):
        exact(tensor, "model.w")


def test_freed_memory_is_refused():
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(CheckpointError, match="storage was freed"):
        exact(tensor, "w")
