"""`replicate`: an unmodified loop gets the gradients of all ranks. For what they do together see the programs."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unisono.data import loader
from unisono.parallel import Replicas, replicate

PROGRAM = Path(__file__).parent / "programs" / "replicate.py"
CHECKS = (
    "like_one_process", "bits_of_ddp", "unused_parameters", "accumulation", "kept_gradients_keep_their_values",
    "sums_survive_autograd_grad", "checkpointing", "several_models", "frozen_and_changed", "types_and_layouts",
    "sparse_gradients", "buffers", "uneven_batches", "hooks", "compiled", "penalties_on_gradients", "groups",
    "failures", "wrong_models", "wrong_arguments", "weighted_by_the_loader", "borrowed_samples_count_as_nothing",
    "weights_of_kept_gradients", "loaders_that_do_not_fit", "weights_and_the_life_of_a_model", "late_ranks",
)  # fmt: skip
SENDING = (
    "like_one_process", "bits_of_ddp", "accumulation", "types_and_layouts", "sparse_gradients", "buffers",
    "uneven_batches", "hooks", "compiled", "failures", "wrong_models", "late_ranks",
)  # fmt: skip
"""Those to which it matters most how the ranks send. For one of them each rank has to compile."""
LOADER = loader(range(10), batch_size=4, rank=0, world_size=1)
OTHER = loader(range(10), batch_size=4, rank=1, world_size=2)


@pytest.mark.parametrize(
    ("ranks", "backend", "checks"),
    [
        (2, "gloo", SENDING),
        (3, "shm", tuple(name for name in CHECKS if name != "compiled")),
        pytest.param(2, "gloo", CHECKS, marks=pytest.mark.soak),
        pytest.param(3, "shm", CHECKS, marks=pytest.mark.soak),
        pytest.param(4, "gloo", CHECKS, marks=pytest.mark.soak),
        pytest.param(2, "shm", CHECKS, marks=pytest.mark.soak),
        pytest.param(4, "shm", CHECKS, marks=pytest.mark.soak),
    ],
)
def test_ranks_equal_one_process(fork_ranks, ranks, backend, checks):
    job = fork_ranks(ranks, PROGRAM, backend, *checks)
    for rank in range(ranks):
        assert tuple(job.lines(rank)) == checks


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "backend"), [(2, "gloo"), (3, "shm"), (4, "gloo"), (5, "shm")])
def test_random_models_and_uses_equal_one_process(fork_ranks, ranks, backend):
    count = 150 if ranks < 4 else 75  # more ranks than cores take turns
    job = fork_ranks(ranks, PROGRAM.with_name("replicate_random.py"), backend, 0, count)
    assert all(job.lines(rank)[-1] == "played" for rank in range(ranks))


_FAILS_ON_ONE_RANK = """
import torch
import unisono
from unisono.parallel import replicate

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise FloatingPointError("only here")

unisono.init("gloo")
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
replicate(model, bucket_mb=1e-4, first_bucket_mb=1e-4)
for step in range(4):
    x = model[:2](torch.ones(2, 8))
    model[2:](Fails.apply(x) if unisono.rank() == 1 and step == 2 else x).sum().backward()
"""


def test_a_failure_in_one_ranks_backward_is_the_jobs_cause(run_ranks):
    job = run_ranks(2, _FAILS_ON_ONE_RANK, code=1)
    assert "rank 1 failed: FloatingPointError: only here" in job.said


def test_one_process_needs_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    replicas = replicate({"only": model}, bucket_mb=1, average=False)
    assert isinstance(replicas, Replicas)
    assert replicas.world_size == 1
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    weighted = replicate(nn.Linear(2, 2), loader=LOADER)
    with pytest.raises(ValueError, match=r"join\(\) is for ranks with unequal numbers of batches"), weighted.join():
        pass
    with replicas.join(torch.optim.SGD(model.parameters())), replicas.no_sync():
        model(torch.randn(5, 3)).sum().backward()
    replicas.synchronize()
    replicas.update()
    replicas.check()
    assert all(p.grad is not None for p in model.parameters())
    replicas.close()


@pytest.mark.parametrize(
    ("models", "options", "error", "message"),
    [
        ("model", {}, TypeError, "models is a str: give a module, or a list or dict of modules"),
        ([nn.Linear(1, 1), 3], {}, TypeError, "model 1 is an int, and must be a torch.nn.Module"),
        ([], {}, ValueError, "no model was given"),
        (None, {"bucket_mb": 0}, ValueError, "bucket_mb=0 must be positive"),
        (None, {"first_bucket_mb": float("nan")}, ValueError, "first_bucket_mb=nan must be positive"),
        (None, {"buffers": "max"}, ValueError, 'buffers=\'max\' must be "broadcast", "mean" or None'),
        (None, {"comm_hook": 3}, TypeError, "comm_hook=3 must be a function"),
        (None, {"comm_hook": print, "average": False}, ValueError, "average=False and a comm_hook contradict"),
        (None, {"loader": [1, 2]}, TypeError, "loader is a list, which has no weights: give the object that unisono"),
        (None, {"loader": LOADER, "average": False}, ValueError, "average=False and a loader contradict each other"),
        (None, {"loader": OTHER}, ValueError, "loader reads the batches of rank 1 of 2, and here .* rank 0 of 1"),
        (None, {"bucket_mb": "1"}, TypeError, "bucket_mb='1' must be a number"),
        (None, {"timeout": "1"}, TypeError, "timeout='1' must be a number of seconds"),
        (None, {"timeout": timedelta(0)}, ValueError, "timeout=0 s must be positive"),
        (nn.LazyLinear(2), {}, ValueError, "'weight' of model has no shape yet: run a forward pass"),
        (nn.Linear(2, 2, device="meta"), {}, ValueError, "'weight' of model is on the meta device"),
    ],
)
def test_wrong_arguments(models, options, error, message):
    with pytest.raises(error, match=message):
        replicate(nn.Linear(2, 2) if models is None else models, **options)


def test_a_model_that_ddp_wraps_is_refused():
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    with pytest.raises(TypeError, match=r"model is wrapped in DistributedDataParallel.*, model\.module"):
        replicate(wrapped)


def test_the_type_of_new_tensors_does_not_matter_to_what_ranks_tell_each_other(fork_ranks):
    """In bfloat16 there is no 257, the number of a backward pass here."""
    fork_ranks(
        2,
        """
import torch, unisono
from unisono.parallel import replicate

torch.set_default_dtype(torch.bfloat16)
unisono.init()
model = torch.nn.Linear(2, 1)
replicate(model)
for _ in range(260):
    model(torch.ones(1, 2)).sum().backward()
assert model.weight.grad.dtype == torch.bfloat16
""",
    )
