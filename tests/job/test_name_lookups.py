"""While a store is connected to, no name server is asked, and afterwards all is as before."""

import socket
import threading

import pytest
import torch.distributed as dist

from unisono.name_lookups import _resolver, answered_here
from unisono.tcp_store import LOOPBACK, make_store


@pytest.fixture
def name_server():
    """A name server that never answers, for threads that run `ask_it`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((LOOPBACK, 0))
        server.setblocking(False)
        yield server


def ask_it(server, body):
    """Run a function in a thread whose resolver knows this name server only, and waits 1 s for it."""
    raised = []

    def run():
        state = _resolver()
        state.servers[0].port = socket.htons(server.getsockname()[1])
        state.servers[0].address[:] = socket.inet_aton(LOOPBACK)
        state.count, state.retransmission, state.tries = 1, 1, 1
        before = bytes(state)
        try:
            body()
            assert bytes(state) == before
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    if raised:
        raise raised[0]


def was_asked(server):
    try:
        return b"in-addr" in server.recv(512)
    except BlockingIOError:
        return False


def look_up(_=None):
    with pytest.raises(OSError, match="name resolution"):
        socket.getnameinfo((f"::ffff:{LOOPBACK}", 80), 0)


def test_a_name_server_is_asked_only_outside(name_server):
    def body():
        look_up()
        assert was_asked(name_server) and not (was_asked(name_server) and was_asked(name_server))
        with answered_here(LOOPBACK):
            assert socket.getnameinfo((f"::ffff:{LOOPBACK}", 80), socket.NI_NUMERICSERV) == (f"::ffff:{LOOPBACK}", "80")
        assert not was_asked(name_server)
        look_up()
        assert was_asked(name_server)

    ask_it(name_server, body)


def test_an_error_leaves_nothing_changed(name_server):
    def body():
        with pytest.raises(dist.DistError), answered_here(LOOPBACK):
            raise dist.DistError("no store")
        look_up()
        assert was_asked(name_server)

    ask_it(name_server, body)


def test_names_are_asked_for(name_server):
    def body():
        with answered_here("localhost"):
            look_up()
        assert was_asked(name_server)

    ask_it(name_server, body)


def test_a_store_is_connected_to_without_a_question(name_server):
    def body():
        with socket.create_server((LOOPBACK, 0)) as listener:
            port = listener.getsockname()[1]
            server = make_store(
                LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            client = make_store(LOOPBACK, port, is_master=False, wait_for_workers=False)
            server.set("key", "value")
            assert client.get("key") == b"value"
        assert not was_asked(name_server)

    ask_it(name_server, body)
