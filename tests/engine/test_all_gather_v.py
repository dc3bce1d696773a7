"""Messages of any size: what is packed is read again, and each rank sees that of all."""

from __future__ import annotations

import pytest
import torch

from unisono.engine import StepTransaction
from unisono.engine.all_gather_v import MessageReader, packed_nbytes, write_parts
from unisono.engine.shared.shared_all_gather_v import SharedAllGatherV
from unisono.engine.shared.shared_runtime import SharedRuntime


def _parts(count):
    return [torch.arange(count), torch.full((count * 3,), 0.5), torch.ones(count, dtype=torch.bfloat16)]


def test_parts_are_read_as_they_were_written():
    message = torch.zeros(packed_nbytes(_parts(5)) + 3, dtype=torch.uint8)
    write_parts(_parts(5), message)
    reader = MessageReader(message)
    for part in _parts(5):
        assert torch.equal(reader.next(part.dtype, part.numel()), part)


@pytest.fixture
def ranks(make_runtimes):
    words = [[0] * 8, [0] * 8]
    runtimes = make_runtimes(2)
    for runtime in runtimes:
        runtime.publish = words[runtime.rank].__setitem__
        runtime.published = lambda word, passed: [of_rank[word] for of_rank in words]
    return runtimes


def test_all_see_all_messages_which_may_grow(ranks, run_threads):
    def work(rank):
        runtime, step, found = ranks[rank], StepTransaction(), []
        gather = SharedAllGatherV(runtime, word=5)
        for count in (2, 1, 200, 7):
            gather.post(_parts(count + rank))
            step.passed = runtime.barrier("", step)
            messages = enumerate(gather.collect(step))
            found.append([MessageReader(m).next(torch.int64, count + k).tolist() for k, m in messages])
            runtime.barrier("", step)
        return found

    expected = [[[*range(count)], [*range(count + 1)]] for count in (2, 1, 200, 7)]
    assert run_threads(work, 2) == [expected, expected]


def test_messages_are_not_read_before_a_barrier(ranks):
    gather, step = SharedAllGatherV(ranks[0], word=5), StepTransaction()
    gather.post(_parts(1))
    with pytest.raises(AssertionError, match="no barrier has been passed"):
        gather.collect(step)
    step.passed = ranks[0].barriers
    with pytest.raises(AssertionError, match="no barrier has been passed"):
        gather.collect(step)
    assert SharedRuntime.barrier.__annotations__["return"] == "Passed"
