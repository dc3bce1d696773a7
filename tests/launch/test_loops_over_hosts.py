"""Random loops come to the same bits on two hosts as in one process; see tests/trainer/test_random_loops.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from host_network import finish

from printed import printed

PROGRAM = Path(__file__).parents[1] / "trainer" / "programs" / "random_loop.py"


def check(hosts, fork_python, seeds, how, ranks):
    """Run loops on hosts with some ranks each."""
    options = ("--ranks", str(sum(ranks)))
    alone = fork_python(PROGRAM, "auto+" if how.endswith("+") else "auto", seeds, *options)
    started = [hosts.start_rank(host, str(PROGRAM), how, seeds, *options, ranks=n) for host, n in enumerate(ranks)]
    first, second = [finish(process) for process in started]
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    told = printed(first.stdout) | printed(second.stdout)
    assert [told[rank] for rank in range(sum(ranks))] == [alone] * sum(ranks)
    assert "warning" not in first.stderr.replace("warning: every micro-batch has one sample", "")


@pytest.mark.parametrize(
    ("seeds", "how", "ranks"), [("60-67", "auto+", (2, 2)), ("68-71", "auto", (2, 1)), ("72-73", "block", (2, 2))]
)
def test_some_loops_have_one_digest_on_two_hosts(hosts, fork_python, seeds, how, ranks):
    check(hosts, fork_python, seeds, how, ranks)


@pytest.mark.soak
@pytest.mark.parametrize("seeds", [f"{first}-{first + 24}" for first in range(500, 600, 25)])
@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        ("auto+", (1, 1)),
        ("auto+", (2, 2)),
        ("auto", (2, 1)),
        ("block", (2, 2)),
        ("size", (1, 1)),
        ("zero1", (2, 2)),
        ("stages", (2, 1)),
    ],
)
def test_many_loops_have_one_digest_on_two_hosts(hosts, fork_python, seeds, how, ranks):
    check(hosts, fork_python, seeds, how, ranks)
