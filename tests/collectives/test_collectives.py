"""The collectives of unisono.comm: values, gradients, wrong calls and check mode, with real ranks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from unisono import comm

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize(
    ("ranks", "cases"), [(1, 4), (3, 4), *(pytest.param(*each, marks=pytest.mark.soak) for each in [(2, 4), (5, 2)])]
)
def test_random_values_come_out_as_one_process_computes_them(fork_ranks, ranks, cases):
    job = fork_ranks(ranks, PROGRAMS / "random_collectives.py", "short", cases)
    groups = "shm, gloo" if ranks < 3 else "shm, gloo, shm, some ranks"
    assert job.lines(ranks - 1) == [f"{cases} cases over {groups}"]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_many_random_values(fork_ranks, ranks, seed):
    fork_ranks(ranks, PROGRAMS / "random_collectives.py", seed, 60)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.soak), 3, pytest.param(5, marks=pytest.mark.soak)])
def test_gradients_are_those_of_one_process(fork_ranks, ranks):
    job = fork_ranks(ranks, PROGRAMS / "gradients.py")
    assert job.lines() == ["38 kinds have the gradients of one process"]


LACKING = """
import torch, unisono
from unisono import comm
unisono.init()
rank = unisono.rank()
x = torch.ones(2, requires_grad=True)
for to_last in (3, x * 2):  # rank 2 gets a number of each rank, or one tensor
    values = [x, x, to_last if rank == 0 else rank]
    try:
        got = comm.all_to_all(values)
        sum(t.sum() for t in got if torch.is_tensor(t)).backward()
        print(x.grad.tolist())
    except unisono.errors.RankMismatchError as error:
        print(error)
loop = []
loop.append(loop)
try:
    comm.all_gather(loop if rank == 1 else x, concat=0)
except (RecursionError, unisono.errors.PeerError) as error:
    print(type(error).__name__)
