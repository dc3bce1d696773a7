"""A process that has imported what launchers and ranks import, and forks the hosts that fork those; see conftest.py.

Each worker of pytest needs both hosts, and to import torch takes longer than most tests. It reads names of modules from
a socket, each with the standard input and output of a process that goes on as that host, and with the id of a process
in whose namespaces it does so, or 0.
The interpreter runs the code that `serve` returns at its top level, so that no frame of this file lies below a rank.
"""

import gc
import os
import socket
import threading

from kernel import enter_namespaces, use_huge_pages
from launch_host import import_all


def serve(file: int) -> str:
    """Fork hosts until the other end is closed, and wait for them. Returns: what a host goes on with."""
    gc.disable()  # what an import makes stays, and to look for garbage in it takes a sixth of the time
    import_all()
    assert threading.active_count() == 1
    gc.enable()
    gc.collect()
    gc.freeze()
    use_huge_pages()
    with socket.socket(fileno=file) as asking:
        while True:
            request, files, _, _ = socket.recv_fds(asking, 100, 2)
            if not request:
                break
            name, pid = request.decode().split()
            if not os.fork():
                os.setsid()
                for number, own in enumerate(files):
                    os.dup2(own, number)
                    os.close(own)
                asking.close()
                if pid != "0":
                    enter_namespaces(int(pid))
                return f"import {name} as host; exec(host.serve())"
            for own in files:
                os.close(own)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return ""
