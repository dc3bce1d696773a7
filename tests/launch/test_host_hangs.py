"""Ranks of several hosts that wait for each other in vain: what is decided, and what the terminals of all hosts say.

The smallest such job is in test_several_hosts.py, where processes on the hosts are ready.
"""

import time
from dataclasses import replace

import pytest
from host_network import Hosts

from unisono.launch.hang.judge import HangDecision, HangJudge
from unisono.launch.hang.situation import Pending, Situation
from unisono.launch.hang.stacks import Frame, Thread
from unisono.launch.hang.status_block import RecordedCall
from unisono.launch.hosts.rank_situations import decode_situation, encode_situation

MISMATCH = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(3))
if dist.get_rank() == 1:
    dist.barrier()
else:
    dist.all_reduce(torch.ones(1 << 20))
"""

STUCK = """
import pathlib, threading, torch, unisono
lock, mark = threading.Lock(), pathlib.Path("mark")
lock.acquire()
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=4, progress=False)
data = torch.utils.data.TensorDataset(torch.ones(40, 4))

def loss(model, batch):
    if trainer.rank == 1 and trainer.steps_done == 3 and not mark.exists():
        mark.touch()
        lock.acquire()
    return model(batch[0]).square().mean(1)

for epoch in trainer.epochs(1):
    for batch in trainer.batches(data, batch_size=8):
        trainer.step(loss, batch)
print(trainer.steps_done, trainer.recovered)
"""


def all_reduce(*, age_s: float, runs: bool) -> RecordedCall:
    started_ns = time.monotonic_ns() - int(age_s * 1e9)
    return RecordedCall(
        number=1,
        name="all_reduce",
        kind="collective",
        group="0",
        label="",
        ranks=(0, 1),
        epoch=1,
        sequence=2 if runs else 1,
        tensors="float32[3]",
        reduction="sum",
        peer=None,
        signature="all_reduce float32[3]",
        file="/job/a.py",
        line=12,
        function="<module>",
        asynchronous=False,
        started_ns=started_ns,
        ended_ns=None if runs else started_ns + 1_000_000,
        failed=False,
    )


def judge(**settings: float | None) -> HangJudge:
    defaults = {"hang_report_s": 5.0, "hang_abort_s": None, "stuck_s": None}
    return HangJudge(**{**defaults, **settings}, folder="/job", stacks="`unisono stacks` shows all", has_flags=True)


def waiting(age_s: float) -> list[Situation]:
    return [
        Situation(rank=0, pid=5, calls=(all_reduce(age_s=age_s, runs=True),)),
        Situation(rank=1, pid=6, state="sleeping", calls=(all_reduce(age_s=age_s + 1, runs=False),)),
    ]


def test_what_is_told_of_a_rank_arrives_whole_with_times_by_the_clock_of_the_other_host(monkeypatch):
    frame = Frame(file="/job/a.py", line=7, function="save", is_library=False, text="lock.acquire()")
    thread = Thread(ident=1, frames=(frame,))
    situation = Situation(
        rank=3,
        pid=12,
        state="sleeping",
        load=0.25,
        calls=(all_reduce(age_s=9, runs=False), all_reduce(age_s=8, runs=True)),
        pending=(Pending(group="0", sequence=4, name="x", tensors="", point_to_point=False, since_ns=10**9),),
        enqueued={"0": 4},
        groups={"0": (0, 3)},
        main_thread=1,
        threads=(thread,),
        children=((14, "loader", (thread,)),),
    )
    now_ns, later_ns = time.monotonic_ns(), 10**12
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    told = encode_situation(situation)
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns + later_ns)
    got = decode_situation(told)
    calls = tuple(
        replace(
            call,
            started_ns=call.started_ns + later_ns,
            ended_ns=None if call.ended_ns is None else call.ended_ns + later_ns,
        )
        for call in situation.calls
    )
    pending = (replace(situation.pending[0], since_ns=10**9 + later_ns),)
    assert got == replace(situation, calls=calls, pending=pending)


def test_a_hang_is_reported_first_and_then_ends_the_job_or_the_stuck_rank():
    assert judge().look(waiting(4), 100.0) == HangDecision()
    for settings, then in (
        ({"hang_abort_s": 8.0}, "abort"),
        ({"stuck_s": 8.0}, "kill"),
    ):
        one = judge(**settings)
        assert one.look(waiting(9), 100.0) == HangDecision(found=True, show=(1, 0))  # the stuck rank's stack first
        text = one.explain(waiting(9), 100.0, places=lambda ranks: f"at {ranks}")
        assert text.startswith("rank 0 has waited 9.0 s in all_reduce for rank 1")
        assert "\nat (1,)\n" in text
        decision = one.look(waiting(9), 101.0)
        assert (decision.abort or "").endswith("for rank 1, and --hang-abort is 8 s") == (then == "abort")
        assert decision.kill == ((1,) if then == "kill" else ())


@pytest.mark.soak
def test_ranks_of_different_hosts_that_call_different_collectives_are_named(hosts: Hosts):
    (hosts.folder / "script.py").write_text(MISMATCH)
    for job in hosts.run("script.py", ranks=1, flags=("--hang-report", "2", "--hang-abort", "4")):
        assert job.returncode == 1
        assert "rank 1 calls barrier where rank 0 calls all_reduce (collective 2)" in job.stderr
        assert "Rank 0 on host 0, host0 (10.97.0.1); rank 1 on host 1, host1 (10.97.0.2)." in job.stderr


@pytest.mark.soak
def test_a_stuck_rank_of_another_host_is_killed_and_replaced(hosts: Hosts):
    (hosts.folder / "script.py").write_text(STUCK)
    jobs = hosts.run("script.py", ranks=1, flags=("--hang-report", "1", "--stuck-timeout", "2"))
    assert [job.returncode for job in jobs] == [0, 0], jobs[0].stderr + jobs[1].stderr
    for job in jobs:
        assert "for rank 1" in job.stderr
        assert "Rank 1 on host 1, host1 (10.97.0.2).\nrank 1 will be killed in " in job.stderr
        assert "rank 1 kept the others waiting for 2 s; killed (--stuck-timeout)" in job.stderr
        assert "rank 1 was killed by SIGKILL in forward of step 4; replaced" in job.stderr
    assert "5 False" in jobs[0].stdout and "5 True" in jobs[1].stdout
