"""The scripts of examples/notes run, print what they promise, and stay short enough to read."""

from __future__ import annotations

import ast
import gzip
import importlib.util
import re
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "examples" / "notes"
SCRIPTS = sorted(FOLDER.glob("*.py"))


def without_prefix(lines: list[str]) -> list[str]:
    return [re.sub(r"^\[[0-9,-]+\] ", "", line) for line in lines]


# Roles, and how ranks meet.


def test_roles(run_ranks):
    job = run_ranks(2, FOLDER / "roles.py")
    for rank in range(2):
        numbers = dict(re.match(r"(.+?)  +(\d)", line).groups() for line in job.lines(rank)[:5])
        assert numbers == {
            "rank": str(rank),
            "world size": "2",
            "local rank": str(rank),
            "local world size": "2",
            "node rank": "0",
        }
    assert job.lines(0)[-1] == "I am the main process"
    assert job.lines(1)[-1].startswith("master address and port: set")


def test_init_methods(fork_python):
    assert fork_python(FOLDER / "init_methods.py") == [
        f"{method}: 2 ranks met, 1 + 2 = 3" for method in ("tcp://", "file://", "env://")
    ]


# Collectives.


def test_six_collectives(fork_ranks):
    job = fork_ranks(3, FOLDER / "six_collectives.py")
    for rank in range(3):
        both = {"all_reduce": "6", "all_gather": "[1, 2, 3]", "broadcast": "10", "scatter": str(10 * (rank + 1))}
        both |= {"reduce": "6", "gather": "[1, 2, 3]"} if rank == 0 else {"reduce": "-", "gather": "-"}
        found = re.findall(r"^(\w+) +torch (.+?) +unisono (.+)$", "\n".join(job.lines(rank)), re.MULTILINE)
        assert {name: (torchs, ours) for name, torchs, ours in found} == {k: (v, v) for k, v in both.items()}
    assert [line.split() for line in job.lines(0)[-4:]] == [
        ["all_reduce", op, "is", value] for op, value in (("product", "6"), ("min", "1"), ("max", "3"), ("mean", "2"))
    ]


def test_object_collectives(fork_ranks):
    job = fork_ranks(2, FOLDER / "object_collectives.py")
    words = "['unison', 'octave']"
    for rank in range(2):
        at_rank_0 = words if rank == 0 else None
        assert job.lines(rank) == [
            f"torch    gather_object {at_rank_0}  all_gather_object {words}",
            f"unisono  gather {at_rank_0}  all_gather {words}",
            "losses by rank: [[0.0], [0.0, 1.0]]",
            "broadcast: best [0.5, 0.25]",
            "sum of a nested structure: {'seen': 21, 'right': (1, 5.0)}",
        ]


def test_different_sizes(fork_ranks):
    job = fork_ranks(3, FOLDER / "different_sizes.py")
    shapes = "[(0, 2), (1, 2), (2, 2)]"
    for rank, part in enumerate(([0, 1, 2], [3, 4], [5, 6])):
        assert job.lines(rank) == [
            f"all_gather  shapes {shapes}",
            "all_gather  joined [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]",
            f"gather      shapes {shapes if rank == 0 else None}",
            f"scatter     part {part}",
            f"all_to_all  got {[[r] * (rank + 1) for r in range(3)]}",
            "broadcast   transposed [[0, 3], [1, 4], [2, 5]]",
        ]


def test_differentiable_all_gather(fork_ranks):
    job = fork_ranks(2, FOLDER / "differentiable_all_gather.py")
    for rank in range(2):
        ours, torchs = job.lines(rank)
        assert ours == "unisono: the gradient is that of one process, 1.00 times as long"
        assert torchs == "torch  : the gradient is another one, 0.50 times as long"


def test_ring_all_reduce(fork_ranks):
    job = fork_ranks(3, FOLDER / "ring_all_reduce.py")
    for rank in range(3):
        assert job.lines(rank) == [
            "sum over the ring: [30.0, 33.0, 36.0, 39.0, 42.0, 45.0] - sent 8 numbers for 6",
            "as all_reduce says: True",
        ]


