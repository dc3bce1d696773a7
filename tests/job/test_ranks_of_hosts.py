"""Ranks that the launcher calls ranks of different hosts share no memory, even if the system looks the same to all."""

SCRIPT = """
import os
os.environ["UNISONO_HOST"] = f"{os.environ['RANK']} abc"
import unisono
job = unisono.init()
print("auto:", job.backend)
"""

SHM = """
import os
os.environ["UNISONO_HOST"] = f"{os.environ['RANK']} abc"
import unisono
unisono.init("shm")
"""


def test_ranks_of_different_hosts_get_gloo(fork_ranks):
    job = fork_ranks(2, SCRIPT)
    assert job.out.count("auto: gloo") == 2


def test_shared_memory_is_refused_between_hosts(fork_ranks):
    job = fork_ranks(2, SHM, code=1)
    assert "only ranks of one host can share memory" in job.said
