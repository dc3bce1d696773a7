"""Embedding tables divided over hosts, which are network namespaces, have the bits of one rank with whole tables."""

import os
import signal
from pathlib import Path

import pytest
from host_network import Hosts, finish
from host_training import await_line

from tests.digests import digests

PROGRAMS = Path(__file__).parent.parent / "trainer" / "programs"
PROGRAM, KEPT = PROGRAMS / "divided_tables.py", PROGRAMS / "kept_rows.py"
LOOP = PROGRAMS.parent.parent / "parallel" / "programs" / "divided_loop.py"


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["", "dynamic,"])
def test_tables_divided_over_hosts_have_the_bits_of_one_rank(
    hosts: Hosts, fork_python, tmp_path, kind: str, ranks: int
) -> None:
    kinds = f"{kind}rules,clipped,steps"
    expected = digests(fork_python(PROGRAM, kinds, tmp_path), least=11)
    (hosts.folder / "script.py").write_text(PROGRAM.read_text().replace(', engine="collective"', ""))
    first, second = hosts.run("script.py", kinds, ".", hosts=2, ranks=ranks)
    assert not first.returncode and not second.returncode, first.stderr + second.stderr
    assert digests([line.split("] ", 1)[-1] for line in first.stdout.splitlines()], least=11) == expected


@pytest.mark.parametrize("kind", ["fixed", pytest.param("dynamic", marks=pytest.mark.soak)])
def test_a_rank_of_a_host_is_replaced_with_the_rows_that_another_host_keeps(
    hosts: Hosts, fork_python, tmp_path, kind: str
) -> None:
    (expected,) = fork_python(KEPT, kind, "-", "", tmp_path)
    (hosts.folder / "script.py").write_text(KEPT.read_text().replace('    engine="collective",\n', ""))
    (hosts.folder / "marks").mkdir()
    deaths = "3:2:loss,0:4:written,2:7:600,1:10:1500"
    first, second = hosts.run("script.py", kind, "run", deaths, "marks", hosts=2, ranks=2)
    assert not first.returncode and not second.returncode, first.stderr + second.stderr
    assert first.stdout.splitlines()[-1].split("] ", 1)[-1] == expected
    assert first.stderr.count("; replaced") == 4, first.stderr


@pytest.mark.parametrize("kind", ["dynamic", pytest.param("fixed", marks=pytest.mark.soak)])
def test_a_host_that_is_lost_leaves_its_rows_with_another(hosts: Hosts, fork_python, tmp_path, kind: str) -> None:
    (expected,) = fork_python(KEPT, kind, "-", "", tmp_path)
    step = "        trainer.step(loss, batch)\n"
    slow = f"{step}        time.sleep(0.1)\n        print('working' * (trainer.steps_done == 3), flush=True)\n"
    text = KEPT.read_text().replace("import sys\n", "import sys\nimport time\n").replace(step, slow)
    (hosts.folder / "script.py").write_text(text.replace('    engine="collective",\n', ""))
    flags = "--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=0.5,keep_alive_interval=1,keep_alive_max_attempt=3"
    jobs = [hosts.start_rank(host, "script.py", kind, "-", "", ".", ranks=2, flags=flags) for host in range(2)]
    await_line(jobs[1], "working", stream="stdout")
    os.kill(jobs[1].pid, signal.SIGKILL)
    done, _ = [finish(job) for job in jobs]
    assert not done.returncode, done.stderr
    assert "ranks 2-3 on host 0 now" in done.stderr and "starting all" not in done.stderr, done.stderr
    assert done.stdout.splitlines()[-1].split("] ", 1)[-1] == expected


def test_a_loop_over_hosts_has_the_rows_of_one_host(hosts: Hosts, fork_ranks, tmp_path) -> None:
    expected = fork_ranks(4, LOOP, "shared", "still", 5, "-", tmp_path / "rows").lines(0)[-2:]
    text = LOOP.read_text()
    (hosts.folder / "script.py").write_text(text.replace('os.environ.get("FILES")', '"."'))
    first, second = hosts.run("script.py", "auto", "still", "5", "-", "rows", hosts=2, ranks=2)
    assert not first.returncode and not second.returncode, first.stderr + second.stderr
    assert [line.split("] ", 1)[-1] for line in first.stdout.splitlines()][-2:] == expected
    (hosts.folder / "script.py").write_text(text.replace("divided=True", "divided=False"))
    first, _ = hosts.run("script.py", "auto", "still", "5", "-", "rows", hosts=2, ranks=1)
    assert first.returncode and "make the tables with divided=True" in " ".join(first.stderr.split())
