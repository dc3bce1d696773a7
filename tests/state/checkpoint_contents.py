"""What tests write into checkpoints, and how they compare and damage it."""

import torch

FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]


def groups(value=1.0):
    return {
        "model": {"w": torch.full((30, 4), value), "b": torch.full((4,), value, dtype=torch.bfloat16)},
        "optimizer": {"0.step": torch.tensor(value)},
    }


def flip(path, index, bit):
    data = bytearray(path.read_bytes())
    data[index] ^= 1 << bit
    path.write_bytes(data)


def assert_equal(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), plain.reshape(-1).view(torch.uint8)), name
