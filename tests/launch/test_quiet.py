"""A job in which nothing goes wrong prints what the script prints, and nothing else."""

import json
from contextlib import ExitStack

import pytest

from printed import printed

TRAIN = """
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 8))
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (batch,) in DataLoader(data, batch_size=4, sampler=DistributedSampler(data), num_workers=2):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    total = torch.ones(1)
    dist.all_reduce(total)
    print("done", int(total))
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("fixture", "ranks"), [("warm_launcher", 1), pytest.param("fresh_launcher", 2, marks=pytest.mark.soak)]
)
def test_a_quiet_script_is_quiet(request, fixture, ranks):
    result = request.getfixturevalue(fixture).run_script(TRAIN, ranks=ranks)
    assert (result.stderr, result.returncode) == ("", 0)
    assert printed(result.stdout) == {rank: [f"done {ranks}"] for rank in range(ranks)}


def test_a_group_that_is_not_destroyed_is_no_reason_to_speak(warm_launcher):
    result = warm_launcher.run_script(TRAIN.replace("dist.destroy_process_group()", ""))
    assert (result.stderr, result.returncode) == ("", 0)


@pytest.mark.soak
def test_ten_jobs_run_side_by_side(warm_launcher):
    script = warm_launcher.write(
        "script.py",
        """
        import json, os, sys, torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, sys.argv[1])
        print(json.dumps([told, os.environ["MASTER_PORT"]]))
        dist.barrier()
        """,
    )
    with ExitStack() as stack:
        jobs = [stack.enter_context(warm_launcher.start("run", "-n", "2", script, str(number))) for number in range(10)]
        results = [(*job.communicate(timeout=120), job.returncode) for job in jobs]
    ports = set()
    for number, (out, err, code) in enumerate(results):
        assert (err, code) == (b"", 0)
        (first,), (second,) = printed(out.decode()).values()
        told, port = json.loads(first)
        assert (told, second) == ([str(number)] * 2, first)
        ports.add(port)
    assert len(ports) == 10


@pytest.mark.parametrize("attempt", [0, *(pytest.param(i, marks=pytest.mark.soak) for i in (1, 2))])
def test_a_thread_that_is_late_at_the_end_does_not_abort_a_rank(warm_launcher, attempt):
    # A thread of gloo frees the last tensors, for which it needs the interpreter, while that is going down.
    result = warm_launcher.run_script(
        """
        import sys
        import torch, torch.distributed as dist
        sys.setswitchinterval(100)
        dist.init_process_group("gloo")
        for _ in range(5):
            told = [None] * 3
            dist.all_gather_object(told, "x" * 1000)
            part = torch.ones(1000)
            work = dist.all_gather([torch.empty(1000) for _ in told], part, async_op=True)
            work.wait()
            del work, part
        """,
        ranks=3,
    )
    assert (result.stdout, result.stderr, result.returncode) == ("", "", 0)


def test_a_long_path_of_the_temporary_folder_does_not_hold_up_a_dataloader(warm_launcher):
    # A worker hands a tensor over through a socket, whose path has 107 bytes at most.
    folder = warm_launcher.folder / ("x" * 100)
    folder.mkdir()
    warm_launcher.environment["TMPDIR"] = str(folder)
    result = warm_launcher.run_script(
        """
        from torch.utils.data import DataLoader
        print(sum(int(batch.sum()) for batch in DataLoader(list(range(20)), batch_size=4, num_workers=2)))
        """
    )
    assert (printed(result.stdout), result.stderr, result.returncode) == ({0: ["190"], 1: ["190"]}, "", 0)
