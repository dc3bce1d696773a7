"""Processes are found by descent, and ended with all they started."""

import os
import subprocess
import sys

import pytest

from unisono.launch.linux import descendants, ends_at_once
from unisono.machine import usable_cores


def test_descendants_are_found_through_generations():
    shell = subprocess.Popen(["sh", "-c", "sleep 100 & echo $!; wait"], stdout=subprocess.PIPE)
    sleeper = int(shell.stdout.readline())
    assert descendants(shell.pid) == [sleeper]
    assert {shell.pid, sleeper} <= set(descendants(os.getpid()))
    os.kill(sleeper, 9)
    shell.communicate(timeout=30)


def test_orphans_are_ended_and_others_spared():
    program = """
import os, subprocess
from unisono.launch.linux import become_subreaper, descendants, end_descendants
become_subreaper()
kept = subprocess.Popen(["sleep", "100"])
subprocess.run(["sh", "-c", "sleep 100 & setsid sleep 100 &"])
assert end_descendants(spare=[kept.pid]) == []
assert descendants(os.getpid()) == [kept.pid] and kept.poll() is None
assert end_descendants() == [] == descendants(os.getpid())
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("setting", "at_once"),
    [("", True), ("signal.signal(15, signal.SIG_IGN)", False), ("signal.signal(15, lambda *_: None)", False)],
)
def test_a_signal_that_is_handled_or_ignored_does_not_end_a_process_at_once(setting, at_once):
    program = f"import signal, sys\n{setting}\nprint('up', flush=True)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert ends_at_once(process.pid, 15) is at_once
        process.communicate(timeout=30)
    assert not ends_at_once(1_000_000_000, 15)


def test_cores_are_at_most_those_of_the_affinity():
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
