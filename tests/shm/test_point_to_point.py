"""Messages of the shm backend, through torch.distributed, between real processes."""

from __future__ import annotations

import pytest

_BEGIN = """
import os, random, signal, sys, threading, time
from datetime import timedelta
from pathlib import Path
import pytest, torch
import torch.distributed as dist
import unisono
torch.set_num_threads(1)
"""

_RANKS = (
    _BEGIN
    + """
dist.init_process_group("shm", timeout=timedelta(seconds=30))
rank, size = dist.get_rank(), dist.get_world_size()
other = 1 - rank
"""
)

_MATCHING = """
def tag_order():
    # A later tag is asked for first; equal tags keep their order.
    if rank == 0:
        for i, tag in enumerate([7, 7, 3, 7, 3]):
            dist.send(torch.tensor([i, tag]), 1, tag=tag)
    else:
        for tag, want in [(3, 2), (7, 0), (3, 4), (7, 1), (7, 3)]:
            got = torch.zeros(2, dtype=torch.int64)
            assert dist.recv(got, 0, tag=tag) == 0
            assert got.tolist() == [want, tag], (got, want)

def dtypes():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16,
                  torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn):
        sent = (torch.randn(3, 5, dtype=torch.complex128) * 10).to(dtype) if dtype.is_complex else (
            torch.randn(3, 5) * 10).to(dtype)
        if rank == 0:
            dist.send(sent, 1)
        else:
            got = torch.empty_like(sent)
            dist.recv(got, 0)
            assert torch.equal(got.view(torch.uint8), sent.view(torch.uint8)), dtype

def sizes():
    # Around the size of a cell, nothing at all, and more than the ring holds.
    cell = 256 * 1024
    for nbytes in (0, 1, 63, cell - 1, cell, cell + 1, 8 * cell, 8 * cell + 1, 5_000_001):
        sent = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
        if rank == 0:
            dist.send(sent, 1)
            dist.recv(sent, 1)
        else:
            got = torch.full((nbytes + 3,), 9, dtype=torch.uint8)
            dist.recv(got[:nbytes], 0)
            assert torch.equal(got[:nbytes], sent) and got[nbytes:].tolist() == [9, 9, 9]
            dist.send(sent, 0)

def both_send_first():
    # Neither could end before the other one receives; gloo waits for ever.
    sent, got = torch.full((3_000_000,), float(rank)), torch.zeros(3_000_000)
    dist.send(sent, other)
    dist.recv(got, other)
    assert (got == other).all()

def any_order():
    # What is asked for first is not what is waited for first, on either side.
    generator = random.Random(5)
    tags = list(range(20))
    sends, receives = list(tags), list(tags)
    generator.shuffle(sends), generator.shuffle(receives)
    got = {tag: torch.zeros(1 + 20_000 * tag) for tag in tags}
    sent = {tag: torch.full((1 + 20_000 * tag,), rank + tag / 100) for tag in tags}
    works = [dist.isend(sent[tag], other, tag=tag) for tag in sends]
    works += [dist.irecv(got[tag], other, tag=tag) for tag in receives]
    generator.shuffle(works)
    for work in works:
        assert work.wait()
        assert work.is_completed() and work.is_success() and work.exception() is None
    for tag in tags:
        assert torch.equal(got[tag], torch.full_like(got[tag], other + tag / 100))

def batch():
    sent, got = torch.full((700_000,), float(rank)), torch.zeros(700_000)
    operations = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, got, other)]
    for work in dist.batch_isend_irecv(operations if rank else operations[::-1]):
        work.wait()
    assert (got == other).all()

def nobody_waits():
    # A send of more than the ring holds, and a receive, end by themselves; the main thread sleeps elsewhere.
    big = torch.full((4_000_000,), 5.0)
    if rank == 0:
        work = dist.isend(big, 1, tag=1)
        done = threading.Event()
        future = dist.irecv(torch.zeros(1), 1, tag=2).get_future()
        future.then(lambda future: done.set())
        assert done.wait(20)
        work.wait()
    else:
        got = torch.zeros_like(big)
        dist.recv(got, 0, tag=1)
        assert torch.equal(got, big)
        dist.send(torch.ones(1), 0, tag=2)

def callbacks():
    # Of receives that the main thread waits for, or nobody; they send and receive themselves.
    def answer(future):
        number = future.value()[0]
        dist.send(number + 1, other, tag=11)
        back = torch.zeros(1)
        dist.recv(back, other, tag=11)
        answers.append((number.item(), back.item()))
        return number
    for waits in (True, False):
        answers, got = [], torch.zeros(1)
        work = dist.irecv(got, other, tag=10)
        dist.send(torch.tensor([float(rank)]), other, tag=10)
        chained = work.get_future().then(answer)
        if waits:
            work.wait()
        chained.wait()
        assert answers == [(other, rank + 1)], answers

def polled():
    got = torch.zeros(2_000_000)
    work = dist.isend(torch.ones(2_000_000), other) if rank else dist.irecv(got, other)
    end = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < end
    assert rank or (got == 1).all()

def to_self():
    got = [torch.zeros(3), torch.zeros(3)]
    first = dist.irecv(got[0], rank, tag=1)
    dist.isend(torch.ones(3), rank, tag=1).wait()
    second = dist.isend(torch.full((3,), 2.0), rank, tag=1)
    dist.irecv(got[1], rank, tag=1).wait()
    first.wait(), second.wait()
    assert got[0].tolist() == [1] * 3 and got[1].tolist() == [2] * 3 and first.source_rank() == rank

def arguments():
    wide = torch.zeros(4, 4)
    for call in (dist.isend, dist.irecv):
        with pytest.raises(RuntimeError, match="has to be contiguous"):
            call(wide.t()[1:], other)
        with pytest.raises(RuntimeError, match="has to be dense"):
            call(wide.to_sparse(), other)
        with pytest.raises(RuntimeError, match="Tag must be nonnegative"):
            call(wide, other, tag=-1)
        with pytest.raises(RuntimeError, match="on meta"):
            call(torch.zeros(3, device="meta"), other)
    with pytest.raises(ValueError):
        dist.send(wide, rank)

def lengths():
    # A message that does not fit is an error of that receive alone; a shorter one fills the beginning.
    if rank == 0:
        for n in (6, 4, 3):
            dist.send(torch.ones(n), 1)
    else:
        got = torch.zeros(4)
        with pytest.raises(RuntimeError, match=r"16 bytes.*rank 0 sent 24 bytes.*do not fit"):
            dist.recv(got, 0)
        assert got.tolist() == [0] * 4
        dist.recv(got, 0)
        assert got.tolist() == [1] * 4
        got.zero_()
        dist.recv(got, 0)
        assert got.tolist() == [1, 1, 1, 0]

def objects():
    if rank == 0:
        dist.send_object_list(["a", {"b": 1}], dst=1)
    else:
        got = [None, None]
        dist.recv_object_list(got, src=0)
        assert got == ["a", {"b": 1}]

def patience():
    # The limit of one wait is not the end of the group, nor of the receive.
    got = torch.zeros(1)
    work = dist.irecv(got, other, tag=99)
    with pytest.raises(dist.DistBackendError, match=rf"receive from rank {other} .*not done after 0.2 s"):
        work.wait(timedelta(seconds=0.2))
    dist.barrier()
    dist.send(torch.ones(1), other, tag=99)
    work.wait()
    assert got.item() == 1

for check in (tag_order, dtypes, sizes, both_send_first, any_order, batch, nobody_waits, callbacks, polled, to_self,
              arguments, lengths, objects, patience):
    check()
    dist.barrier()
    print(check.__name__, flush=True)
dist.destroy_process_group()
left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
assert not left, left
"""


