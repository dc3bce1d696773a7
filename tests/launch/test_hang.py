"""Who waits in vain for whom, decided from what is known of all ranks; and the words for it."""

from dataclasses import replace

import pytest

from unisono.launch.hang.analysis import find_hang, find_mismatch
from unisono.launch.hang.hang_report import render_finding, render_idle, render_stacks
from unisono.launch.hang.situation import Pending, Situation
from unisono.launch.hang.stacks import Frame, Thread
from unisono.launch.hang.status_block import RecordedCall

SECOND = 1_000_000_000
NOW = 1000 * SECOND
PATIENCE = 30 * SECOND


def call(name="all_reduce", sequence=1, *, age_s=40.0, running=True, **more):
    kind = more.pop("kind", "collective")
    started = NOW - int(age_s * SECOND)
    fields = {
        "number": sequence or 1,
        "group": "" if kind == "setup" else "0",
        "ranks": (),
        "epoch": 1,
        "tensors": "float32[4, 4]",
        "reduction": "",
        "peer": None,
        "signature": name if kind == "collective" else "",
        "label": "",
        "file": "/job/train.py",
        "line": 10,
        "function": "step",
        "asynchronous": False,
        "ended_ns": None if running else started + SECOND,
        "failed": False,
    }
    return RecordedCall(name=name, kind=kind, sequence=sequence, started_ns=started, **{**fields, **more})


def rank(number, *calls, **more):
    return Situation(rank=number, pid=100 + number, calls=calls, **more)


def verdict(*situations, patience_ns=PATIENCE):
    return find_hang(situations, now_ns=NOW, patience_ns=patience_ns)


def causes(finding):
    """Return the ranks that others wait for and that do not wait themselves."""
    missing = {rank for wait in finding.waits for rank in wait.missing}
    return tuple(sorted(missing - {rank for wait in finding.waits for rank in wait.waiting}))


def text(*situations):
    return render_finding(verdict(*situations), situations, now_ns=NOW, folder="/job")


def done(sequence=1, **more):
    return call(sequence=sequence, running=False, **{"age_s": 50.0, **more})


def recv(peer, **more):
    return call("recv", 0, kind="point-to-point", peer=peer, **more)


def test_ranks_that_compute_are_no_hang():
    assert verdict(rank(0, done()), rank(1, done()), rank(2)) is None


def test_a_collective_counts_after_the_patience_only():
    situations = rank(0, call(sequence=2, age_s=29)), rank(1, done())
    assert verdict(*situations) is None
    assert causes(verdict(*situations, patience_ns=28 * SECOND)) == (1,)


def test_who_waits_where_and_for_whom():
    finding = verdict(rank(0, call(sequence=2)), rank(1, done()), rank(2, call(sequence=2, age_s=35)))
    (wait,) = finding.waits
    assert (wait.waiting, wait.missing, causes(finding)) == ((0, 2), (1,), (1,))
    assert finding.since_ns == NOW - 40 * SECOND


def test_a_rank_that_has_just_arrived_is_not_missing():
    finding = verdict(rank(0, call(sequence=2)), rank(1, call(sequence=2, age_s=1)), rank(2, done()))
    assert finding.waits[0].waiting == (0, 1) and finding.waits[0].missing == (2,)


def test_the_root_of_a_broadcast_that_went_on_is_not_missing():
    ahead = rank(0, done(sequence=2), age := call(sequence=3, age_s=2))
    assert age.running
    finding = verdict(ahead, rank(1, call(sequence=2)), rank(2, done(sequence=1)))
    assert causes(finding) == (2,)


def test_an_ended_rank_is_missing():
    finding = verdict(rank(0, call(sequence=2)), rank(1, done(), exit_code=0))
    assert causes(finding) == (1,)


def test_a_stopped_rank_is_missing_even_inside_the_collective():
    finding = verdict(rank(0, call(sequence=2)), rank(1, call(sequence=2), state="stopped"))
    assert finding.waits[0].missing == (1,)


def test_a_rank_that_is_stopped_in_its_own_wait_is_stuck_and_does_not_wait():
    finding = verdict(rank(0, call(sequence=2)), rank(1, call(sequence=2), state="stopped"))
    assert [wait.waiting for wait in finding.waits] == [(0,)] and finding.stuck == (1,)


