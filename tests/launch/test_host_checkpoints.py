"""Checkpoints of runs on several hosts: each writes and reads its part where they share the directory."""

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
from host_network import finish
from host_training import await_line, sha_of
from test_host_kills import CAUSES, CONF, kill

from unisono.state.checkpoint_store import CheckpointStore

SAVED = """
import os, sys, time
import torch
import torch.nn.functional as F
import unisono
folder, epochs, settings, todo, pause_s = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], float(sys.argv[5])
torch.manual_seed(3)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(6, 3000), torch.nn.BatchNorm1d(3000)
        self.last = torch.nn.Linear(3000, 3)
        self.tied = self.last.weight
        self.columns = torch.nn.Parameter(torch.randn(3, 3000).t())  # not contiguous
    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(x) + x @ self.columns
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))
if todo == "apart":
    os.makedirs(os.uname().nodename, exist_ok=True)
    os.chdir(os.uname().nodename)
trainer = unisono.Trainer(
    model, optimizer, virtual_ranks=6, seed=5, progress=False, ema_decay=0.9, directory=folder,
    checkpoints=eval(f"unisono.Checkpoints({settings})"),
)
trainer.print("begins after", trainer.steps_done)
steps = 0
for epoch in trainer.epochs(epochs):
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"), batch)
        steps += 1
        if steps == 2 and trainer.rank == trainer.world_size - 1:
            print("working", flush=True)
        time.sleep(pause_s)
        if todo == "linger" and trainer.rank == 2 and steps == 5:
            print("lingers", flush=True)
            time.sleep(1.5)
        if todo == f"lag {trainer.rank} {trainer.steps_done}":
            time.sleep(13)
        if todo == f"die {trainer.rank} {trainer.steps_done}" and not trainer.recovered:
            time.sleep(0.5)
            os.kill(os.getpid(), 9)
if todo == "tag":
    trainer.save()
    trainer.save(tag="whole")
trainer.print("weights sha256:", trainer.digest())
"""
EVERY_STEP = "every_steps=1, keep=30"
BY_PARTS = {"0", "2"}
"""The ranks that write, of two hosts with two each."""


@pytest.fixture
def job(hosts):
    """Run the script on hosts; return what they printed."""
    (hosts.folder / "script.py").write_text(SAVED)

    def run(folder, epochs, settings=EVERY_STEP, todo="", *, ranks=(2, 2), flags=()):
        arguments = ("script.py", folder, str(epochs), settings, todo, "0")
        jobs = [
            hosts.start_rank(host, *arguments, hosts=len(ranks), ranks=n, flags=flags) for host, n in enumerate(ranks)
        ]
        return [finish(each) for each in jobs]

    return run


@pytest.fixture
def alone(hosts, fork_python):
    """Run the script in one process; return its digest."""

    def run(folder, epochs, settings=EVERY_STEP):
        printed = fork_python(hosts.folder / "script.py", hosts.folder / folder, epochs, settings, "tag", 0)
        return sha_of("\n".join(printed))

    return run


def writers(folder: Path) -> dict[str, set[str] | None]:
    """For each checkpoint, the ranks that have written its weights; None if rank 0 has written all of it."""
    found = {}
    for path in sorted(folder.glob("checkpoints/*/manifest.json")):
        files = {entry["name"]: entry for entry in json.loads(path.read_text())["files"]}
        regions = files["model.safetensors"].get("regions")
        found[path.parent.name] = None if regions is None else {region.split()[2] for region in regions}
    return found


def same_files(run: Path, alone: Path) -> None:
    """Compare the files of checkpoints to the byte, but for manifests, which say who wrote what."""
    for path in sorted(alone.glob("checkpoints/*/*")):
        if path.name != "manifest.json":
            assert (run / path.relative_to(alone)).read_bytes() == path.read_bytes(), path


def succeeded(done):
    assert [each.returncode for each in done] == [0] * len(done), "\n".join(each.stderr for each in done)
    return done[0]