def test_two_ranks_exchange_messages_of_every_kind(fork_ranks):
    done = fork_ranks(2, _RANKS + _MATCHING).lines()
    assert done[-1] == "patience" and len(done) == 14


_MANY = """
def any_source():
    if rank == 0:
        seen = []
        for _ in range(3 * (size - 1)):
            got = torch.zeros(2, dtype=torch.int64)
            source = dist.recv(got, tag=4)
            assert source == got[0].item()
            seen.append(got.tolist())
        assert sorted(seen) == [[r, i] for r in range(1, size) for i in range(3)]
        for r in range(1, size):
            assert [i for source, i in seen if source == r] == [0, 1, 2]
    else:
        for i in range(3):
            dist.send(torch.tensor([rank, i]), 0, tag=4)

def any_source_in_turn():
    # A rank that has sent much keeps nobody waiting.
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait([f"sent/{r}" for r in range(1, size)])
        sources = [dist.recv(torch.zeros(1), tag=5) for _ in range(50 + size - 2)]
        assert set(sources[: size - 1]) == {*range(1, size)}, sources
    else:
        works = [dist.isend(torch.ones(1), 0, tag=5) for _ in range(50 if rank == 1 else 1)]
        time.sleep(0.05)  # until some are in the channel
        store.set(f"sent/{rank}", "")
        for work in works:
            work.wait()

def ring():
    # Everybody sends before it receives, more than a channel holds.
    sent, got = torch.full((2_000_000,), float(rank)), torch.zeros(2_000_000)
    dist.send(sent, (rank + 1) % size)
    dist.recv(got, (rank - 1) % size)
    assert (got == (rank - 1) % size).all()

def in_a_group():
    # Ranks of the group are not those of the job.
    members = [1, 3]
    group = dist.new_group(members)
    if rank in members:
        there = members[1 - members.index(rank)]
        got = torch.zeros(3)
        works = [dist.isend(torch.full((3,), float(rank)), there, group=group), dist.irecv(got, group=group)]
        for work in works:
            work.wait()
        assert (got == there).all() and dist.get_global_rank(group, works[1].source_rank()) == there
        other = torch.zeros(1)
        dist.recv(other, 1, group=group) if rank == 3 else dist.send(torch.ones(1), 3, group=group)
        assert rank == 1 or other.item() == 1

def threads():
    # Four threads of each rank talk to the same thread of the next one, each with its own tag.
    def talk(tag):
        generator = random.Random(tag)
        for i in range(15):
            n = generator.choice([1, 1000, 300_000])
            got = torch.zeros(n)
            receive = dist.irecv(got, (rank - 1) % size, tag=tag)
            send = dist.isend(torch.full((n,), float(100 * rank + i)), (rank + 1) % size, tag=tag)
            if i % 2:
                send.wait(), receive.wait()
            else:
                receive.wait(), send.wait()
            if not (got == 100 * ((rank - 1) % size) + i).all():
                wrong.append((tag, i))
    wrong = []
    threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(4)]
    [thread.start() for thread in threads], [thread.join(60) for thread in threads]
    assert not wrong and not any(thread.is_alive() for thread in threads), wrong

def at_random():
    # One plan that all ranks know: who sends what to whom. Each does its part in an order of its own.
    plan = random.Random(11)
    messages = [(plan.randrange(size), plan.randrange(size), plan.randrange(3),
                 plan.choice([0, 5, 3000, 90_000, 700_000])) for _ in range(150)]
    mine = random.Random(rank)
    works, got = [], []
    for number, (source, target, tag, n) in enumerate(messages):
        if rank == target:
            got.append((number, torch.full((n,), -1, dtype=torch.int32)))
            works.append(dist.irecv(got[-1][1], source, tag=tag))
        if rank == source:
            works.append(dist.isend(torch.full((n,), number, dtype=torch.int32), target, tag=tag))
        while works and mine.random() < 0.4 and works[0].is_completed():
            works.pop(0)
    mine.shuffle(works)
    for work in works:
        work.wait()
    for number, tensor in got:
        assert (tensor == number).all(), number

for check in (any_source, any_source_in_turn, ring, in_a_group, threads, at_random):
    check()
    dist.barrier()
    print(check.__name__, flush=True)
dist.destroy_process_group()
"""


