"""The end of a file at which ranks have met, of which torch's last store that ends alone removes it."""

import multiprocessing
import time

import torch.distributed as dist

from unisono.job import rendezvous_file
from unisono.job.rendezvous_file import one_at_a_time


def _end(path, entered, leave):
    store = dist.FileStore(str(path), 2)
    with one_at_a_time(path):
        entered.set()
        leave.wait(30)
        del store


def test_ranks_let_go_of_a_store_one_after_the_other(tmp_path):
    path = tmp_path / "meet"
    context = multiprocessing.get_context("fork")
    entered, leave = ([context.Event() for _ in range(2)] for _ in range(2))
    ranks = [context.Process(target=_end, args=(path, *events)) for events in zip(entered, leave, strict=True)]
    ranks[0].start()
    assert entered[0].wait(30)
    ranks[1].start()
    assert not entered[1].wait(0.3)
    leave[0].set()
    assert entered[1].wait(30) and path.exists()
    leave[1].set()
    for rank in ranks:
        rank.join(30)
        assert rank.exitcode == 0
    assert not path.exists()


def test_a_rank_that_stays_does_not_keep_others(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous_file, "_TIMEOUT_S", 0.2)
    begin_s = time.monotonic()
    with one_at_a_time(tmp_path / "meet"), one_at_a_time(tmp_path / "meet"):
        assert time.monotonic() - begin_s >= 0.2


def test_without_a_file_or_its_folder_there_is_nothing_to_wait_for(tmp_path):
    with one_at_a_time(None), one_at_a_time(tmp_path / "gone" / "meet"):
        pass