def begun_after(done) -> int:
    return int(re.search(r"begins after (\d+)", done.stdout)[1])


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_each_host_writes_and_reads_its_part_of_a_shared_directory(hosts, job, alone):
    """The files are those that one process writes, and any number of ranks goes on from them."""
    sha = sha_of(succeeded(job("run", 2, todo="tag")).stdout)
    assert writers(hosts.folder / "run") == {
        **{f"step-{step:09}": BY_PARTS for step in range(1, 9)},
        "tag-whole": BY_PARTS,
    }
    assert alone("one", 2) == sha
    same_files(hosts.folder / "run", hosts.folder / "one")
    last = succeeded(job("run", 3, ranks=(1, 2)))
    assert (begun_after(last), sha_of(last.stdout)) == (8, alone("one", 3))


def test_ranks_of_several_hosts_write_and_read_their_workers_alone(hosts, job, alone):
    """With sync=: all ranks write, since each has what no other one has."""
    (hosts.folder / "script.py").write_text(SAVED.replace("ema_decay=0.9", "sync=unisono.DiLoCo(every=3)"))
    sha = alone("one", 2)
    assert begun_after(succeeded(job("run", 1))) == 0
    last = succeeded(job("run", 2, todo="tag", ranks=(1, 2)))
    assert (begun_after(last), sha_of(last.stdout)) == (4, sha)
    ranks = {"0", "1", "2"}
    assert writers(hosts.folder / "run") == {
        **{f"step-{step:09}": ranks | {"3"} if step <= 4 else ranks for step in range(1, 9)},
        "tag-whole": ranks,
    }
    same_files(hosts.folder / "run", hosts.folder / "one")


TABLES = """
import sys
import torch
import unisono
from unisono.embedding import Adagrad, RowwiseAdagrad, Table, Tables
folder, epochs, settings = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.manual_seed(3)
tables = Tables({
    "fixed": Table(rows=4000, dim=16, pooling="sum", optimizer=RowwiseAdagrad(lr=0.05)),
    "grown": Table(dim=8, capacity=64, when_full="grow", init_std=0.1, pooling="mean", optimizer=Adagrad(lr=0.05)),
})
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tables, self.last = tables, torch.nn.Linear(24, 1)
    def forward(self, ids):
        return self.last(torch.cat([self.tables["fixed"](ids), self.tables["grown"](ids * 10**9)], 1))
model = Model()
optimizer = torch.optim.AdamW(unisono.embedding.dense_parameters(model), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randint(0, 4000, (48, 5)))
trainer = unisono.Trainer(
    model, optimizer, virtual_ranks=6, seed=5, progress=False, directory=folder,
    checkpoints=eval(f"unisono.Checkpoints({settings})"),
)
trainer.print("begins after", trainer.steps_done)
for epoch in trainer.epochs(epochs):
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(lambda model, batch: model(batch[0]).square().squeeze(1), batch)
trainer.print("weights sha256:", trainer.digest())
"""


def test_hosts_write_parts_of_tables_that_they_all_have_unless_changed_rows_are_stored(hosts, job, alone):
    (hosts.folder / "script.py").write_text(TABLES)
    whole = f"{EVERY_STEP}, incremental=False"
    sha = alone("one", 2, whole)
    succeeded(job("run", 1, whole))
    last = succeeded(job("run", 2, whole, ranks=(1, 2)))
    assert (begun_after(last), sha_of(last.stdout)) == (4, sha)
    assert writers(hosts.folder / "run") == {
        f"step-{step:09}": BY_PARTS if step <= 4 else {"0", "1"} for step in range(1, 9)
    }
    same_files(hosts.folder / "run", hosts.folder / "one")
    assert sha_of(succeeded(job("rows", 2)).stdout) == sha
    assert set(writers(hosts.folder / "rows").values()) == {None}


DIVIDED = (
    TABLES.replace("rows=4000, dim=16,", "rows=40_000, dim=16, init_std=0.1,")
    .replace('"grown": Table(dim=8, capacity=64, when_full="grow",', '"grown": Table(dim=8, rows=64,')
    .replace("\n})", "\n}, divided=True)")
    .replace("(ids * 10**9)", "(ids % 64)")
    .replace("torch.randint(0, 4000", "torch.randint(0, 40_000")
    .replace("import sys\n", "import os, sys\n")
    .replace(
        "torch.manual_seed(3)\n",
        'torch.manual_seed(3)\nif sys.argv[4] == "apart":\n'
        "    os.makedirs(os.uname().nodename, exist_ok=True)\n    os.chdir(os.uname().nodename)\n",
    )
)
"""The same with tables whose rows are divided over ranks."""