def test_four_ranks_exchange_messages(fork_ranks):
    assert fork_ranks(4, _RANKS + _MANY).lines()[-1] == "at_random"


_LEFT = """
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    dist.send(torch.ones(1), 1)
    dist.destroy_process_group()
    store.set("left", "")
    store.wait(["done/1", "done/2"])
else:
    early = torch.zeros(1)
    receive = dist.irecv(early, 0, tag=7)  # as for a call that rank 0 does not make any more
    if rank == 1:
        came = torch.zeros(1)
        dist.recv(came, 0)
        assert came.item() == 1
    store.wait(["left"])
    time.sleep(0.5)  # as long as a worker takes to notice
    got, third = torch.zeros(300_000), 3 - rank
    send = dist.isend(torch.full((300_000,), float(rank)), third)
    dist.recv(got, third)
    send.wait()
    assert (got == third).all()
    assert receive.is_completed()
    for call in (receive.wait, lambda: dist.send(torch.ones(1_000_000), 0)):
        with pytest.raises(dist.DistBackendError, match="the group was left by rank 0, whose program ends"):
            call()
    print("went on", flush=True)
    store.set(f"done/{rank}", "")
    os._exit(0)
"""


def test_a_receive_from_a_rank_that_has_left_fails_alone(fork_ranks):
    """Unless somebody waits for it: other ranks may be in a call that the one that has left has completed."""
    job = fork_ranks(3, _RANKS + _LEFT)
    assert [job.lines(rank) for rank in (1, 2)] == [["went on"]] * 2


_SOAK = """
begin, number = time.monotonic(), 0
plan = random.Random(1)
while number < 4000:
    wave = [(plan.randrange(size), plan.randrange(size), plan.randrange(4), plan.choice([0, 1, 900, 70_000, 600_000]))
            for _ in range(plan.randrange(1, 40))]
    works, got = [], []
    for source, target, tag, n in wave:
        number += 1
        if rank == target:
            got.append((number, torch.full((n,), -1, dtype=torch.int32)))
            works.append(dist.irecv(got[-1][1], source, tag=tag))
        if rank == source:
            works.append(dist.isend(torch.full((n,), number, dtype=torch.int32), target, tag=tag))
        if random.random() < 0.05:
            time.sleep(random.random() / 100)
    random.shuffle(works)
    for work in works:
        work.wait()
    assert all((tensor == i).all() for i, tensor in got)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 3, 5])
def test_thousands_of_random_messages_arrive(fork_ranks, size: int):
    fork_ranks(size, _RANKS + _SOAK)