"""


def test_a_rank_that_would_have_no_part_in_a_backward_is_named_on_all_ranks(fork_ranks):
    job = fork_ranks(3, LACKING)
    for rank in range(3):
        refused, gradient, failed = job.lines(rank)
        assert "all_to_all: some values require a gradient, and rank 2 got no floating-point tensor" in refused
        assert gradient == ("[4.0, 4.0]" if rank == 0 else "[2.0, 2.0]")
        assert failed == ("RecursionError" if rank == 1 else "PeerError")


def told(job, rank):
    """What a rank printed, by the name of the case."""
    return dict(line.split(" | ", 1) for line in job.lines(rank) if " | " in line)


class Wrong(NamedTuple):
    everywhere: str = ""
    """Beginning of what all ranks are told."""
    own: str = ""
    """Of what rank 1 is told, whose mistake it is."""
    others: str = ""


WRONG = {
    "rank outside": Wrong("ValueError: src=7 is not in the group: it has ranks 0-2"),
    "no rank": Wrong("TypeError: dst='0' must be the number of a rank, not a str"),
    "unknown op": Wrong("ValueError: op='average' is not known: give one of sum, mean, min"),
    "whole mean": Wrong("TypeError: the tensor is int64, which has no mean: convert it by .float()"),
    "bits of floats": Wrong("TypeError: value['a'] is float32, and 'bor' is for whole numbers and bool"),
    "words": Wrong("TypeError: value['name'] is a str, and only tensors, numbers and None"),
    "tag": Wrong("ValueError: tag=-1 must be a whole number from 0"),
    "not divisible": Wrong("ValueError: a tensor of shape [4, 2] cannot be cut into 3 equal parts"),
    "uniform word": Wrong("TypeError: all_gather with uniform=True needs a tensor on every rank"),
    "concat of numbers": Wrong("TypeError: concat=0 joins tensors, and value['n'] is 1: leave concat out"),
    "concat by name": Wrong("TypeError: concat='0' must be the number of a dimension"),
    "concat of a scalar": Wrong("ValueError: concat=0 needs tensors with that dimension, and value has shape []"),
    "a group that is none": Wrong("TypeError: group='world' is no process group"),
    "an ended group": Wrong("GroupError: the group has ended"),
    "meta": Wrong("TypeError: a tensor on the meta device has a shape and no numbers to send"),
    "structure": Wrong(
        "RankMismatchError: all_reduce with op 'sum': value['b'] is float32 [3] on rank 1, float32 [4] on ranks 0, 2"
    ),
    "a key more": Wrong(
        "RankMismatchError: all_reduce with op 'sum': value['z'] is a number on rank 1, not there on ranks 0, 2: make"
    ),
    "type": Wrong(
        "RankMismatchError: reduce to rank 0 with op 'sum': value[0] is float64 [2] on rank 1, float32 [2] on"
    ),
    "word on one": Wrong(
        own="TypeError: value[0] is a str, and only",
        others="PeerError: all_reduce with op 'sum' was not done, for it failed on rank 1, with TypeError: value[0]",
    ),
    "other op": Wrong(
        "RankMismatchError: ranks call different things: all_reduce with op 'sum' on ranks 0, 2, all_reduce"
    ),
    "other call": Wrong(
        "RankMismatchError: ranks call different things: all_gather on ranks 0, 2, gather to rank 0 on rank 1"
    ),
    "lock": Wrong(
        own="TypeError: value['a'][0] is of type lock, which cannot be pickled",
        others="PeerError: all_gather was not done, for it failed on rank 1, with TypeError: value['a'][0]",
    ),
    "lock from the root": Wrong(
        own="TypeError: value is of type lock", others="PeerError: broadcast from rank 1 was not done, for it failed on"
    ),
    "number of values": Wrong(
        own="ValueError: values has 2 entries for 3 ranks", others="PeerError: scatter from rank 1 was not done"
    ),
    "number of values to all": Wrong(
        own="ValueError: values has 2 entries for 3 ranks", others="PeerError: all_to_all was not done"
    ),
    "values are none": Wrong(
        own="TypeError: values is None: give a list", others="PeerError: scatter from rank 1 was not done"
    ),
    "widths": Wrong(
        "RankMismatchError: all_gather with concat=0: value['x'] is float32 [*, 4] on rank 1, float32 [*, 3] on"
    ),
    "parts": Wrong(
        own="ValueError: values has 2 entries for 3 ranks", others="PeerError: reduce_scatter with op 'sum' was"
    ),
    "root of one": Wrong(
        own="ValueError: dst=7 is not in the group",
        others="RankMismatchError: ranks call different things: gather to rank 0 on ranks 0, 2, gather to rank 7",
    ),
    "op of one": Wrong(
        own="ValueError: op='sun' is not known",
        others="RankMismatchError: ranks call different things: all_reduce with op 'sum' on ranks 0, 2, all_re",
    ),
    "gradients": Wrong(
        "RankMismatchError: all_gather: tensors of ranks 0, 2 require a gradient and rank 1 called it under"
    ),
}


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_wrong_calls_are_errors_on_every_rank_and_break_nothing(fork_ranks, backend):
    job = fork_ranks(3, PROGRAMS / "bad_collectives.py", backend)
    said = [told(job, rank) for rank in range(3)]
    for name, wrong in WRONG.items():
        for rank in range(3):
            expected = wrong.everywhere or (wrong.own if rank == 1 else wrong.others)
            assert said[rank][name].startswith(expected), f"{name} on rank {rank}: {said[rank][name]}"
    assert all(f"dst={rank} is this rank itself" in said[rank]["to itself"] for rank in range(3))
    assert said[0]["message"].startswith("PeerError: send to rank 0 was not done, for it failed on rank 1")
    assert said[1]["message"].startswith("TypeError: value is of type lock")
    assert said[0]["class"].startswith("gave <")
    assert said[1]["class"].startswith(
        "PeerError: a value of another rank cannot be unpickled here: Can't get attribute 'OfR"
    )
    assert said[2]["no member"].startswith("GroupError: this rank is not in the group")
    assert said[1]["root no member"].startswith("ValueError: src=2 is not in the group: it has ranks 0-1")


PARTED = {
    "shape": "disagree in all_reduce with op 'sum': value is float32 [4] on rank 1, float32 [3] on ranks 0, 2:",
    "type": "disagree in reduce_scatter with op 'sum': value is float64 [3] on rank 1, float32 [3] on ranks 0, 2:",
    "gradient": "value is float32 [3] that requires a gradient on rank 1, float32 [3] on ranks 0, 2:",
    "tensor or number": "value is float32 [] on rank 1, a number on ranks 0, 2:",
    "structure": "value['b'] is float32 [4] on rank 1, float32 [3] on ranks 0, 2:",
    "op": "on rank 1: /   ranks 0, 2: all_reduce with op 'sum' of float32 [2] at checked_collectives.py:",
    "root": "/   rank 1: broadcast from rank 1 of an int at checked_collectives.py:",
    "call": "/   rank 1: barrier at checked_collectives.py:",
    "uniform": "value is float32 [3] on rank 1, float32 [2] on ranks 0, 2:",
    "template": "disagree in broadcast from rank 0 with uniform=True: value is float32 [3] on rank 1",
}


@pytest.mark.parametrize(
    ("ending", "last"),
    [
        ("crossed", "ranks 0-1 wait for each other in"),
        ("late", "rank 1 did not come within 2 s"),
        ("ended", "rank 1 ended before this call"),
    ],
)
def test_check_mode_says_who_called_what_where(run_ranks, monkeypatch, ending, last):
    monkeypatch.setenv("UNISONO_CHECK_TIMEOUT", "60")
    job = run_ranks(3, PROGRAMS / "checked_collectives.py", ending, flags=["--check"], code=1)
    assert f"PeerError: {last}" in job.said
    assert "checked_collectives.py" in job.said
    if ending == "crossed":
        for rank in range(3):
            said = told(job, rank)
            assert list(said) == list(PARTED)
            for name, words in PARTED.items():
                assert said[name].startswith("RankMismatchError: ranks ")
                assert words in said[name], f"{name} on rank {rank}: {said[name]}"


LATE = {
    "number": "disagree in all_reduce with op 'sum': value is a float on rank 1, float32 [2, 2] on ranks 0, 2: /",
    "structure": "disagree in all_reduce with op 'sum': value is a dict on rank 1, float32 [2, 2] on ranks 0, 2: /",
    "barrier": "call different things: all_reduce with op 'sum' on ranks 0, 2, barrier on rank 1: "
    "/   ranks 0, 2: all_reduce with op 'sum'| /   rank 1: barrier",
    "object": "call different things: all_gather on ranks 0, 2, all_reduce with op 'sum' on rank 1: "
    "/   ranks 0, 2: all_gather| /   rank 1: all_reduce with op 'sum'",
    "uniform": "things: all_gather with uniform=True on ranks 0, 2, all_to_all with uniform=True on rank 1: "
    "/   ranks 0, 2: all_gather with uniform=True| /   rank 1: all_to_all with uniform=True",
    "parts": "things: reduce_scatter with op 'sum' on ranks 0, 2, scatter from rank 0 on rank 1: "
    "/   ranks 0, 2: reduce_scatter with op 'sum'| /   rank 1: scatter from rank 0",
    "backward": "things: barrier on ranks 0, 2, all_reduce with op 'sum' on rank 1: "
    "/   ranks 0, 2: barrier| /   rank 1: all_reduce with op 'sum'",
    "order": "things: broadcast from rank 0 with uniform=True on ranks 0, 2, barrier on rank 1: "
    "/   ranks 0, 2: broadcast from rank 0 with uniform=True| /   rank 1: barrier",
    "subgroup": "things: all_reduce with op 'sum' on rank 0, barrier on rank 1: "
    "/   rank 0: all_reduce with op 'sum' in the group of ranks 0-1 of| /   rank 1: barrier",
}
IN_SHARED_MEMORY = {
    "number": "all_reduce(SUM) of 4 float32|all_gather of",
    "structure": "all_reduce(SUM) of 4 float32|all_gather of",
    "barrier": "all_reduce(SUM) of 4 float32|barrier",
    "object": "all_gather of|all_reduce(SUM) of 4 float32",
    "uniform": "all_gather of 6 float32|all_to_all of",
    "parts": "reduce_scatter(SUM) of 6 float32|scatter with root 0",
    "backward": "all_reduce(SUM) of 3 float32|barrier",
    "order": "broadcast with root 0 of 3 float32|barrier",
    "subgroup": "all_reduce(SUM) of 4 float32|barrier",
}


@pytest.mark.parametrize(
    ("backend", "kind", "words"),
    [("gloo", "RankMismatchError", LATE), ("shm", "DistBackendError", IN_SHARED_MEMORY)],
)
def test_ranks_that_part_without_check_mode_are_told_both_calls(fork_ranks, backend, kind, words):
    job = fork_ranks(3, PROGRAMS / "parted_collectives.py", backend, code=1)
    for rank in range(3):
        said = told(job, rank)
        for name, expected in words.items():
            if name == "subgroup" and rank == 2:
                continue
            assert said[name].startswith(f"{kind}: "), f"{name} on rank {rank}: {said[name]}"
            for each in expected.split("|"):
                assert each in said[name], f"{name} on rank {rank}: {said[name]}"
            assert backend == "shm" or " at parted_collectives.py:" in said[name]
        assert said["again"] == kind
        assert said["slow"] == "gave [3.0, 3.0]"
        assert said["slow objects"] == f"gave [2000, {[0, 'a', None][rank]!r}]"
    if backend == "gloo":
        for rank in range(3):
            assert f"[rank{rank}]: unisono.errors.RankMismatchError: ranks call different things:" in job.err


def test_a_rank_that_gloo_ends_for_the_size_of_a_tensor_leaves_the_others_a_hint(fork_ranks):
    script = """
