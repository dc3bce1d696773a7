"""With --max-restarts, a job whose ranks fail starts them anew, as a whole, until the budget is used up."""

import json
import re
import signal
from pathlib import Path

import pytest

from printed import printed

RESUMABLE = Path(__file__).parents[1] / "trainer" / "programs" / "resumable.py"

# Each rank tells of its attempt. The ranks meet first: an error after that is not taken for a mistake in the script.
MEET = """
    import json, os, signal, sys, time
    import torch, torch.distributed as dist
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    dist.init_process_group("gloo")
    total = torch.tensor([rank + 10.0 * attempt])
    dist.all_reduce(total)
    print(json.dumps([attempt, os.environ["TORCHELASTIC_MAX_RESTARTS"], os.environ["MASTER_PORT"], total.item()]))
"""


def notes(result):
    """The launcher's own lines on standard error that tell of restarts."""
    return [line for line in result.stderr.splitlines() if "again" in line]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise ValueError('bad batch')", "rank 1 failed: ValueError: bad batch"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 was killed by SIGKILL"),
        pytest.param("os._exit(7)", "rank 1 exited with code 7", marks=pytest.mark.soak),
    ],
)
def test_ranks_meet_afresh_after_a_failure(warm_launcher, fault, words):
    script = f"{MEET}    if rank == 1 and attempt < 2:\n        {fault}\n    dist.barrier()\n"
    result = warm_launcher.run("run", "-n", "2", "--max-restarts", "2", warm_launcher.write("script.py", script))
    assert result.returncode == 0, result.stderr
    lines = {rank: [json.loads(line) for line in lines] for rank, lines in printed(result.stdout).items()}
    port = lines[0][0][2]
    told = [[0, "2", port, 1.0], [1, "2", port, 21.0], [2, "2", port, 41.0]]
    assert lines == {0: told, 1: told}
    assert notes(result) == [
        f"unisono: {words}; starting all 2 ranks again (restart 1 of 2)",
        f"unisono: {words}; starting all 2 ranks again (restart 2 of 2)",
    ]
    assert result.stderr.splitlines() == notes(result)


def test_the_budget_is_one_for_all_ranks(warm_launcher):
    script = f"{MEET}    if rank == attempt:\n        raise ValueError(f'rank {{rank}}')\n    time.sleep(100)\n"
    result = warm_launcher.run("run", "-n", "3", "--max-restarts", "1", warm_launcher.write("script.py", script))
    assert result.returncode == 1
    first, *report = result.stderr.splitlines()
    assert first == "unisono: rank 0 failed: ValueError: rank 0; starting all 3 ranks again (restart 1 of 1)"
    assert report[0] == "unisono: rank 1 failed: ValueError: rank 1"


def test_the_same_error_twice_before_any_collective_is_not_tried_again(warm_launcher):
    result = warm_launcher.run(
        "run", "--max-restarts", "5", warm_launcher.write("script.py", "print('ran')\n{}['key']")
    )
    assert (result.stdout, result.returncode) == ("[0] ran\n" * 2, 1)
    assert notes(result) == [
        "unisono: rank 0 failed: KeyError: 'key'; starting it again (restart 1 of 5)",
        "  note         the same error twice before any collective: not restarted again (4 of 5 left)",
    ]


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_the_same_error_after_a_reduction_of_ddp_is_tried_again(warm_launcher, backend):
    # The program calls no collective itself: what DDP does is not seen from Python.
    script = """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] != "2":
            raise ValueError("bad batch")
        print("done")
    """
    result = warm_launcher.run(
        "run", "-n", "2", "--max-restarts", "2", "--cpu-backend", backend, warm_launcher.write("script.py", script)
    )
    assert (printed(result.stdout), result.returncode) == ({0: ["done"], 1: ["done"]}, 0), result.stderr
    assert len(notes(result)) == 2


def test_a_signal_twice_is_tried_again(warm_launcher):
    script = "import os\nprint('ran')\nif os.environ['TORCHELASTIC_RESTART_COUNT'] != '2': os.kill(os.getpid(), 9)"
    result = warm_launcher.run("run", "--max-restarts", "3", warm_launcher.write("script.py", script))
    assert (result.stdout, result.returncode) == ("[0] ran\n" * 3, 0)
    assert len(notes(result)) == 2