def test_a_collective_that_all_are_in_gets_twice_the_time():
    situations = rank(0, call(sequence=2)), rank(1, call(sequence=2, age_s=39))
    assert verdict(*situations) is None
    assert verdict(*situations, patience_ns=20 * SECOND).waits[0].missing == ()


def test_only_members_of_the_group_are_missing():
    finding = verdict(
        rank(0, call(sequence=2, group="1", ranks=(0, 2))), rank(1, done()), rank(2, done(), done(group="1"))
    )
    assert finding.waits[0].missing == (2,)


def test_groups_entered_in_another_order_wait_for_each_other():
    finding = verdict(rank(0, call(sequence=1, group="a")), rank(1, call(sequence=1, group="b")))
    assert causes(finding) == () and len(finding.waits) == 2


def test_the_same_name_in_a_group_made_anew_is_another_collective():
    finding = verdict(rank(0, call(sequence=1, epoch=2)), rank(1, done(sequence=9, epoch=1)))
    assert causes(finding) == (1,)
    assert (
        verdict(rank(0, call(sequence=9, epoch=1)), rank(1, done(sequence=1, epoch=2)), patience_ns=39 * SECOND) is None
    )


def test_making_a_group_waits_for_ranks_that_do_not():
    finding = verdict(rank(0, call("init_process_group", kind="setup")), rank(1))
    assert causes(finding) == (1,)
    passed = call("new_group", 2, kind="setup", running=False)
    finding = verdict(
        rank(0, call("new_group", 2, kind="setup")), rank(1, passed), rank(2, replace(passed, sequence=1))
    )
    assert causes(finding) == (2,)


@pytest.mark.parametrize(
    ("name", "different"),
    [("broadcast", {}), ("all_reduce", {"signature": "all_reduce|other shape"}), ("barrier", {"asynchronous": True})],
)
def test_a_mismatch_is_named_after_a_second(name, different):
    situations = rank(0, call(age_s=1.5)), rank(1, call(name, age_s=1.4, **different))
    mismatch = verdict(*situations).mismatch
    assert [operation.name for operation in mismatch.operations] == ["all_reduce", name]
    assert mismatch.sequence == 1


def test_a_mismatch_is_the_first_one_though_a_rank_went_on():
    # The root of the broadcast does not wait for anybody and is one further.
    ahead = rank(1, done(4, name="broadcast", signature="broadcast"), call("barrier", 5, age_s=2))
    mismatch = verdict(rank(0, call("all_gather", 4, age_s=2)), ahead).mismatch
    assert mismatch.sequence == 4
    assert [operation.name for operation in mismatch.operations] == ["all_gather", "broadcast"]


def test_unequal_collectives_that_end_are_no_mismatch_while_ranks_run():
    situations = rank(0, done(name="scatter", signature="a")), rank(1, done(name="gather", signature="b"))
    assert verdict(*situations) is None
    # After a failure they are what went wrong.
    assert find_mismatch(situations, now_ns=NOW, settled_ns=-1).sequence == 1


def test_a_call_that_was_refused_is_no_mismatch():
    refused = done(2, name="broadcast", signature="broadcast", failed=True)
    assert verdict(rank(0, refused, call(sequence=2, age_s=2)), rank(1, call(sequence=2, age_s=2))) is None


def test_a_receive_from_a_rank_that_computes_is_no_hang():
    assert verdict(rank(0, recv(None)), rank(1, done()), rank(2, done())) is None
    assert verdict(rank(0, recv(1)), rank(1, done())) is None


def test_a_pipeline_whose_first_stage_computes_is_no_hang():
    assert verdict(rank(0, done()), rank(1, recv(0)), rank(2, recv(1)), rank(3, recv(2))) is None


def test_receives_in_a_circle_are_a_hang():
    finding = verdict(rank(0, recv(2)), rank(1, recv(0)), rank(2, recv(1)), rank(3, done()))
    assert causes(finding) == () and {wait.waiting for wait in finding.waits} == {(0,), (1,), (2,)}