import torch, unisono
from unisono import comm
unisono.init("gloo")
comm.barrier()
comm.all_reduce(torch.ones(3 if unisono.rank() == 1 else 300))
"""
    job = fork_ranks(2, script, code=None)
    assert "RuntimeError: all_reduce with op 'sum' of float32 [300] at script.py:6 failed on rank 0: " in job.err
    assert "gloo ends one that gets more data than it expects: `unisono run --check`" in job.err


def test_one_process_needs_no_group():
    x = torch.arange(4.0, requires_grad=True)
    assert comm.all_reduce(3) == comm.reduce(3, op="mean") == 3
    assert comm.all_reduce({"a": True, "n": None}) == {"a": 1, "n": None}
    assert comm.all_gather({"a": [1, "x"]}) == comm.gather({"a": [1, "x"]}) == [{"a": [1, "x"]}]
    assert comm.broadcast("x") == comm.scatter(["x"]) == "x"
    assert comm.all_to_all([{1}]) == [{1}]
    comm.barrier()
    (comm.all_gather(x)[0] * comm.reduce_scatter(x * 2)).sum().backward()
    assert x.grad.tolist() == [0.0, 4.0, 8.0, 12.0]
    with pytest.raises(ValueError, match=r"src=1 is not in the group: it has rank 0\."):
        comm.broadcast(1, src=1)
    with pytest.raises(TypeError, match=r"value\['a'\] is of type lock, which cannot be pickled"):
        comm.all_gather({"a": threading.Lock()})


def test_results_are_new_and_saved_by_themselves(tmp_path):
    given = {"a": torch.zeros(3), "b": torch.zeros(1000)}
    for result in (comm.all_reduce(given), comm.broadcast(given), comm.all_gather(given)[0]):
        result["a"].add_(1)
        assert given["a"].sum() == 0
        torch.save(result["a"], tmp_path / "a")
        assert (tmp_path / "a").stat().st_size < 2500


def test_a_list_that_holds_itself_can_be_moved_and_not_combined():
    loop = [torch.ones(2)]
    loop.append(loop)
    (found,) = comm.all_gather(loop)
    assert found[1] is found
    with pytest.raises(RecursionError):
        comm.all_reduce(loop)
    loop.append(threading.Lock())
    with pytest.raises(TypeError, match=r"value\[2\] is of type lock|value\[1\]"):
        comm.all_gather(loop)


def test_numbers_are_exact():
    assert comm.all_reduce(2**200) == 2**200
    assert comm.all_reduce([True, 1.5, float("inf")], "max") == [True, 1.5, float("inf")]


@pytest.mark.parametrize("call", ["all_reduce(torch.ones(2))", "all_gather(1)"])
def test_before_init_there_is_an_error_and_no_wait(fork_ranks, call):
    job = fork_ranks(2, f"import torch; from unisono import comm; comm.{call}", code=1, watched=False)
    for rank in range(2):
        words = f"this is rank {rank} of 2, and the ranks have not met: call unisono.init() on all ranks first"
        assert f"[{rank}] unisono.errors.GroupError: {words}" in job.err


def test_a_variable_for_check_mode_that_says_nothing_is_an_error(monkeypatch):
    from unisono.collectives.check_mode import wanted

    monkeypatch.setenv("UNISONO_CHECK", "perhaps")
    with pytest.raises(ValueError, match="UNISONO_CHECK='perhaps' in the environment must be 1 or 0"):
        wanted()