def test_barrier(fork_ranks):
    job = fork_ranks(3, FOLDER / "barrier.py")
    for rank in range(3):
        assert job.lines(rank) == [
            "behind the barrier: 3 of 3 ranks have come",
            "wrote the file" if rank == 0 else "found the file",
            f"{'FileNotFoundError' if rank == 0 else 'PeerError'} instead of a hang",
        ]


# Data.


def test_sampler_dealing(fork_ranks):
    job = fork_ranks(3, FOLDER / "sampler_dealing.py")
    for rank, dealt in enumerate(([0, 3, 6], [1, 4, 7], [2, 5, 8])):
        assert job.lines(rank)[:2] == [
            f"dealt: {dealt}",
            "same order without set_epoch: True  with it: False",
        ]
        assert job.lines(rank)[-1] == f"loader: {dealt}"
    assert job.lines(0)[2:4] == [
        "torch's sampler, 10 samples: [2, 2, 1, 1, 1, 1, 1, 1, 1, 1]",
        "unisono's sampler:           [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]",
    ]


def test_exact_tail(fork_ranks):
    job = fork_ranks(4, FOLDER / "exact_tail.py")
    assert [line for line in job.lines(0) if not line.startswith("samples of this rank")] == [
        "global batches: [16, 16, 16, 9, 9]  steps: 5",
        "every sample occurs 1 to 1 times",
        "with a resume in mid-epoch 1 to 1 times",
    ]
    counts = [int(line.split()[-1]) for rank in range(4) for line in job.lines(rank) if line.startswith("samples of")]
    assert counts == [17, 17, 16, 16]


# Models.


def test_ddp_as_ever(run_ranks):
    job = run_ranks(2, FOLDER / "ddp_as_ever.py")
    for rank in range(2):
        assert job.lines(rank)[:2] == ["last loss of this rank below 0.01: True", "weights equal on all ranks: True"]
    assert job.lines(0)[2:] == ["saved: weight, bias"]


def test_sync_batch_norm(fork_ranks):
    job = fork_ranks(2, FOLDER / "sync_batch_norm.py")
    assert [line.split()[-1] for line in job.lines(0)] == ["False", "True", "True", "True"]
    assert job.lines(1) == []


def test_unused_parameters(fork_ranks):
    lines = fork_ranks(2, FOLDER / "unused_parameters.py").lines(0)
    assert lines == [
        "DDP without the flag: Expected to have finished reduction in the prior iteration before starting a new one.",
        "DDP with find_unused_parameters: done",
        "replicate, without a flag: done",
        "the same weights as with DDP: True",
        "on all ranks: True",
    ]


def test_gan_two_forwards(fork_ranks):
    lines = fork_ranks(2, FOLDER / "gan_two_forwards.py").lines(0)
    assert lines == [
        "DDP: gradients equal on all ranks:       False",
        "replicate: gradients equal on all ranks: True",
        "trained: weights equal: True, forged samples lie where real ones do: True",
    ]


def test_save_without_prefix(fork_ranks):
    job = fork_ranks(2, FOLDER / "save_without_prefix.py")
    assert job.lines(0)[:-1] == [
        "DDP:       ['module.0.weight', 'module.0.bias']",
        "loading it into a plain model: Missing key(s) in state_dict",
        "with model.module: loaded",
        "replicate: ['0.weight', '0.bias']",
    ]
    assert job.lines(0)[-1] == job.lines(1)[-1] == "loaded on this rank, equal: True"


def test_data_parallel(fork_python):
    assert fork_python(FOLDER / "data_parallel.py") == [
        "outputs gathered: (32, 3)  gradients of the whole batch: True",
        "samples for each device: [8, 8, 8, 8]  gradients of the whole batch: True",
        "30 samples, cut into [7, 7, 8, 8]  gradients of the whole batch: True",
    ]


# Rank 0's voice.


def test_rank_zero_output(run_ranks):
    job = run_ranks(2, FOLDER / "rank_zero_output.py")
    assert job.lines(0) == ["every rank says this", "rank 0 says this for all", "done"]
    assert job.lines(1) == ["every rank says this"]
    assert "[rank 0/2] INFO notes: starting with 2 ranks" in job.err
    assert "[rank 1/2] WARNING notes: this rank has found an empty file" in job.err
    assert "[rank 1/2] INFO" not in job.err
    assert "100/100" in job.err


