"""Waiting for a transfer: it ends when the transfer does, passes errors on, and does not poll in vain for long."""

from __future__ import annotations

import pytest

from unisono.collectives.polling_wait import PollingWait


class Transfer:
    """A work that is complete after so many looks; None: only `wait` sees its end."""

    def __init__(self, looks: int | None, error: str = "") -> None:
        self.left, self.error = looks, error
        self.looks = 0
        self.waited = False

    def is_completed(self) -> bool:
        self.looks += 1
        return self.left is not None and self.looks > self.left

    def wait(self) -> bool:
        self.waited = True
        if self.error:
            raise RuntimeError(self.error)
        return True


def test_without_polling_it_only_waits():
    transfer = Transfer(looks=3)
    PollingWait(polls=False).wait(transfer)  # type: ignore[arg-type]
    assert transfer.waited and not transfer.looks


def test_it_polls_until_the_end():
    transfer = Transfer(looks=5)
    PollingWait(polls=True, poll_s=60).wait(transfer)  # type: ignore[arg-type]
    assert transfer.waited and transfer.looks == 6


def test_the_error_of_a_transfer_is_raised():
    with pytest.raises(RuntimeError, match="connection closed"):
        PollingWait(polls=True).wait(Transfer(looks=1, error="connection closed"))  # type: ignore[arg-type]


def test_polling_in_vain_is_left_out_more_and_more_often():
    waiter, polled = PollingWait(polls=True, poll_s=0), []
    for number in range(40):
        transfer = Transfer(looks=None)
        waiter.wait(transfer)  # type: ignore[arg-type]
        polled += [number] * (transfer.looks > 1)
    assert polled == [0, 2, 6, 14, 30]


def test_a_transfer_that_has_ended_says_nothing_about_polling():
    waiter = PollingWait(polls=True, poll_s=0)
    looks = []
    for left in (None, 0, None, None):  # in vain, no need to, left out, in vain again
        waiter.wait(transfer := Transfer(looks=left))  # type: ignore[arg-type]
        looks.append(transfer.looks)
    assert looks == [2, 1, 1, 2]