@pytest.mark.parametrize("state", [{"exit_code": 0}, {"state": "stopped"}])
def test_a_receive_from_a_rank_that_cannot_send_is_a_hang(state):
    finding = verdict(rank(0, recv(1)), rank(1, recv(2)), rank(2, done(), **state))
    assert causes(finding) == (2,)


def test_a_receive_from_any_rank_is_a_hang_when_all_wait():
    assert verdict(rank(0, recv(None)), rank(1, recv(0)), rank(2, recv(0))) is not None


def pending(sequence=7, name="all_reduce", *, age_s=40.0, group="0"):
    since = NOW - int(age_s * SECOND)
    return (
        Pending(group=group, sequence=sequence, name=name, tensors="float32[12]", point_to_point=False, since_ns=since),
    )


def test_operations_that_only_the_backend_knows_count_too():
    groups = {"0": (0, 1, 2)}
    finding = verdict(
        rank(0, done(), pending=pending(), enqueued={"0": 7}, groups=groups),
        rank(1, done(), enqueued={"0": 6}, groups=groups),
        rank(2, done(), enqueued={"0": 9}, groups=groups),
    )
    assert finding.waits[0].waiting == (0,) and causes(finding) == (1,)


def test_a_rank_whose_recorder_does_not_answer_is_missing():
    finding = verdict(rank(0, done(), pending=pending(), enqueued={"0": 7}), rank(1, done()))
    assert causes(finding) == (1,)


def test_backends_that_disagree_are_a_mismatch():
    mismatch = verdict(rank(0, done(), pending=pending()), rank(1, done(), pending=pending(name="broadcast"))).mismatch
    assert [operation.name for operation in mismatch.operations] == ["all_reduce", "broadcast"]


def test_the_key_is_the_same_at_the_next_step_and_another_for_other_ranks():
    first = verdict(rank(0, call(sequence=2)), rank(1, done()))
    later = verdict(rank(0, call(sequence=9, age_s=31)), rank(1, done(8)))
    other = verdict(rank(0, call(sequence=2), state="stopped"), rank(1, call(sequence=2)))
    assert first.key() == later.key() != other.key()


def stack(*places):
    frames = [
        Frame(file=file, line=line, function=function, is_library=library) for file, line, function, library in places
    ]
    return Thread(ident=1, frames=tuple(frames))


def test_the_report_fits_the_screen_and_says_where_everybody_is():
    loop = stack(("/job/data.py", 5, "read", False), ("/job/train.py", 30, "<module>", False))
    situations = [
        *(rank(number, call(sequence=2, age_s=31)) for number in (0, 1, 3)),
        rank(2, done(age_s=33), threads=(loop,), main_thread=1, state="running"),
        rank(4, done(age_s=33), exit_code=0),
    ]
    report = text(*situations)
    assert report.splitlines() == [
        "ranks 0-1, 3 have waited 31 s in all_reduce for ranks 2, 4",
        "  ranks 0-1, 3: all_reduce(float32[4, 4])  at train.py:10 in step",
        "rank 2: computing",
        "  its last call was all_reduce(float32[4, 4]) at train.py:10, 32 s ago",
        "    train.py:30",
        "    data.py:5 in read",
        "rank 4: ended with code 0",
        "  its last call was all_reduce(float32[4, 4]) at train.py:10, 32 s ago",
    ]


def test_the_report_of_a_thousand_ranks_fits_the_screen():
    deep = stack(*(("/job/deep.py", number, "f", False) for number in range(500)))
    odd = [
        rank(number, done(age_s=33 + number), threads=(deep,), main_thread=1, state="running")
        for number in range(1000)
        if number % 10
    ]
    waiting = (rank(number, call(sequence=2)) for number in range(0, 1000, 10))
    report = text(*waiting, *odd)
    assert len(report.splitlines()) < 45
    assert max(map(len, report.splitlines())) < 200


def test_the_report_of_a_mismatch_puts_both_calls_side_by_side():
    report = text(
        rank(0, call(age_s=2, reduction="sum")),
        rank(1, call("broadcast", age_s=2, peer=0, line=12)),
        rank(2, call(age_s=2, reduction="sum")),
    )
    assert "ranks 0, 2: all_reduce(float32[4, 4], sum)  at train.py:10" in report
    assert "rank 1: broadcast(float32[4, 4], root 0)  at train.py:12" in report


