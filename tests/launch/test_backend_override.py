"""Which backend a program gets in place of the one it asks for, with `--cpu-backend shm`."""

import pytest

from unisono.launch.backend_override import substitute_for
from unisono.launch.launch_job import LaunchJob


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("asked", ["gloo", "GLOO", "cpu:gloo"])
def test_gloo_for_the_cpu_is_replaced_on_every_machine(asked, accelerator):
    assert substitute_for(asked, "shm", accelerator=accelerator) == "shm"


@pytest.mark.parametrize("asked", ["undefined", "cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo", "cpu:gloo,cuda:gloo"])
def test_what_serves_an_accelerator_is_replaced_only_where_there_is_none(asked):
    assert substitute_for(asked, "shm", accelerator=False) == "shm"
    assert substitute_for(asked, "shm", accelerator=True) is None


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("asked", ["nccl", "mpi", "shm", "fake", "cuda:nccl", "cpu:mpi,cuda:nccl", "cuda:gloo"])
def test_other_backends_are_left_alone(asked, accelerator):
    assert substitute_for(asked, "shm", accelerator=accelerator) is None


def test_a_job_knows_two_backends_and_changes_python_only():
    assert LaunchJob(target="train.py").cpu_backend == "gloo"
    with pytest.raises(ValueError, match=r"'gloo' or 'shm'"):
        LaunchJob(target="train.py", cpu_backend="mpi")
    with pytest.raises(ValueError, match="leave out --no-python"):
        LaunchJob(target="simulate", python=False, cpu_backend="shm")
