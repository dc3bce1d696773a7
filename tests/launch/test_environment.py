"""What ranks find in their environment, and that it is enough for torch.distributed."""

import pytest

from unisono.launch.environment import job_environment, rank_environment
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


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_find_torchruns_variables_and_each_other(launcher, ranks):
    result = launcher.run_script(REPORT, ranks=ranks)
    assert (result.returncode, result.stderr) == (0, "")
    found = launcher.told(result)
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
        }
        assert {name: variables.get(name) for name in expected} == expected
        assert variables["threads"] == threads
        assert variables["total"] == ranks * (ranks + 1) / 2
    assert [rank for rank in found if "UNISONO_EVENTS_FD" in found[rank]] == [0]


def test_jobs_side_by_side_do_not_meet(launcher):
    script = launcher.write("script.py", REPORT)
    jobs = [launcher.start("run", "-n", "2", script) for _ in range(2)]
    outputs = [job.communicate(timeout=60) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    assert all(out.count(b'"total": 3.0') == 2 for out, _ in outputs)


def test_the_users_settings_stay():
    mine = {"OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "eth0", "OTHER": "x"}
    assert job_environment(mine, ranks=2, cores=8).items() >= mine.items()


def test_an_outer_launchers_pipe_is_not_passed_on():
    assert "UNISONO_EVENTS_FD" not in job_environment({"UNISONO_EVENTS_FD": "5"}, ranks=1, cores=1)


def test_restarts_are_counted():
    variables = rank_environment(0, ranks=1, port=1, run_id="a", restarts=2, max_restarts=3)
    assert (variables["TORCHELASTIC_RESTART_COUNT"], variables["TORCHELASTIC_MAX_RESTARTS"]) == ("2", "3")
