"""A slow link between hosts, which are network namespaces: each gets a device eth0 of a limited rate, with a delay.

delayed_link.py BITS_PER_S DELAY_S NAMESPACE=ADDRESS...

Netem of the kernel does the same where there is netem. Here the kernel's token bucket limits the rate, so that TCP sees
its own packets in the queue, as on a network card; only the delay is this program's. It reads whole batches of segments
from tun devices (TSO), some 2 000 per second and Gbit/s, and writes each to the device of its destination when it is
due. It says "ready" and works until its standard input ends; the devices go with it.
"""

import ctypes
import fcntl
import ipaddress
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_PR_SET_TIMERSLACK = 29
_HEADER_NBYTES = 10
"""Of virtio, before each packet: says how the kernel is to cut it into segments."""
_MOST_NBYTES = _HEADER_NBYTES + 65535
_AT_ONCE = 16
"""Packets that are read before others are written."""
_BURST_NBYTES = 72 * 1024
"""More than one batch of segments with its headers, which the token bucket would otherwise cut up."""


def main() -> None:
    """Make the devices, and move packets."""
    bits_per_s, delay_s = int(sys.argv[1]), float(sys.argv[2])
    places = [argument.partition("=")[::2] for argument in sys.argv[3:]]
    devices: dict[bytes, int] = {}
    if delay_s:
        devices = {socket.inet_aton(address): _tun(namespace) for namespace, address in places}
    else:
        (one, _), (other, _) = places
        _run("ip", "-n", one, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", other)
    for namespace, address in places:
        _set_up(namespace, address, bits_per_s)
    # Ranks that compute must not make the link slower.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    print("ready", flush=True)
    _move(devices, delay_s)


def _tun(namespace: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    made = fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"delayed%d", flags))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    _run("ip", "link", "set", made[:16].rstrip(b"\0").decode(), "netns", namespace, "name", "eth0")
    return device


def _set_up(namespace: str, address: str, bits_per_s: int) -> None:
    _run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
    _run("ip", "-n", namespace, "link", "set", "lo", "up")
    _run("ip", "-n", namespace, "link", "set", "eth0", "up")
    # What hosts have unless somebody changes it; a machine that tunes itself for the internet may have another.
    network = str(ipaddress.ip_interface(f"{address}/24").network)
    _run("ip", "-n", namespace, "route", "change", network, "dev", "eth0", "src", address, "congctl", "cubic")
    bucket = ("tbf", "rate", f"{bits_per_s}bit", "burst", str(_BURST_NBYTES), "latency", "100ms")
    _run("tc", "-n", namespace, "qdisc", "add", "dev", "eth0", "root", *bucket)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")


def _move(devices: dict[bytes, int], delay_s: float) -> None:
    waiting: deque[tuple[float, int, bytes]] = deque()
    sources = [0, *devices.values()]
    while True:
        timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready = select.select(sources, [], [], timeout_s)[0]
        if 0 in ready and not os.read(0, 1):
            return
        for device in ready:
            if device:
                _take(device, devices, waiting, delay_s)
        now_s = time.monotonic()
        while waiting and waiting[0][0] <= now_s:
            _, device, packet = waiting.popleft()
            try:
                os.write(device, packet)
            except OSError:  # a device that is down, or has no room: the packet is lost, as on a real link
                continue


def _take(device: int, devices: dict[bytes, int], waiting: deque[tuple[float, int, bytes]], delay_s: float) -> None:
    for _ in range(_AT_ONCE):
        try:
            packet = os.read(device, _MOST_NBYTES)
        except BlockingIOError:
            return
        is_ipv4 = packet[_HEADER_NBYTES] >> 4 == 4
        to = devices.get(packet[_HEADER_NBYTES + 16 : _HEADER_NBYTES + 20]) if is_ipv4 else None
        if to is not None:
            waiting.append((time.monotonic() + delay_s, to, packet))


if __name__ == "__main__":
    main()
