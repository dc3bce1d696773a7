"""What `unisono top` shows of ranks: it fits, and names the slowest rank and the reason."""

import pytest

from unisono.cli.top_view import JobView, RankView, frame, mean_parts, measured, slowest
from unisono.launch.process_usage import gpu_memory

JOB = JobView(name="train.py", pid=4711, ranks=64, age_s=125.0)


def rank(number, *, state="sleeping", cores=1.0, waits=0.5, delay=0.0, **options):
    return RankView(rank=number, pid=5000 + number, state=state, cores=cores, waits=waits, delay=delay, **options)


@pytest.mark.parametrize("ranks", [0, 1, 8, 64])
@pytest.mark.parametrize(("width", "height"), [(200, 60), (80, 24), (40, 10), (20, 3), (1, 1)])
def test_a_picture_fits_and_shows_as_many_ranks_as_it_can(ranks, width, height):
    found = [
        rank(n, waits=0.9 if n else 0.1, doing="in all_reduce at a/very/long/path/train.py:7") for n in range(ranks)
    ]
    for first in (0, 7, 63):
        lines = frame(JOB, found, width=width, height=height, first=first)
        assert len(lines) <= height
        assert all(len(line) <= width for line in lines)
    if (width, height) == (80, 24):
        shown = [line for line in lines if " all_reduce " in line]
        assert len(shown) == {0: 0, 1: 1, 8: 8, 64: 17}[ranks]
        assert any(line.startswith("slowest: rank 0") for line in lines) == (ranks > 1)
        assert ("ranks 47-63 of 64: scroll with j and k" in lines) == (ranks == 64)


def test_a_run_is_shown_by_what_is_known_of_it():
    job = JobView(
        name="train.py", pid=4711, ranks=2, age_s=125.0, recoveries=1, step=50, steps=600, loss=float("nan"), lr=0.001,
        samples_per_s=1234.4, left_s=65.0, problem="the launcher does not answer: it is stopped",
    )  # fmt: skip
    lines = frame(job, [rank(0, memory=512 << 20), rank(1, gpu=1 << 30, state="stopped")], width=100, height=24)
    assert lines[:3] == [
        "train.py (job 4711) · 2 ranks · 0:02:05 · 1 recovery",
        "the launcher does not answer: it is stopped",
        "step 50 of 600 · loss nan · lr 0.001 · 1,234 samples/s · 0:01:05 left",
    ]
    assert lines[4].split() == ["RANK", "STATE", "CPU", "MEMORY", "GPU", "WAITS", "CALL"]
    assert lines[5].split() == ["0", "sleeping", "100", "%", "537", "MB", "-", "50", "%", "-"]
    assert lines[-1] == "slowest: rank 1, which is stopped: `kill -CONT 5001` has it go on."


def test_in_a_job_on_several_hosts_each_rank_has_its_host():
    job = JobView(name="train.py", pid=4711, ranks=2, hosts=2, age_s=125.0)
    ranks = [rank(0, host=0, waits=0.9), rank(1, host=1, waits=0.1)]
    lines = frame(job, ranks, width=100, height=24)
    assert lines[0] == "train.py (job 4711) · 2 ranks on 2 hosts · 0:02:05"
    assert lines[2].split()[:3] == ["RANK", "HOST", "STATE"]
    assert [line.split()[:2] for line in lines[3:5]] == [["0", "0"], ["1", "1"]]
    assert "slowest: rank 1 on host 1, by its computation" in "\n".join(lines)
    assert slowest([rank(1, host=1, state="stopped")]).endswith("`kill -CONT 5001` on host 1 has it go on.")


@pytest.mark.parametrize(
    ("slow", "reason"),
    [
        (rank(1, waits=0.1, cores=1.0, state="running"), "by its computation. It waits for others 10 % of the time"),
        (rank(1, waits=0.1, cores=0.9, delay=0.4), "by the machine"),
        (rank(1, waits=0.0, cores=0.1), "by its data"),
        (rank(1, waits=0.0, cores=1.0, state="in the kernel"), "by its data"),
    ],
)
def test_the_slowest_rank_is_named_with_the_reason(slow, reason):
    assert slowest([rank(0, waits=0.8), slow, rank(2, waits=0.6)]).startswith(f"slowest: rank 1, {reason}")


def test_the_parts_of_a_step_are_shown_and_tell_the_reason():
    times = {
        "steps": 4, "seconds": 0.04, "data": [0.002, 0.001], "compute": [0.01, 0.032], "waiting": [0.022, 0.0],
        "update": [0.004, 0.004], "last": {},
    }  # fmt: skip
    step_s, parts = measured(times)
    job = JobView(name="train.py", pid=4711, ranks=2, age_s=125.0, step=9, step_s=step_s, parts=mean_parts(parts))
    ranks = [rank(number, waits=0.6 - 0.6 * number, parts=parts[number]) for number in (0, 1)]
    lines = frame(job, ranks, width=80, height=24)
    assert lines[2] == "step of 10 ms: data 4 %, compute 52 %, waiting 27 %, update 10 %, loop 6 %"
    said = "by its computation. It waits for others 0 % of the time, rank 0 60 %; forward and backward take 8 ms there"
    assert slowest(ranks) == f"slowest: rank 1, {said}, and 2.5 ms on rank 0."
    parts[1]["data"] = 0.1
    assert slowest(ranks).endswith("a step waits for its batch for 100 ms there, and 0.5 ms on rank 0.")
    assert measured(None) is None
    on_gpus = measured({name: value for name, value in times.items() if name not in ("waiting", "update")})[1]
    ranks = [rank(number, waits=0.6 - 0.6 * number, parts=on_gpus[number]) for number in (0, 1)]
    assert slowest(ranks).endswith("it keeps 1.0 cores busy.")


def test_no_rank_is_called_slow_without_a_difference():
    assert slowest([rank(0, waits=0.5), rank(1, waits=0.4)]) == ""
    assert slowest([rank(0, waits=0.9)]) == ""
    assert slowest([rank(0, waits=None), rank(1, waits=0.1), rank(2, waits=0.9, cores=None)]) == ""


def test_memory_on_gpus_is_what_nvidia_smi_says(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_memory() == {}
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '71, 100\\n71, 20\\n72, [N/A]\\n'\n")
    program.chmod(0o755)
    assert gpu_memory() == {71: 120 << 20}
    program.write_text("#!/bin/sh\necho 'no devices were found'\nexit 6\n")
    assert gpu_memory() == {}
