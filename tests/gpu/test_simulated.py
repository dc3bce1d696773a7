"""What is for GPUs, on a device that is simulated where there is none: see tests/simulated_device.cpp.

It shows that no operator gets tensors of two devices, that storages come and go, and that autograd's threads are met;
not what a stream's delays or NCCL do.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ON_DEVICE = Path(__file__).parents[1] / "simulated_device.py"
PROGRAMS = Path(__file__).parents[1] / "trainer" / "programs"
WAYS_TO_TRAIN = Path(__file__).parent / "programs" / "ways_to_train.py"
WAYS = (
    "as whole models", "one by one", "overlap=False", "shards", "shards by size", "zero=1", "resumed",
    "resumed from shards", "Conv", "Attention", "channels_last", "fused", "capturable", "momentum", "bf16", "fp16",
    "clipped shards", "fp16 whole models", "fp16 shards", "resumed fused", "resumed capturable", "DiLoCo", "sparse",
    "tables", "pipeline", "interleaved pipeline", "tied", "tied pipeline", "fp16 pipeline",
)  # fmt: skip
"""Those of ways_to_train.py, but for an LSTM and torch.compile, which the device lacks."""
SAME = ("overlap=False", "shards", "shards by size", "zero=1", "pipeline", "interleaved pipeline", "resumed")


@pytest.fixture
def on_device(fork_ranks, simulated_device):
    """Run a program on ranks, and return the lines that all of them have printed."""

    def run(ranks, program, *args):
        job = fork_ranks(ranks, ON_DEVICE, simulated_device, program, *args)
        lines = [job.lines(rank) for rank in range(ranks)]
        assert lines == [lines[0]] * ranks
        return lines[0]

    return run


@pytest.fixture(scope="module")
def of_one_rank():
    """What programs print with one rank, once a test has asked for it."""
    return {}


@pytest.fixture
def alone(on_device, of_one_rank):
    def run(*command):
        if command not in of_one_rank:
            of_one_rank[command] = on_device(1, *command)
        return of_one_rank[command]

    return run


@pytest.mark.parametrize(
    ("ranks", "by"),
    [(2, "block"), (3, "named"), (3, "size"), (3, "zero1"), (4, "replicas"), (4, "size_replicas")],
)
def test_parts_of_ranks_change_no_bit(on_device, alone, ranks, by):
    whole = alone(PROGRAMS / "divided.py", "whole")
    assert len(whole) == 10
    assert on_device(ranks, PROGRAMS / "divided.py", by) == whole


@pytest.mark.parametrize(
    ("ranks", "schedule", "stages"),
    [(2, "gpipe", "2"), (3, "auto", "auto3"), (4, "1f1b", "2"), (4, "zero-bubble", "4"), (2, "interleaved", "4")],
)
def test_stages_and_replicas_change_no_bit(on_device, alone, ranks, schedule, stages):
    whole = alone(PROGRAMS / "cut.py", "1f1b", 1)
    assert len(whole) == 7
    assert on_device(ranks, PROGRAMS / "cut.py", schedule, stages) == whole


def ways(lines):
    return dict(re.findall(r"(.+) = ([0-9a-f]{64})", "\n".join(lines)))


def test_one_rank_has_one_digest_for_all_divisions(alone):
    found = ways(alone(WAYS_TO_TRAIN, "gloo", *WAYS))
    assert list(found) == [*WAYS]
    assert {found[way] for way in SAME} == {found["as whole models"]}
    assert found["tied pipeline"] == found["tied"]
    assert found["clipped shards"] == found["fused"]
    assert found["fp16 shards"] == found["fp16 whole models"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_have_the_digests_of_one(on_device, alone, ranks):
    assert on_device(ranks, WAYS_TO_TRAIN, "gloo", *WAYS) == alone(WAYS_TO_TRAIN, "gloo", *WAYS)