def test_ranks_of_several_hosts_write_and_read_spans_of_divided_tables(hosts, job, alone):
    (hosts.folder / "script.py").write_text(DIVIDED)
    whole = f"{EVERY_STEP}, incremental=False"
    sha = alone("one", 2, whole)
    succeeded(job("run", 1, whole))
    last = succeeded(job("run", 2, whole, ranks=(1, 2)))
    assert (begun_after(last), sha_of(last.stdout)) == (4, sha)
    assert writers(hosts.folder / "run") == {
        f"step-{step:09}": {*"0123"} if step <= 4 else {*"012"} for step in range(1, 9)
    }
    same_files(hosts.folder / "run", hosts.folder / "one")
    # Changed rows, over hosts with other working directories, which see that of rank 0.
    succeeded(job("rows", 1, todo="apart"))
    last = succeeded(job("rows", 2, todo="apart", ranks=(2, 1)))
    assert (begun_after(last), sha_of(last.stdout)) == (4, sha)
    assert [*writers(hosts.folder / "host0" / "rows").values()] == [{*"0123"}] * 4 + [{*"012"}] * 4
    for step in (2, 3, 4, 6, 7, 8):
        folder = hosts.folder / "host0" / "rows" / "checkpoints" / f"step-{step:09}"
        assert (folder / "model-base.safetensors").exists(), step
    assert not (hosts.folder / "host1" / "rows").exists()


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ("every_minutes=1e-9, every_epoch=False, keep=30", {*range(1, 9)}),
        ("every_steps=3, every_minutes=None, keep=30", {3, 4, 7, 8}),
        ("every_minutes=None, keep=30", {4, 8}),
    ],
)
def test_all_hosts_know_when_a_checkpoint_is_due(hosts, job, settings, steps):
    succeeded(job("run", 2, settings))
    assert writers(hosts.folder / "run") == {f"step-{step:09}": BY_PARTS for step in steps}


def test_rank_0_writes_alone_where_hosts_have_directories_of_their_own(hosts, job, alone):
    done = job("run", 2, todo="apart")
    assert sha_of(succeeded(done).stdout) == alone("one", 2)
    assert writers(hosts.folder / "host0" / "run") == {f"step-{step:09}": None for step in range(1, 9)}
    assert not (hosts.folder / "host1" / "run").exists()


def test_a_part_that_is_damaged_is_found_by_the_rank_that_reads_it(hosts, job, alone):
    succeeded(job("run", 1))
    newest, older = (hosts.folder / "run" / "checkpoints" / f"step-{step:09}" for step in (4, 3))
    damage(newest / "optimizer.safetensors")  # its last byte, which the last rank reads
    done = job("run", 2)
    assert (begun_after(succeeded(done)), sha_of(done[0].stdout)) == (3, alone("one", 2))
    assert "optimizer.safetensors: expected" in done[0].stderr and "Resuming from step 3 instead" in done[0].stderr
    for path in older.parent.iterdir():
        damage(path / "model.safetensors")
    failed = job("run", 3)
    assert [each.returncode for each in failed] == [1, 1]
    assert "all 8 checkpoints in " in failed[0].stderr and "which rank 2 wrote" in failed[0].stderr


def test_a_rank_that_dies_before_it_offers_its_part_costs_that_checkpoint_alone(hosts, job, alone):
    done = job("run", 2, todo="die 2 5")
    sha = sha_of(succeeded(done).stdout)
    found = writers(hosts.folder / "run")
    assert "checkpoint not written: the checkpoint of step 5" in done[0].stderr
    assert "rank 2 had not written its part when a rank was lost" in done[0].stderr
    assert found == {f"step-{step:09}": None if step == 6 else BY_PARTS for step in (1, 2, 3, 4, 6, 7, 8)}
    assert alone("one", 2) == sha