def test_tensorboard_on_rank_zero(fork_ranks, tmp_path):
    lines = fork_ranks(2, FOLDER / "tensorboard_on_rank_zero.py", "--folder", tmp_path / "curves").lines(0)
    if importlib.util.find_spec("tensorboard") is None:
        assert lines == ['TensorBoard is not installed: pip install "unisono[tensorboard]"']
        return
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tmp_path / "curves")).Reload().Scalars("loss")
    assert [event.step for event in events] == list(range(16))
    assert events[-1].value < 0.1 < events[0].value
    assert lines == [f"wrote 16 losses to {tmp_path / 'curves'}; the last is {events[-1].value:.4f}"]
    assert len(list((tmp_path / "curves").iterdir())) == 1  # one rank wrote


# Starting, and whole trainings.


def test_spawned_ranks(fork_python):
    lines = fork_python(FOLDER / "spawned_ranks.py")
    assert sorted(without_prefix(lines[:2])) == ["rank 0 of 2: local rank 0", "rank 1 of 2: local rank 1"]
    assert lines[2:] == ["both found 3.0; equal: True", "rank 1 failed: ValueError: wrong learning rate"]


def test_notebook_trainer_has_64_steps_on_one_rank_and_32_on_two(fork_python, run_ranks):
    alone = fork_python(FOLDER / "notebook_trainer.py", "--max-epochs", 2)
    assert alone[:2] == [f"[rank 0] epoch {epoch} | batch size 32 | steps 64" for epoch in range(2)]
    job = run_ranks(2, FOLDER / "notebook_trainer.py", "--max-epochs", 2)
    for rank in range(2):
        assert job.lines(rank)[:2] == [f"[rank {rank}] epoch {epoch} | batch size 32 | steps 32" for epoch in range(2)]
    for last in (alone[-1], job.lines(0)[-1]):
        assert float(re.fullmatch(r"last loss: (\d\.\d\d)", last)[1]) < 0.3


def test_mnist_learns_scikit_learns_digits(fork_ranks):
    lines = fork_ranks(2, FOLDER / "mnist.py").lines(0)
    assert lines[0] == "1438 images to train on, 359 to test"
    assert len(lines) == 5
    found = re.fullmatch(r"epoch 3: accuracy (\d\.\d{4}) \((\d+)/359\)", lines[-1])
    assert float(found[1]) == round(int(found[2]) / 359, 4) > 0.95


def write_idx(path: Path, data: torch.Tensor, *, packed: bool) -> None:
    header = bytes([0, 0, 8, data.dim()]) + b"".join(n.to_bytes(4, "big") for n in data.shape)
    content = header + data.to(torch.uint8).numpy().tobytes()
    if packed:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(content))
    else:
        path.write_bytes(content)


def test_mnist_reads_idx_files(fork_python, tmp_path):
    """Files as MNIST's, with pictures that are easily told apart: each class has its bright square."""
    for part, count in (("train", 320), ("t10k", 60)):
        labels = torch.arange(count) % 10
        images = torch.zeros(count, 4, 4)
        images[torch.arange(count), labels // 4, labels % 4] = 250
        images = images.repeat_interleave(3, 1).repeat_interleave(3, 2)
        write_idx(tmp_path / f"{part}-images-idx3-ubyte", images, packed=part == "train")
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte", labels, packed=part != "train")
    lines = fork_python(FOLDER / "mnist.py", "--data", tmp_path, "--batch-size", 32, "--epochs", 3)
    assert lines[0] == "320 images to train on, 60 to test"
    assert lines[-1] == "epoch 2: accuracy 1.0000 (60/60)"


# What holds for all of them.


def test_every_script_is_tested_here():
    tested = set(re.findall(r'"(\w+\.py)"', Path(__file__).read_text()))
    assert {script.name for script in SCRIPTS} == tested


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_short_and_say_how_to_run_them(script):
    text = script.read_text()
    assert len(text.splitlines()) < 80
    assert f" examples/notes/{script.name}" in (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[1]
    row = [line for line in (FOLDER / "README.md").read_text().splitlines() if f"({script.name})" in line]
    assert len(row) == 1
    assert f" examples/notes/{script.name}`" in row[0]