def test_nothing_of_the_old_generation_runs_beside_the_new_one(warm_launcher):
    script = warm_launcher.write(
        "script.py",
        """
        import os, subprocess, time
        from pathlib import Path
        import torch.distributed as dist
        from torch.utils.data import DataLoader

        class Numbers(list):
            def __getitem__(self, index):
                Path(f"worker.{os.getpid()}").touch()
                return index

        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            batches = iter(DataLoader(Numbers(range(100)), num_workers=2))
            next(batches), next(batches)  # one of each worker
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            Path(f"child.{child.pid}").touch()
            dist.init_process_group("gloo")
            dist.barrier()
            if os.environ["RANK"] == "0":
                os.kill(os.getpid(), 9)
            time.sleep(1000)
        old = [path.name.partition(".")[2] for path in [*Path().glob("worker.*"), *Path().glob("child.*")]]
        print(len(old), sum(Path("/proc", pid).exists() for pid in old))
        """,
    )
    result = warm_launcher.run("run", "-n", "2", "--max-restarts", "1", script)
    said = {line.partition("] ")[2] for line in result.stdout.splitlines()}  # equal lines merge if they come together
    assert (said, result.returncode) == ({"6 0"}, 0), result.stderr


def test_each_attempt_has_its_log_files_and_its_report(warm_launcher):
    script = warm_launcher.write(
        "script.py", f"{MEET}    if rank == 1:\n        raise ValueError(f'attempt {{attempt}}')\n"
    )
    result = warm_launcher.run("run", "-n", "2", "--max-restarts", "1", "--log-dir", "logs", "--rdzv-id", "a", script)
    assert result.returncode == 1
    folder = warm_launcher.folder / "logs" / "a"
    for attempt in range(2):
        report = json.loads((folder / f"attempt_{attempt}" / "report.json").read_text())
        assert f"attempt {attempt}" in json.dumps(report)
        assert json.loads((folder / f"attempt_{attempt}" / "0" / "stdout.log").read_text())[0] == attempt
        assert f"ValueError: attempt {attempt}" in (folder / f"attempt_{attempt}" / "1" / "stderr.log").read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["attempt_0", "attempt_1"]


def test_ctrl_c_while_ranks_fail_ends_the_job(warm_launcher):
    job = warm_launcher.start(
        *("run", "-n", "2", "--max-restarts", "5"),
        warm_launcher.write(
            "script.py",
            """
            import os, signal, time
            from pathlib import Path
            signal.signal(signal.SIGTERM, lambda *_: print("asked to end"))
            if os.environ["RANK"] == "0":
                while not Path("up").exists():
                    time.sleep(0.01)
                raise ValueError("bad batch")
            Path("up").touch()
            while True:
                time.sleep(100)
            """,
        ),
    )
    assert job.stdout.readline() == b"[1] asked to end\n"
    job.send_signal(signal.SIGINT)
    out, err = job.communicate(timeout=60)
    assert (out, job.returncode) == (b"", 1)
    assert b"rank 0 failed: ValueError: bad batch" in err
    assert b"again" not in err
    assert err.endswith(b"unisono: interrupted\n")


def test_a_killed_training_goes_on_to_the_same_bits(warm_launcher):
    script = warm_launcher.write(
        "once.py",
        f"""
        import os, runpy, sys
        if os.environ["RANK"] != "1" or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
            del sys.argv[2:]
        sys.argv += ["--virtual-ranks", "4", "--steps", "7"]
        runpy.run_path({str(RESUMABLE)!r}, run_name="__main__")
        """,
    )
    digests = []
    for name, fault in [("calm", []), ("hurt", ["--die-at", "4", "--phase", "loss"])]:
        (warm_launcher.folder / name).mkdir()
        result = warm_launcher.run("run", "-n", "2", "--max-restarts", "1", script, name, *fault)
        assert result.returncode == 0, result.stderr
        assert len(notes(result)) == len(fault) // 4
        digests += re.findall("weights sha256: ([0-9a-f]+)", result.stdout)
    assert len(digests) == 2
    assert digests[0] == digests[1]
