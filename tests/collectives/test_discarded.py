"""A result of all_reduce that is thrown away is warned of, once for each place; one that is used is not."""

from __future__ import annotations

import sys

import pytest

from unisono.collectives.discarded import is_dropped

SCRIPT = """
import torch, unisono
from unisono import comm

unisono.init()
x = torch.ones(1)
for _ in range(3):
    comm.all_reduce(x)  # dropped
unisono.comm.all_reduce({"x": x}, op="max")  # dropped
y = comm.all_reduce(x)
assert comm.all_reduce(x).item() == 2
comm.barrier()
print(int(y), int(x))
"""


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("call(x)", True),
        ("obj.call(x, op=x)", True),
        ("call(*[x], **{})", True),
        ("if x: call(x)", True),
        ("for _ in [0]: call(x)", True),
        ("try: call(x)\nfinally: pass", True),
        ("with obj: call(x)", True),
        ("y = call(x)", False),
        ("_ = call(x)", False),
        ("y = [call(x)]", False),
        ("[call(z) for z in [x]]", False),
        ("call(x).real", False),
        ("if call(x): pass", False),
        ("assert call(x)", False),
        ("(y := call(x))", False),
        ("print(call(x), end='')", False),
        ("(lambda: call(x))()", False),
        ("y = [*map(call, [x])]", False),
    ],
)
def test_the_instruction_after_a_call_says_whether_its_result_is_dropped(statement, expected):
    found = []

    def call(value, op=None):
        frame = sys._getframe(1)
        found.append(is_dropped(frame.f_code, frame.f_lasti))
        return value

    class Thing:
        def __enter__(self):
            return self

        def __exit__(self, *args):
            return None

    thing = Thing()
    thing.call = call
    body = "\n    ".join(statement.splitlines())
    names = {"call": call, "obj": thing}
    exec(f"def run(x):\n    {body}\nrun(1)", names)
    exec(statement, {**names, "x": 1})
    assert found == [expected] * 2


def test_dropped_results_of_all_reduce_are_warned_of_once_for_each_place(run_ranks):
    job = run_ranks(2, SCRIPT)
    assert "2 1" in job.lines()
    assert job.said.count("the result of comm.all_reduce is dropped here") == 2
    assert "script.py:8: UserWarning" in job.said
    assert "script.py:9: UserWarning" in job.said
