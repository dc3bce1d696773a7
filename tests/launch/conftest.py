"""The launcher as a user runs it. A test that leaves a process behind fails."""

import os
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from host_network import HostNetwork, Hosts, obstacle
from host_training import LARGE_TRAIN, TRAIN, sha_of

from launcher import Host, Launcher, LaunchHost
from spawn_agents import AgentStarter
from unisono.launch.channel import Channel
from unisono.launch.spawn import caller


@pytest.fixture
def fresh_launcher(tmp_path: Path) -> Iterator[Launcher]:
    """A launcher whose processes are what a user's are."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.check_nothing_is_left()


@pytest.fixture
def launcher(fresh_launcher: Launcher) -> Launcher:
    """The fresh one, where a file of tests does not say otherwise."""
    return fresh_launcher


@pytest.fixture
def warm_launcher(tmp_path: Path, launch_host: LaunchHost | None) -> Iterator[Launcher]:
    """A launcher that does not import torch anew; for tests that are not about how a job starts."""
    launcher = Launcher(tmp_path, launch_host)
    yield launcher
    launcher.check_nothing_is_left()


@pytest.fixture
def warm_spawn(launch_host: LaunchHost | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `unisono.spawn` in this process start agents that do not import torch anew."""
    if launch_host is None:
        yield
        return
    address = f"unisono-agents-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener, Path(os.devnull).open("r+b") as null:
        listener.bind(f"\0{address}")
        listener.listen()
        files = [null.fileno()] * 3
        environment = dict(os.environ)
        pid = launch_host.start(
            address, cwd=Path.cwd(), environment=environment, files=files, mark=address, program="agents"
        )
        channel = Channel(listener.accept()[0])
    monkeypatch.setattr(caller, "subprocess", AgentStarter(channel))
    yield
    channel.close()
    os.waitpid(pid, 0)


@pytest.fixture(scope="session")
def host_network(tmp_path_factory: pytest.TempPathFactory, start_host: Callable[..., Host]) -> Iterator[Hosts]:
    """Three hosts; the tests are skipped where they cannot be made."""
    if (reason := obstacle()) is not None:
        pytest.skip(f"several hosts cannot be made here: {reason}")
    network = HostNetwork(3)
    hosts = Hosts(network, tmp_path_factory.mktemp("hosts"), tmp_path_factory.mktemp, start_host)
    try:
        hosts._launch_host(0), hosts._launch_host(1)
        yield hosts
    finally:
        hosts.close()
        network.close()


@pytest.fixture(scope="session")
def third_host(host_network: Hosts) -> None:
    """Let the third host be ready, too: for tests that start something on it."""
    host_network._launch_host(2)


@pytest.fixture
def hosts(host_network: Hosts, tmp_path: Path) -> Iterator[Hosts]:
    """Three hosts. A test that leaves a process behind on one fails."""
    host_network.folder, host_network.launchers = tmp_path, []
    yield host_network
    for launcher in host_network.launchers:
        launcher.check_nothing_is_left()


@pytest.fixture(scope="session")
def calm_sha(tmp_path_factory: pytest.TempPathFactory, launch_host: LaunchHost | None) -> str:
    """The digest of a run on one rank of `host_training.TRAIN` in which nothing happens."""
    return _sha_of_one_rank(TRAIN, Launcher(tmp_path_factory.mktemp("calm"), launch_host))


@pytest.fixture(scope="session")
def large_calm_sha(tmp_path_factory: pytest.TempPathFactory, launch_host: LaunchHost | None) -> str:
    """The same of `host_training.LARGE_TRAIN`."""
    return _sha_of_one_rank(LARGE_TRAIN, Launcher(tmp_path_factory.mktemp("calm"), launch_host))


def _sha_of_one_rank(script: str, launcher: Launcher) -> str:
    (launcher.folder / "script.py").write_text(script)
    done = launcher.run("run", "script.py", "0.0")
    launcher.check_nothing_is_left()
    return sha_of(done.stdout)
