"""Every value comes back exactly, types too; every other value is refused by its path."""

import collections
import enum
import functools
import io
import json
import math
import pathlib
import random
import struct

import pytest
import torch

from unisono.errors import CheckpointError, CorruptCheckpointError
from unisono.state.codec import decode, encode, to_json
from unisono.state.safetensors_format import plan_file, read_tensors


def through_json(value):
    document, tensors = encode(value)
    return decode(json.loads(to_json(document)), tensors)


def same(a, b):
    """Equality to the bit, of types, of order in dicts."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(ka, kb) and same(va, vb) for (ka, va), (kb, vb) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


SCALARS = [
    None, True, False, 0, -1, 2**53, 2**53 + 1, -(2**64), 10**5000, 0.0, -0.0, 1.0, 0.1, 1e308, 5e-324, math.inf,
    -math.inf, math.nan, -math.nan, struct.unpack("d", struct.pack("Q", 0x7FF8_0000_0000_00AB))[0], "", "~", "a.b",
    "ü\udcff\0", b"", b"\0\xff", 1 + 2j, complex(-0.0, math.inf), torch.float32, torch.bfloat16, torch.float8_e8m0fnu,
    torch.device("cpu"), torch.device("cuda:3"), torch.Size([]), torch.Size([2, 3]), pathlib.Path("a/b"),
    pathlib.PurePosixPath("/x"), pathlib.PureWindowsPath("C:\\x"),
]  # fmt: skip


@pytest.mark.parametrize("value", SCALARS, ids=range(len(SCALARS)))
def test_scalars_come_back_exactly(value):
    assert same(through_json(value), value)


def nested(rng, depth):
    kind = rng.randrange(9) if depth else 0
    few = range(rng.randrange(4))
    match kind:
        case 1:
            return [nested(rng, depth - 1) for _ in few]
        case 2:
            return tuple(nested(rng, depth - 1) for _ in few)
        case 3:
            return {rng.choice(["a", "b.c", "~", "items", ""]): nested(rng, depth - 1) for _ in few}
        case 4:
            keys = [0, 1.5, None, "0", (1, "x"), ((),), b"k", frozenset({1})]
            return {rng.choice(keys): nested(rng, depth - 1) for _ in few}
        case 5:
            return set(rng.sample([1, "1", None, (2,), 2.5, b"1", math.inf], k=len(few)))
        case 6:
            return torch.randn(rng.randrange(3), 2)
        case 7:
            return collections.OrderedDict((key, nested(rng, depth - 1)) for key in few)
        case 8:
            return collections.Counter({3: 1, 7: 2})
    return rng.choice(SCALARS)


def test_nested_values_come_back_exactly():
    rng = random.Random(7)
    for _ in range(500):
        value = nested(rng, depth=5)
        assert same(through_json(value), value), value


def test_tensors_are_named_by_their_path():
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    document, tensors = encode({"state": {0: {"exp_avg": one}}, "groups": [{"lr": two}], "groups.0.lr": one})
    assert list(tensors) == ["state.0.exp_avg", "groups.0.lr", "groups.0.lr~2"]
    back = decode(document, tensors)
    assert back["groups"][0]["lr"] is not back["groups.0.lr"]
    assert torch.equal(back["groups"][0]["lr"], two)


def test_optimizer_and_scheduler_states_fit():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=torch.tensor(0.1), foreach=False)
    milestones = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    weight.grad = torch.ones(3)
    optimizer.step()
    for value in (optimizer.state_dict(), milestones.state_dict(), torch.nn.Linear(2, 2).state_dict()):
        assert same(through_json(value), value)


def test_numpy_scalars_become_plain_numbers():
    numpy = pytest.importorskip("numpy")
    value = {"a": numpy.float64(0.1), "b": numpy.int32(3), "c": numpy.bool_(True), "d": numpy.float32(0.1)}
    assert same(through_json(value), {"a": 0.1, "b": 3, "c": True, "d": float(numpy.float32(0.1))})


class Colour(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


class Stateful:
    def state_dict(self):
        return {}


@pytest.mark.parametrize(
    ("bad", "remedy"),
    [
        (lambda: 1, "Code is never stored"),
        (functools.partial(print), "Code is never stored"),
        (Colour.RED, r"int\(\.\.\.\)"),
        (Point(1, 2), r"tuple\(\.\.\.\)"),
        (collections.defaultdict(int), r"dict\(\.\.\.\)"),
        (torch.torch_version.TorchVersion("2.1"), r"str\(\.\.\.\)"),
        (Stateful(), r"state_dict\(\)"),
        (object(), "Convert it"),
        (torch.Generator(), "Convert it"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_types_are_refused_by_path_and_type(bad, remedy):
    with pytest.raises(
        CheckpointError, match=rf"^scheduler\.3\.fn is a <.*>, which a checkpoint cannot hold\. .*{remedy}"
    ):
        encode({"scheduler": {3: {"fn": bad}}})


def test_numpy_arrays_are_refused():
    numpy = pytest.importorskip("numpy")
    with pytest.raises(CheckpointError, match=r"rng\.1 is a <class 'numpy.ndarray'>.*as_tensor"):
        encode({"rng": ("MT19937", numpy.zeros(3))})


def test_tensors_as_keys_are_refused():
    for value in ({torch.ones(1): 1}, {torch.ones(1)}):
        with pytest.raises(CheckpointError, match="hash by identity"):
            encode({"x": value})


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: {0: x}, lambda x: (x,)], ids=["list", "dict", "tuple"])
def test_depth_has_a_limit_and_a_loop_is_an_error(wrap):
    value = 1
    for _ in range(60):
        value = wrap(value)
    assert same(through_json(value), value)
    with pytest.raises(CheckpointError, match="nested more than"):
        encode(wrap(value))
    loop = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="may contain itself"):
        encode(loop)


@pytest.mark.parametrize(
    "document",
    [
        {"~": "os.system", "items": ["true"]},
        {"~": ["tuple"]},
        {"~": "tuple"},
        {"~": "tuple", "items": "ab"},
        {"~": "dict", "items": [[1]]},
        {"~": "dict", "items": [[[], 1]]},
        {"~": "dtype", "name": "load"},
        {"~": "dtype", "name": "nothing"},
        {"~": "device", "name": "moon"},
        {"~": "tensor", "name": "missing"},
        {"~": "bytes", "base64": "!"},
        {"~": "float", "bits": "00"},
        {"~": "path", "kind": "Popen", "path": "x"},
    ],
    ids=str,
)
def test_a_document_that_encode_did_not_make_is_corrupt(document):
    with pytest.raises(CorruptCheckpointError, match=r"^a\.0 of the stored state"):
        decode({"a": [document]}, {})


def test_a_document_nested_without_end_is_corrupt():
    document = []
    for _ in range(400):
        document = [document]
    with pytest.raises(CorruptCheckpointError, match="nested more than"):
        decode(document, {})


def test_documents_that_would_not_read_back_equal_are_refused():
    for document in ({"a": (1, 2)}, {1: 2}, [math.nan], object(), b"x"):
        with pytest.raises(TypeError, match=r"document (is not JSON|would not come back equal)"):
            to_json(document)


def test_a_tensor_file_is_a_plain_safetensors_file_to_others():
    safetensors = pytest.importorskip("safetensors.torch")
    weight = torch.arange(6.0).view(2, 3)
    pieces, described = plan_file({"w": weight, "tied": weight, "n": torch.tensor(3)}, "model")
    data = pieces[0] + b"".join(bytes(tensor.flatten().view(torch.uint8).tolist()) for _, tensor in pieces[1:])
    assert set(safetensors.load(data)) == {"w", "n"}
    back = read_tensors(io.BytesIO(data).readinto, len(data), described)
    assert list(back) == ["w", "tied", "n"]
    assert torch.equal(back["tied"], weight)
