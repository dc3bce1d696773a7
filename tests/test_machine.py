"""Which machine this is."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from unisono.machine import host_id


def test_a_system_is_named_by_its_boot():
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert host_id() == boot
    assert host_id(with_network=True) == f"{boot} {Path('/proc/self/ns/net').readlink()}"


@pytest.mark.parametrize("with_network", [False, True])
def test_hosts_that_hide_what_names_them_are_told_apart_by_their_host_names(monkeypatch, with_network):
    def hidden(path, *_, **__):
        raise PermissionError(path)

    monkeypatch.setattr(Path, "read_text", hidden)
    monkeypatch.setattr(Path, "readlink", hidden)
    found = []
    for name in ("one", "two", "one"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        found.append(host_id(with_network=with_network))
    assert found[0] == found[2] != found[1]
