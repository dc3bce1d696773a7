"""What ranks find in their environment, and that it is enough for torch.distributed."""

import inspect
import re
import signal

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from unisono.launch.environment import job_environment, program_arguments, rank_environment
from unisono.machine import usable_cores

REPORT = """
    import json, os
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    print(json.dumps({**os.environ, "total": total.item(), "threads": torch.get_num_threads()}))
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("fixture", "ranks"),
    [
        pytest.param("fresh_launcher", 1, marks=pytest.mark.soak),
        pytest.param("fresh_launcher", 2, marks=pytest.mark.soak),
        ("warm_launcher", 4),
        pytest.param("fresh_launcher", 4, marks=pytest.mark.soak),
    ],
)
def test_ranks_find_torchruns_variables_and_each_other(request, fixture, ranks):
    launcher = request.getfixturevalue(fixture)
    result = launcher.run_script(REPORT, ranks=ranks)
    assert (result.returncode, result.stderr) == (0, "")
    found = launcher.values(result)
    assert sorted(found) == list(range(ranks))
    port, run_id = found[0]["MASTER_PORT"], found[0]["TORCHELASTIC_RUN_ID"]
    threads = max(1, usable_cores() // ranks)
    for rank, variables in found.items():
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "default",
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "ROLE_WORLD_SIZE": str(ranks),
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": str(threads),
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            "TP_SOCKET_IFNAME": "lo",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        }
        assert {name: variables.get(name) for name in expected} == expected
        if fixture == "fresh_launcher":  # torch reads the variable when it is imported
            assert variables["threads"] == threads
        assert variables["total"] == ranks * (ranks + 1) / 2
    assert [rank for rank in found if "UNISONO_EVENTS_FD" in found[rank]] == [0]


def test_jobs_side_by_side_do_not_meet(warm_launcher):
    script = warm_launcher.write("script.py", REPORT)
    jobs = [warm_launcher.start("run", "-n", "2", script) for _ in range(2)]
    outputs = [job.communicate(timeout=60) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    assert all(out.count(b'"total": 3.0') == 2 for out, _ in outputs)


def test_the_users_settings_stay():
    mine = {"OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0", "OTHER": "x"}
    assert job_environment(mine, ranks=2, cores=8).items() >= mine.items()


@pytest.mark.parametrize("name", ["UNISONO_EVENTS_FD", "TORCHELASTIC_ERROR_FILE"])
def test_what_belongs_to_an_outer_launchers_rank_is_not_passed_on(name):
    assert name not in job_environment({name: "5"}, ranks=1, cores=1)


def test_every_variable_of_torchruns_agent_is_set():
    source = inspect.getsource(LocalElasticAgent._start_workers)
    names = set(re.findall(r'^ {16}"([A-Z_]+)":', source, re.MULTILINE))
    assert {"RANK", "MASTER_PORT", "ROLE_WORLD_SIZE"} <= names
    ours = {**job_environment({}, ranks=2, cores=2), **rank_environment(0, ranks=2, port=1, run_id="a")}
    assert names | {"LOCAL_RANK", "OMP_NUM_THREADS"} <= ours.keys()


@pytest.mark.parametrize(
    ("visible", "devices"), [(None, ["0", "1", "2"]), ("4, 6,7", ["4", "6", "7"]), ("GPU-a,GPU-b,GPU-c", None)]
)
def test_under_virtual_local_rank_each_rank_sees_its_gpu_as_the_only_one(visible, devices):
    for rank in range(3):
        variables = rank_environment(rank, ranks=3, port=1, run_id="a", virtual_local_rank=True, visible_gpus=visible)
        assert (variables["RANK"], variables["LOCAL_RANK"]) == (str(rank), "0")
        assert variables["CUDA_VISIBLE_DEVICES"] == (devices or visible.split(","))[rank]
    assert "CUDA_VISIBLE_DEVICES" not in rank_environment(0, ranks=3, port=1, run_id="a", visible_gpus="4,6,7")


def test_what_a_job_sets_is_passed_on():
    signals = (signal.SIGTERM, signal.SIGUSR1)
    variables = rank_environment(
        0, ranks=1, port=1, run_id="a", role="x", signals=signals, error_file="/logs/error.json"
    )
    assert variables["ROLE_NAME"] == "x"
    assert variables["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGUSR1"
    assert variables["TORCHELASTIC_ERROR_FILE"] == "/logs/error.json"


def test_a_local_rank_is_filled_in_where_the_arguments_ask_for_it():
    given = ["--log=out.${local_rank}.txt", "$HOME", "$$"]
    assert program_arguments(given, local_rank="3", passed=False) == ["--log=out.3.txt", "$HOME", "$$"]
    assert program_arguments(["--lr"], local_rank="3", passed=True) == ["--local-rank=3", "--lr"]


def test_restarts_are_counted():
    variables = rank_environment(0, ranks=1, port=1, run_id="a", restarts=2, max_restarts=3)
    assert (variables["TORCHELASTIC_RESTART_COUNT"], variables["TORCHELASTIC_MAX_RESTARTS"]) == ("2", "3")
