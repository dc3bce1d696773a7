"""Tables on servers: the same bits as without, also when servers and ranks are killed, and what is refused."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import unisono
from launcher import Launcher
from unisono.embedding import SGD, Table, Tables
from unisono.launch.control import ask
from unisono.variables import SERVERS_VARIABLE

PROGRAM = Path(__file__).parent / "programs" / "table_servers.py"
STEPS = 8


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def without(fork_python):
    return fork_python(PROGRAM, "sync", STEPS, "-")[0].split()[-1]


def counts(out: str) -> dict[str, int]:
    return {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", out.partition("ServerCounts")[2])}


def check_counts(job, *, steps) -> dict[str, int]:
    found = counts(job.out)
    assert found["steps"] == found["applied"] == steps and found["rows_applied"] == found["rows_given"] > 1000 * steps
    return found


@pytest.mark.parametrize(
    ("placement", "ranks", "servers", "kills"),
    [
        ("hash", 2, 2, "2,5"),
        ("column", 2, 2, "3"),
        *(
            pytest.param(p, r, s, "2,4,5", marks=pytest.mark.soak)
            for p in ("hash", "column")
            for r in (1, 2, 4)
            for s in (1, 2, 3)
        ),
    ],
)
@pytest.mark.usefixtures("here")
def test_servers_that_are_killed_give_the_bits_of_one_process(run_ranks, without, placement, ranks, servers, kills):
    job = run_ranks(ranks, PROGRAM, "sync", STEPS, kills, "-", "0", placement, flags=["--servers", servers])
    assert job.sha() == without
    assert check_counts(job, steps=STEPS - 1)["most_stale"] == 0  # ranks make the state in the first step
    starts = servers * len(kills.split(","))
    assert (
        len(re.findall(r"was killed by SIGKILL; it is started anew with its rows, and ranks wait", job.said)) == starts
    )


@pytest.mark.usefixtures("here")
def test_a_rank_that_is_killed_is_replaced_beside_servers(run_ranks, without):
    job = run_ranks(2, PROGRAM, "sync", STEPS, "3", "5", flags=["--servers", "1"])
    assert job.sha() == without and "rank 1 was killed by SIGKILL" in job.said and "replaced" in job.said


@pytest.mark.parametrize("mode", ["bounded(2)", pytest.param("async", marks=pytest.mark.soak)])
@pytest.mark.usefixtures("here")
def test_steps_that_do_not_wait_lose_no_update(run_ranks, mode):
    job = run_ranks(2, PROGRAM, mode, 3 * STEPS, "3,8,9", flags=["--servers", "1"])
    found = check_counts(job, steps=3 * STEPS - 1)
    assert 0 < found["most_stale"] <= (2 if mode == "bounded(2)" else 3 * STEPS)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("placement", "mode", "ranks_die"),
    [
        ("hash", "sync", False),
        ("hash", "sync", True),
        ("hash", "bounded(2)", True),
        ("hash", "async", False),
        ("column", "sync", True),
        ("column", "async", False),
    ],
)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.usefixtures("here")
def test_twenty_kills_at_random_moments(run_ranks, launch_host, placement, mode, ranks_die, seed):
    steps = 400
    calm = run_ranks(2, PROGRAM, mode, steps, "-", "-", "0", placement, flags=["--servers", "2"])
    launcher, rng = Launcher(Path.cwd(), launch_host), random.Random(seed)
    killed: list[int] = []
    # The pause lets the run last longer than the kills take, however fast the machine is.
    arguments = [str(PROGRAM), mode, str(steps), "-", "-", "0.04", placement]
    with launcher.start("run", "-n", "2", "--servers", "2", *arguments) as process:
        while process.poll() is None and len(killed) < 20:
            wants_rank = ranks_die and len(killed) % 5 == 4
            answer = ask(process.pid, {"ask": "ranks" if wants_rank else "job"}) or {}
            found = answer.get("ranks") if wants_rank else answer.get("servers")
            if not isinstance(found, list) or (wants_rank and not all(each["armed"] for each in found)):
                found = []
            if pids := [each["pid"] for each in found if each["pid"] not in killed]:
                killed.append(rng.choice(pids))
                with suppress(ProcessLookupError):
                    os.kill(killed[-1], signal.SIGKILL)
            time.sleep(rng.uniform(0.05, 0.4))
        out, err = (text.decode() for text in process.communicate(timeout=300))
    assert process.returncode == 0 and len(killed) == 20, err
    if mode == "sync":
        assert calm.sha() in out
    found = counts(out)
    assert found["steps"] == found["applied"] and found["rows_applied"] == found["rows_given"] > 0
    if not ranks_die:
        assert found["rows_given"] == counts(calm.out)["rows_given"] and found["steps"] == steps - 1


@pytest.mark.usefixtures("here")
def test_servers_without_tables_are_told(run_ranks):
    job = run_ranks(1, "print('done')", flags=["--servers", "2"])
    assert "the 2 servers of --servers 2 were given nothing to do: the program has made no" in job.said


def table(**options):
    return {"item": Table(**{"rows": 5, "dim": 2, "optimizer": SGD(lr=0.1), **options})}


@pytest.mark.parametrize(
    ("started", "options", "message"),
    [
        (0, {"servers": 2}, r"servers=2, and this program was started without .* `unisono run --servers 2`"),
        (1, {"servers": 2}, r"servers=2, and the command has started 1: give `unisono run --servers 2`"),
        (9, {}, r"9 servers for 5 rows: 4 of them would have none. Start at most 5"),
        (0, {"consistency": "async"}, r"consistency='async' is for tables on servers, and these are on none"),
        (1, {"consistency": "bounded(0)"}, r'consistency=\'bounded\(0\)\': give "sync", "async", or "bounded\(k\)"'),
        (
            3,
            {"placement": "column"},
            r"3 servers for rows of 2 columns: 1 of them would have none. Start at most 2, or",
        ),
        (1, {"placement": "columns"}, "placement='columns'"),
        (1, {"servers": -1}, "servers=-1"),
    ],
)
def test_servers_that_do_not_fit_are_refused(monkeypatch, started, options, message):
    monkeypatch.setenv(SERVERS_VARIABLE, str(started))
    with pytest.raises(ValueError, match=message):
        Tables(table(), **options)


def test_tables_that_servers_cannot_update_are_refused(monkeypatch):
    monkeypatch.setenv(SERVERS_VARIABLE, "1")
    dynamic = {"rows": None, "capacity": 9}
    with pytest.raises(ValueError, match="one on servers keeps its memory"):
        Tables(table(**dynamic, when_full="grow"))
    with pytest.raises(ValueError, match=r"gives up rows, .* would then meet the row of another id"):
        Tables(table(**dynamic, evict_after=3), consistency="bounded(4)")
    tables = Tables(table())
    tables.settle()
    assert tables.server_counts is None
    with pytest.raises(ValueError, match="these tables are on servers: give the model to a Trainer"):
        tables.step()
    model = torch.nn.Sequential(tables["item"])
    with pytest.raises(ValueError, match=r'here ranks share none: engine="collective" keeps the weights .* apart'):
        unisono.Trainer(model, tables.optimizer, virtual_ranks=1, progress=False, engine="collective")
    model.append(Tables(table())["item"])
    with pytest.raises(ValueError, match="come from 2 objects: make them by one"):
        unisono.Trainer(model, tables.optimizer, virtual_ranks=1, progress=False)
