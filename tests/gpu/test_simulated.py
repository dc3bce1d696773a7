"""What is for GPUs, on a device that is simulated where there is none: see tests/simulated_device.cpp.

It shows that no operator gets tensors of two devices, that storages come and go, and that autograd's threads are met;
not what a stream's delays or NCCL do.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ON_DEVICE = Path(__file__).parents[1] / "simulated_device.py"
PROGRAMS = Path(__file__).parents[1] / "trainer" / "programs"
LOOPS = Path(__file__).parents[1] / "parallel" / "programs"
PROGRAM = Path(__file__).parent / "programs" / "offloaded.py"
WAYS_TO_TRAIN = PROGRAM.with_name("ways_to_train.py")
WAYS = (
    "as whole models", "one by one", "overlap=False", "shards", "shards by size", "zero=1", "resumed",
    "resumed from shards", "Conv", "Attention", "channels_last", "fused", "capturable", "momentum", "bf16", "fp16",
    "clipped shards", "fp16 whole models", "fp16 shards", "resumed fused", "resumed capturable", "DiLoCo", "sparse",
    "tables", "divided tables", "clipped tables", "fp16 tables", "dynamic tables", "pipeline", "interleaved pipeline",
    "tied", "tied pipeline", "fp16 pipeline",
)  # fmt: skip
"""Those of ways_to_train.py, but for an LSTM and torch.compile, which the device lacks."""
SAME = ("overlap=False", "shards", "shards by size", "zero=1", "pipeline", "interleaved pipeline", "resumed")


@pytest.fixture
def on_device(fork_ranks, simulated_device):
    """Run a program on ranks, and return the lines that all of them have printed."""

    def run(ranks, program, *args):
        job = fork_ranks(ranks, ON_DEVICE, simulated_device, program, *args, variables={"DEVICE": "sim:0"})
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
    [
        (2, "block"), (3, "named"), (3, "size"), (3, "zero1"), (4, "replicas"), (4, "size_replicas"),
        (1, "offload"), (3, "offload"), (4, "offload_size"), (1, "offload_zero1"), (2, "offload_zero1"),
        (1, "sums_offload"), (3, "sums_offload"),
    ],
)  # fmt: skip
def test_parts_of_ranks_change_no_bit(on_device, alone, ranks, by):
    whole = alone(PROGRAMS / "divided.py", "whole")
    assert len(whole) == 10
    assert on_device(ranks, PROGRAMS / "divided.py", by) == whole


@pytest.mark.parametrize(
    ("ranks", "schedule", "stages"),
    [
        (2, "gpipe", "2"),
        (3, "auto", "auto3"),
        (4, "1f1b", "2"),
        (4, "zero-bubble", "4"),
        (2, "interleaved", "4"),
        (4, "zero3", "4"),
    ],
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


@pytest.mark.parametrize(
    ("ranks", "how"),
    [(2, "block"), (3, "size"), (3, "zero1"), (2, "built"), (1, "offload"), (3, "offload")],
)
def test_a_loop_of_ones_own_has_the_bits_of_one_process(on_device, alone, tmp_path, ranks, how):
    expected = alone(LOOPS / "shard_loop.py", f"shares={ranks}", "reference")
    assert on_device(ranks, LOOPS / "shard_loop.py", f"shares={ranks}", how, tmp_path) == expected


@pytest.mark.parametrize(("ranks", "how"), [(2, "size"), (3, "zero1"), (1, "built"), (3, "built")])
def test_two_optimizers_and_a_scaler_have_them_too(on_device, alone, tmp_path, ranks, how):
    """The parts of what is built stay on the CPU."""
    program = LOOPS / "shard_loop_optimizers.py"
    expected = alone(program, f"shares={ranks}", "reference")
    assert on_device(ranks, program, f"shares={ranks}", how, tmp_path) == expected


def test_synchronized_norms_within_a_divided_model(on_device, alone):
    expected = alone(LOOPS / "shard_sync_norm.py", "block")
    assert on_device(2, LOOPS / "shard_sync_norm.py", "block") == expected


@pytest.fixture
def undisturbed(alone, tmp_path_factory, of_one_rank):
    """What a run says that is neither divided nor interrupted."""
    if "undisturbed" not in of_one_rank:
        folder = tmp_path_factory.mktemp("undisturbed")
        of_one_rank["undisturbed"] = alone(PROGRAMS / "divided_saved.py", folder, "")
    (line,) = of_one_rank["undisturbed"]
    return line


@pytest.mark.parametrize(
    "parts",
    [
        [(3, "block"), (2, "block")],
        [(2, "zero1"), (4, "replicas"), (1, "")],
        [(4, "both"), (4, "both"), (2, "stages")],
        [(4, "parts"), (4, "parts"), (2, "block")],
        [(1, "offload"), (3, "offload"), (2, "block"), (1, "offload_zero1")],
        [(2, "offload_zero1"), (1, "offload"), (1, "")],
    ],
)
def test_a_run_goes_on_with_other_parts(on_device, tmp_path, undisturbed, parts):
    program, begun = PROGRAMS / "divided_saved.py", 0
    for ranks, how in parts[:-1]:
        on_device(ranks, program, tmp_path, how, f"max_steps={begun + 2}")
        begun += 2
    ranks, how = parts[-1]
    assert on_device(ranks, program, tmp_path, how) == [undisturbed.replace("from 0", f"from {begun}")]


@pytest.mark.parametrize(
    ("ranks", "name", "stages", "schedule"),
    [
        (4, "residual", "blocks.1,blocks.3,head", "zero-bubble"),
        (2, "language_model", "layers.1,layers.2,norm", "interleaved"),
    ],
)
def test_stages_in_a_loop_of_ones_own(fork_ranks, simulated_device, alone, ranks, name, stages, schedule):
    program = LOOPS / "cut_own_loop.py"
    losses, results, digest = json.loads(alone(program, name, stages, "1f1b")[-1])
    command = [ON_DEVICE, simulated_device, program, name, stages, schedule]
    job = fork_ranks(ranks, *command, variables={"DEVICE": "sim:0"})
    found = [json.loads(job.lines(rank)[-1]) for rank in range(ranks)]
    assert found == [[losses, results if rank == ranks - 1 else None, digest] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("how", "most"),
    [
        (["built", "offload"], {"made": 0.1, "steps": 0.35, "between": 0.01}),
        (["given", "offload"], {"made": 1.1, "steps": 0.35, "between": 0.01}),
        (["built", "offload", "shares", "sums"], {"made": 0.1, "steps": 0.35, "between": 0.01}),
        (["given", "offload", "zero1"], {"made": 1.1, "steps": 2.15, "between": 1.01}),
    ],
)
def test_what_is_kept_on_the_cpu_takes_no_memory_of_the_device(on_device, ranks, how, most):
    """As a part of the parameters: the whole state of AdamW is four times that."""
    (line,) = on_device(ranks, PROGRAM, *how)
    found = {name: float(value) for name, value in re.findall(r"(\w+) ([\d.]+)", line)}
    assert all(found[name] <= bound for name, bound in most.items()), line


def test_parts_on_the_device_are_those_of_the_rank(on_device):
    (line,) = on_device(4, PROGRAM, "built")
    assert re.fullmatch(r"made 0\.3\d, steps 1\.[23]\d, between 1\.0\d", line)


REFUSED = """
import torch, unisono
from torch import nn
from unisono.parallel import Pipeline, Shard, build, cut

