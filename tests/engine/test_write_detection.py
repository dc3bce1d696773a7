"""Detection of writes to parameters, by version, address and value."""

from __future__ import annotations

import pytest
import torch

from unisono.engine.write_detection import WriteDetector

KINDS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def parameters() -> list[torch.nn.Parameter]:
    shapes = ((3, 5), (), (7,), (0,), (300, 200))
    return [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes for dtype in KINDS]


def write_first(p):
    p.data.view(-1)[0] = 2.0


def write_middle(p):
    p.data[tuple(size // 2 for size in p.shape)] = 3.0


def replace_data(p):
    p.data = p.data.clone()


def write_by_torch(p):
    with torch.no_grad():
        p.add_(0.0)


@pytest.mark.parametrize("write", [write_first, write_middle, replace_data, write_by_torch])
@pytest.mark.parametrize("count", [len(parameters()), 1])
def test_a_write_to_any_parameter_is_found(write, count):
    some = parameters()[:count]
    detector = WriteDetector(some)
    for p in some:
        if not p.numel():
            continue
        detector.remember()
        assert detector.written() is None
        write(p)
        assert detector.written() is p, (p.shape, p.dtype)


def test_nothing_is_found_where_there_are_no_values():
    empty = torch.nn.Parameter(torch.zeros(0))
    for detector in (WriteDetector([]), WriteDetector([empty])):
        detector.remember()
        assert detector.written() is None