@pytest.mark.timeout(40)  # not the minute that rank 0 gives a rank to begin
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("step", [4, 5, 8])  # at the end of an epoch, in one, and at the end of the run
def test_nobody_waits_for_a_part_that_cannot_come(hosts, job, alone, rank, step):
    """The rank dies after the other one has asked for the next batch, which saves."""
    done = job("run", 2, todo=f"die {rank} {step}")
    assert sha_of(succeeded(done).stdout) == alone("one", 2)
    store = CheckpointStore(hosts.folder / "run" / "checkpoints")
    for info in store.list():
        store.verify(info)
    assert store.list()[0].step == 8
    assert len(store.list()) >= 7


@pytest.mark.soak
def test_a_rank_that_is_late_by_more_than_ten_seconds_costs_the_checkpoint_that_others_wait_for(hosts, job, alone):
    """Rank 0 saves at the last batch of the epoch and at its end, and is at the second save when rank 2 comes."""
    done = job("run", 2, todo="lag 2 4")
    assert sha_of(succeeded(done).stdout) == alone("one", 2)
    assert "rank 2 had not written its part and others had waited 10 s for it" in done[0].stderr
    found = writers(hosts.folder / "run")
    assert found == {f"step-{step:09}": None if step == 4 else BY_PARTS for step in range(1, 9)}


def test_an_interrupt_before_a_part_is_offered_loses_nothing(hosts, job):
    """Rank 0 has begun the checkpoint of step 5 when ranks are asked to end, and rank 2 has not come so far."""
    arguments = ("script.py", "run", "2", EVERY_STEP, "linger", "0")
    jobs = [hosts.start_rank(host, *arguments) for host in range(2)]
    await_line(jobs[1], "lingers", stream="stdout")
    os.kill(jobs[0].pid, signal.SIGINT)
    done = [finish(each) for each in jobs]
    assert done[0].returncode == 130
    found = writers(hosts.folder / "run")
    assert found.pop("step-000000005") in (BY_PARTS, None), done[0].stderr  # rank 0 waits for the part for some seconds
    assert found == {f"step-{step:09}": BY_PARTS for step in range(1, 5)}


def test_a_death_before_a_part_is_offered_loses_nothing_where_no_rank_is_replaced(hosts, job, alone):
    done = job("run", 2, todo="die 2 5", flags=("--recover", "off"))
    assert [each.returncode for each in done] == [137, 137]
    found = writers(hosts.folder / "run")
    assert found == {f"step-{step:09}": None if step == 5 else BY_PARTS for step in range(1, 6)}, done[0].stderr
    last = job("run", 2)
    assert (begun_after(succeeded(last)), sha_of(last[0].stdout)) == (5, alone("one", 2))


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("third_host")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 40))])
def test_hosts_that_are_lost_at_any_moment_leave_good_checkpoints_and_no_others(hosts, job, alone, seed):
    draw = random.Random(seed)
    ranks, lost, what, pause_s = draw.choice([1, 2]), draw.randrange(3), draw.choice(list(CAUSES)), draw.uniform(0, 0.6)
    case = f"seed {seed}: {what} of host {lost} with {ranks} ranks, {pause_s:.2f} s"
    arguments = ("script.py", "run", "3", EVERY_STEP, "", "0.05")
    flags = ("--nnodes", "1:3", "--rdzv-conf", CONF)
    jobs = [hosts.start_rank(host, *arguments, ranks=ranks, flags=flags) for host in range(3)]
    await_line(jobs[-1], "working", stream="stdout")
    time.sleep(pause_s)
    is_killed = kill(jobs[lost].pid, what)
    done = [finish(each) for each in jobs]
    told = "\n".join([case, *(f"host {host}: {each.returncode}\n{each.stderr}" for host, each in enumerate(done))])
    assert [each.returncode for host, each in enumerate(done) if host != lost or not is_killed] == [0, 0], told
    shas = {line.split()[-1] for each in done for line in each.stdout.splitlines() if "weights sha256" in line}
    assert shas == {alone("one", 3)}, told
    store = CheckpointStore(hosts.folder / "run" / "checkpoints")
    infos = store.list()
    for info in infos:
        store.verify(info)
    assert infos[0].step == 12 and len(infos) >= 8, told
    assert all(re.fullmatch(r"step-\d{9}", path.name) for path in store.folder.iterdir()), told