def trainer(model, **options):
    optimizer = torch.optim.AdamW(model.parameters(), **options.pop("adam", {}))
    unisono.Trainer(model, optimizer, virtual_ranks=2, progress=False, **options)

def small(device="cpu"):
    return nn.Linear(4, 4, device=device)

shard = Shard(offload=True)
for call in (
    lambda: trainer(small(), parallel=shard, adam={"capturable": True}),
    lambda: trainer(build(small, parallel=shard), parallel=shard, device="cpu"),
    lambda: build(lambda: small("sim:0"), parallel=shard),
    lambda: build(small, parallel=shard, device="sim:7"),
    lambda: Shard(offload="yes"),
    lambda: cut(nn.Sequential(small(), small("sim:0")), Pipeline(stages=["1"])),
):
    try:
        call()
    except (ValueError, TypeError) as error:
        print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_cannot_be_is_refused(on_device, tmp_path, ranks):
    (script := tmp_path / "refused.py").write_text(REFUSED)
    capturable, elsewhere, there, missing, flag, several = on_device(ranks, script)
    assert "AdamW(capturable=True) updates on a GPU alone, and with Shard(offload=True)" in capturable
    assert "built by unisono.parallel.build for sim:0" in elsewhere
    assert "Trainer is to train on cpu" in elsewhere
    assert "has made 'weight' on sim:0: build the model on the CPU" in there
    assert "sim:7" in missing
    assert flag.startswith("TypeError: offload='yes'")
    assert "'1.weight' is on sim:0 and '0.weight' on cpu, and cut() takes a model on one device" in several
