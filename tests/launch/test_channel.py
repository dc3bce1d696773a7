"""Messages and open files cross a channel whole and in order."""

import os
import socket
import threading

from unisono.launch.channel import Channel


def test_messages_of_any_size_arrive_with_their_files():
    ours, theirs = map(Channel, socket.socketpair())
    read, write = os.pipe()
    large = {"type": "start", "arguments": ["x" * 1_000_000, "\udcff"]}

    def send():
        ours.send(large)
        ours.send({"type": "fork"}, [write])
        ours.send({"type": "end"})
        ours.close()

    sender = threading.Thread(target=send)
    sender.start()
    received = []
    while not theirs.closed:
        received += theirs.receive()
    sender.join()
    assert [message for message, _ in received] == [large, {"type": "fork"}, {"type": "end"}]
    (copy,) = received[1][1]
    assert not os.get_inheritable(copy)
    os.write(copy, b"x")
    assert os.read(read, 10) == b"x"
    theirs.close()
    for file in (read, write, copy):
        os.close(file)


def test_a_message_to_an_end_that_is_gone_is_dropped():
    ours, theirs = map(Channel, socket.socketpair())
    theirs.close()
    ours.send({"type": "end"})
    assert ours.closed
    ours.close()
