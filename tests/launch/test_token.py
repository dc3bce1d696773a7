"""The handshake by which two hosts prove to each other that they know the token of a job."""

import socket
import threading
import time

import pytest

from unisono.launch.hosts import shared_token as handshake

TOKEN, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def ends():
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def answer(connection, token):
    """Take the other side of a handshake in a thread; `join` it and look into `errors`."""
    errors = []

    def run():
        try:
            handshake.accept(connection, token)
        except (handshake.TokenError, OSError) as error:
            errors.append(error)
        finally:
            connection.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_two_sides_with_one_token_trust_each_other(ends):
    thread, errors = answer(ends[0], TOKEN)
    handshake.introduce(ends[1], TOKEN)
    thread.join()
    assert errors == []


def test_neither_side_trusts_another_token(ends):
    thread, errors = answer(ends[0], OTHER)
    with pytest.raises(handshake.TokenError, match="another token than this host"):
        handshake.introduce(ends[1], TOKEN)
    thread.join()
    assert [str(error) for error in errors] == ["it does not know the token"]


def test_an_answer_that_is_sent_back_proves_nothing(ends):
    thread, errors = answer(ends[0], TOKEN)
    greeting = ends[1].recv(1024)
    challenge = greeting[-32:]
    ends[1].sendall(challenge + challenge)
    thread.join()
    assert [str(error) for error in errors] == ["it does not know the token"]


def test_a_side_that_sends_byte_by_byte_is_given_up_in_time(ends, monkeypatch):
    monkeypatch.setattr(handshake, "_HANDSHAKE_S", 0.5)
    since_s = time.monotonic()
    thread, errors = answer(ends[0], TOKEN)
    while thread.is_alive() and time.monotonic() - since_s < 5:
        ends[1].send(b"x")
        thread.join(0.1)
    assert time.monotonic() - since_s < 2
    assert isinstance(errors[0], TimeoutError)
