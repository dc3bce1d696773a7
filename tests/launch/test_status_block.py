"""The page shared by a rank and its agent: what is read is whole, the latest, and never blocks."""

import json
import os
import threading
from collections.abc import Iterator

import pytest

from unisono.launch.hang.status_block import StatusBlock, create, encode_call


@pytest.fixture
def file() -> Iterator[int]:
    number = create()
    yield number
    os.close(number)


def test_calls_are_read_as_they_were_written(file):
    rank, agent = StatusBlock(file), StatusBlock(file)
    rank.claim(pid=7, main_thread=9)
    text = encode_call(
        name="broadcast",
        kind="collective",
        group="0",
        ranks="0-3,6",
        tensors="float32[4, 4]",
        peer=2,
        signature="broadcast|2",
        file="/home/me/train.py",
        line=12,
        function="step",
    )
    first = rank.begin(text, sequence=5, epoch=1)
    second = rank.begin(encode_call(name="recv", kind="point-to-point"))
    before = agent.mark
    rank.end(second, failed=True)
    assert agent.mark != before  # something has happened, for those who wait for a hang
    broadcast, recv = agent.calls()
    assert (agent.pid, agent.main_thread, agent.begun, agent.completed) == (7, 9, 2, 0)
    assert (broadcast.number, broadcast.name, broadcast.ranks, broadcast.peer) == (
        first,
        "broadcast",
        (0, 1, 2, 3, 6),
        2,
    )
    assert (broadcast.file, broadcast.line, broadcast.function) == ("/home/me/train.py", 12, "step")
    assert (broadcast.sequence, broadcast.epoch, broadcast.running) == (5, 1, True)
    assert (recv.running, recv.failed, recv.peer) == (False, True, None)
    assert recv.started_ns <= recv.ended_ns
    assert not agent.met
    rank.end(first)
    assert agent.completed == 1 and agent.met


def test_the_times_of_calls_are_those_of_the_calls_themselves(file):
    rank, agent = StatusBlock(file), StatusBlock(file)
    assert agent.times() == []
    for number in range(40):
        begun = rank.begin(encode_call(name=f"call {number}", kind="collective"))
        if number % 3:
            rank.end(begun, failed=number % 2 == 0)
    calls, times = agent.calls(), agent.times()
    assert [(each.number, each.started_ns, each.ended_ns) for each in times] == [
        (call.number, call.started_ns, call.ended_ns) for call in calls
    ]
    assert [agent.call_at(each.place) for each in times] == calls


def test_a_call_that_still_runs_is_not_overwritten(file):
    page = StatusBlock(file)
    waiting = page.begin(encode_call(name="barrier", kind="collective"))
    for _ in range(100):
        page.end(page.begin(encode_call(name="all_reduce", kind="collective")))
    calls = page.calls()
    assert [call.number for call in calls if call.running] == [waiting]
    assert len(calls) == 32
    # The newest are there: a number is passed over when its place is taken.
    assert calls[1].number > 70 and calls[-1].number >= 101


def test_a_record_that_is_half_written_is_left_out(file):
    page = StatusBlock(file)
    page.end(page.begin(encode_call(name="barrier", kind="collective")))
    page.write_failure({"message": "bad batch"})
    data = os.pread(file, os.fstat(file).st_size, 0)
    for text in (b"barrier", b"bad batch"):
        os.pwrite(file, b"?", data.index(text))
    assert page.calls() == []
    assert page.read_failure() is None


def test_a_reader_in_another_process_never_sees_a_mixture(file):
    page = StatusBlock(file)
    writer = os.fork()
    if writer == 0:
        for number in range(30_000):
            page.end(
                page.begin(encode_call(name="all_reduce", kind="collective", line=number, tensors="x" * (number % 300)))
            )
            if number % 100 == 0:
                page.write_answer({"number": number, "text": "y" * (number % 5000)})
        os._exit(0)
    looks, answers, ended = 0, 0, 0
    while ended == 0:
        ended, _ = os.waitpid(writer, os.WNOHANG)
        for call in page.calls():
            assert call.line == call.number - 1 and len(call.tensors) == call.line % 300
        answer = page.read_answer()
        if answer is not None:
            answers += 1
            assert answer[0] == answer[1]["number"] // 100 + 1 and len(answer[1]["text"]) == answer[1]["number"] % 5000
        looks += 1
    assert looks > 10 and answers > 10
    assert page.calls()[-1].line == 29_999


def test_threads_that_call_at_once_have_places_of_their_own(file):
    page = StatusBlock(file)
    barrier = threading.Barrier(6)

    def work() -> None:
        barrier.wait()
        for _ in range(500):
            number = page.begin(encode_call(name="barrier", kind="collective"))
            assert any(call.number == number and call.running for call in page.calls())
            page.end(number)

    errors: list[object] = []
    threads = [threading.Thread(target=work) for _ in range(6)]
    hook, threading.excepthook = threading.excepthook, errors.append
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    threading.excepthook = hook
    assert not errors
    assert not any(call.running for call in page.calls())


def test_a_call_begins_however_many_others_still_run(file):
    rank, agent = StatusBlock(file), StatusBlock(file)
    text = encode_call(name="recv", kind="point-to-point")
    running = [rank.begin(text) for _ in range(600)]
    assert len(set(running)) == 600
    # The first ones are all there, and the latest.
    seen = {call.number for call in agent.calls() if call.running}
    assert seen == {*running[:447], running[-1]}
    for number in running[:300]:
        rank.end(number)
    # Their places are free again: an end is not lost, nor is a new call.
    assert not seen & set(running[:300]) & {call.number for call in agent.calls() if call.running}
    again = [rank.begin(text) for _ in range(200)]
    assert {call.number for call in agent.calls() if call.running} >= {*again, *running[300:447]}
    for number in (*running[300:], *again):
        rank.end(number)
    assert (agent.completed, [call for call in agent.calls() if call.running]) == (800, [])


def test_a_failure_too_long_for_the_page_loses_the_middle_of_its_texts(file):
    page = StatusBlock(file)
    frames = [{"file": f"/home/me/{number}.py", "line": number} for number in range(20)]
    page.write_failure({"type": "ValueError", "message": "a" * 200_000 + "end", "frames": frames})
    account = page.read_failure()
    assert account["type"] == "ValueError" and account["frames"] == frames
    assert account["message"].startswith("aaa") and account["message"].endswith("end")
    assert 10_000 < len(account["message"]) < 48 << 10


def test_an_account_of_any_shape_fits(file):
    page = StatusBlock(file)
    page.write_failure({"chain": [{"text": "é" * 50, "number": number} for number in range(5000)], "odd": {1, 2}})
    assert "chain" in page.read_failure()
    assert len(json.dumps(page.read_failure())) <= 48 << 10


def test_a_page_outlives_the_rank(file):
    child = os.fork()
    if child == 0:
        page = StatusBlock(file)
        page.begin(encode_call(name="barrier", kind="collective"))
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert [call.name for call in StatusBlock(file).calls()] == ["barrier"]
