"""What a machine lacks for a job is found before any process starts."""

import socket

import pytest

from unisono.errors import LaunchError
from unisono.launch import LaunchJob, preflight
from unisono.launch.gpus import present_gpus
from unisono.launch.launch_job import Output
from unisono.launch.preflight import check_machine, is_this_machine, with_log_folder
from unisono.launch.source_scan import asks_for_nccl

NCCL = "import torch.distributed as dist\n{}\ndist.init_process_group({})\n"


@pytest.fixture
def gpus(monkeypatch):
    """Set how many GPUs there are."""
    return lambda count: monkeypatch.setattr(preflight, "usable_gpus", lambda _: count)


@pytest.mark.parametrize(
    ("source", "found", "asks"),
    [
        (NCCL.format("", "'nccl'"), 0, True),
        (NCCL.format("", "backend='nccl'"), 3, True),
        (NCCL.format("def f(): return 'nccl'", "f()"), 0, True),
        (NCCL.format("", "'cpu:gloo,cuda:nccl'"), 0, False),
        (NCCL.format("", "'nccl' if cuda else 'gloo'"), 3, False),
        (NCCL.format("# 'nccl' where there are GPUs", ""), 3, False),
        (NCCL.format('"""Uses nccl if it can."""', ""), 3, False),
        (NCCL.format("import torch", "'nccl' if torch.cuda.is_available() else None"), 0, False),
        (NCCL.format("import torch", "'nccl' if torch.cuda.is_available() else None"), 1, True),
        ("print('no backend')", 0, False),
    ],
)
def test_a_script_that_cannot_do_without_nccl_is_known_by_its_source(source, found, asks):
    assert asks_for_nccl(source.encode(), gpus=found) is asks


def test_ranks_that_need_a_gpu_each_are_not_more_than_the_gpus(gpus, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(NCCL.format("", "'nccl'"))
    gpus(3)
    check_machine(LaunchJob(target=str(script), ranks=3), environment={})
    gpus(None)
    check_machine(LaunchJob(target=str(script), ranks=4), environment={})
    gpus(3)
    with pytest.raises(LaunchError, match=r"asks for nccl.* has 3 GPUs .* for 4 ranks; start at most 3"):
        check_machine(LaunchJob(target=str(script), ranks=4), environment={})
    check_machine(LaunchJob(target=str(script), ranks=4, arguments=("--backend=gloo",)), environment={})
    script.write_text("print(1)")
    check_machine(LaunchJob(target=str(script), ranks=4), environment={})
    with pytest.raises(LaunchError, match=r"--numa-binding .* has 3 GPUs"):
        check_machine(LaunchJob(target=str(script), ranks=4, numa_binding="node"), environment={})


def test_every_rank_gets_an_entry_of_the_visible_gpus(gpus, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    job = LaunchJob(target=str(script), ranks=2, virtual_local_rank=True)
    gpus(0)
    check_machine(job, environment={})
    with pytest.raises(LaunchError, match=r"entry of CUDA_VISIBLE_DEVICES, and '5' has 1 for 2 ranks"):
        check_machine(job, environment={"CUDA_VISIBLE_DEVICES": "5"})
    gpus(1)
    with pytest.raises(LaunchError, match=r"has 1 GPU that torch can use, for 2 ranks; start at most 1"):
        check_machine(job, environment={})


def test_gpus_are_counted_by_their_files(tmp_path):
    assert present_gpus(tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    assert present_gpus(tmp_path) == 3
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    assert present_gpus(tmp_path) == 1


def test_a_port_that_nobody_has_is_free_and_one_that_listens_is_not(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        job = LaunchJob(target=str(script), master_port=taken.getsockname()[1])
        with pytest.raises(LaunchError, match="is in use; choose another, or leave the port out"):
            check_machine(job, environment={})
    check_machine(job, environment={})


def test_programs_are_looked_for_in_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    with pytest.raises(LaunchError, match=r"give its path, such as \./tool"):
        check_machine(LaunchJob(target="tool", python=False), environment={"PATH": "/nowhere"})
    with pytest.raises(LaunchError, match="cannot be executed; make it executable"):
        check_machine(LaunchJob(target="./tool", python=False), environment={})
    with pytest.raises(LaunchError, match="no such file"):
        check_machine(LaunchJob(target="./took", python=False), environment={})
    (tmp_path / "tool").chmod(0o755)
    check_machine(LaunchJob(target="tool", python=False), environment={"PATH": str(tmp_path)})


def test_this_machine_is_known_by_its_names_and_addresses():
    for host in ("localhost", "127.0.0.1", "127.1.2.3", socket.gethostname()):
        assert is_this_machine(host)
    for host in ("192.0.2.1", "[2001:db8::1]", "a b", "x" * 300):
        assert not is_this_machine(host)


def test_output_that_goes_to_files_only_gets_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight.tempfile, "tempdir", str(tmp_path))
    redirected = LaunchJob(target="x.py", output=Output(redirected={0: frozenset({"stdout"})}))
    folder = with_log_folder(redirected).output.directory
    assert folder is not None and folder.parent == tmp_path and folder.is_dir()
    teed = LaunchJob(target="x.py", output=Output(teed={0: frozenset({"stdout"})}))
    assert with_log_folder(teed) is teed
    placed = LaunchJob(target="x.py", output=Output(directory=tmp_path, redirected={0: frozenset({"stdout"})}))
    assert with_log_folder(placed) is placed