def test_the_headline_of_a_mismatch_names_the_odd_rank_first_and_fits_the_screen():
    sizes = ("float32[4]", "float32[5]")
    calls = [call(age_s=2, tensors=size, reduction="sum", signature=size) for size in sizes]
    headline = text(*(rank(number, each) for number, each in enumerate(calls))).splitlines()[0]
    differ = "rank 1 calls all_reduce with float32[5], sum where rank 0 has float32[4], sum"
    assert headline == f"{differ} (collective 1)" and len(headline) < 100


def test_groups_are_called_by_what_the_user_knows():
    tp, made = "the group 'tp'", "the group made at /job/train.py:3"
    report = text(
        rank(0, call(sequence=1, group="1", label=tp, ranks=(0, 1))),
        rank(1, call(sequence=1, group="2", label=made, ranks=(0, 1))),
        rank(2),
    )
    assert "rank 0 has waited 40 s in all_reduce of the group 'tp' (ranks 0-1) for rank 1" in report
    assert "rank 1 has waited 40 s in all_reduce of the group made at train.py:3 (ranks 0-1) for rank 0" in report
    # One group alone needs no line, and one of all ranks no name.
    alone = text(rank(0, call(group="2", label=made, ranks=(0, 1))), rank(1, done()), rank(2))
    assert "in all_reduce of the group of ranks 0-1 for rank 1" in alone
    assert "in all_reduce for rank 1" in text(rank(0, call(label="the default group")), rank(1))
    mismatch = text(rank(0, call(group="1", label=tp)), rank(1, call("barrier", group="1", label=tp)))
    assert "(collective 1 of the group 'tp')" in mismatch


def test_a_rank_whose_end_waits_for_a_thread_shows_that_thread():
    end = stack(("/usr/lib/python3.11/threading.py", 1590, "_shutdown", True))
    poll = Thread(ident=2, frames=(Frame(file="/job/poll.py", line=4, function="poll", is_library=False),))
    situation = rank(0, threads=(poll, end), main_thread=1, state="sleeping")
    lines = render_idle(
        [situation], ended=[], idle_s=30, now_ns=NOW, folder="/job", command="unisono stacks"
    ).splitlines()
    assert lines[0] == "rank 0 has done nothing for 30 s: no CPU time, no output, no I/O"
    assert lines[1] == "rank 0: at the end, waiting for threads that are not daemons"
    assert lines[-3:-1] == ["  another thread of it:", "    poll.py:4 in poll"]


def test_a_stopped_rank_is_reported_with_the_remedy():
    report = text(rank(0, call(sequence=2)), rank(1, done(), state="stopped"))
    assert "rank 1: stopped" in report and "kill -CONT 101" in report


def test_a_worker_is_shown_without_the_calls_of_its_parent():
    outer = ("/job/train.py", 30, "main", False)
    loader = ("/v/site-packages/torch/utils/data/dataloader.py", 9, "__next__", True)
    worker = stack(("/job/data.py", 5, "__getitem__", False), loader, outer)
    stuck = rank(
        1,
        done(),
        threads=(stack(loader, outer),),
        main_thread=1,
        children=((55, "pt_data_worker", (worker,)), (56, "pt_data_worker", (stack(loader, outer),))),
        state="sleeping",
    )
    report = text(rank(0, call(sequence=2)), stuck)
    assert "rank 1: waiting for its DataLoader" in report
    assert "its child process 55 (pt_data_worker):\n      data.py:5 in __getitem__" in report
    assert "56" not in report


def test_stacks_of_equal_ranks_are_shown_once():
    thread = stack(("/job/train.py", 30, "main", False))
    situations = [rank(number, threads=(thread,), main_thread=1, state="sleeping") for number in range(4)]
    lines = render_stacks(situations, now_ns=NOW, folder="/job").splitlines()
    assert lines == ["ranks 0-3: waiting", "    train.py:30 in main"]
