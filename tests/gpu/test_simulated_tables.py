"""Embedding tables in memory of the CPU beside a model on a device; see test_simulated.py."""

import re
from pathlib import Path

import pytest

from tests.digests import digests

ON_DEVICE = Path(__file__).parents[1] / "simulated_device.py"
TRAINER = Path(__file__).parents[1] / "trainer" / "programs"
LOOP = Path(__file__).parents[1] / "parallel" / "programs" / "divided_loop.py"
RANDOM = LOOP.with_name("random_table_loops.py")
TABLES, DEATHS = TRAINER / "divided_tables.py", TRAINER / "kept_rows.py"


@pytest.fixture(scope="module", params=["", "dynamic,"])
def kind(request):
    return request.param


@pytest.fixture
def first(fork_ranks, simulated_device):
    """Run a program on ranks, and return the lines of the first one."""

    def run(ranks, *command, **variables):
        variables = {"DEVICE": "sim:0", "OMP_NUM_THREADS": "1"} | variables
        return fork_ranks(ranks, ON_DEVICE, simulated_device, *command, variables=variables).lines(0)

    return run


@pytest.mark.parametrize(
    ("ranks", "kinds", "in_files"),
    [(3, "clipped,steps,full", False), (2, "clipped,steps,full", True), (3, "ahead,between", False)],
)
def test_divided_tables_have_the_bits_of_one_rank(first, tmp_path, kind, ranks, kinds, in_files):
    variables = {"FILES": str(tmp_path)} if in_files else {}
    found = [digests(first(n, TABLES, f"{kind}{kinds}", tmp_path, **variables), least=2) for n in (1, ranks)]
    assert found[0] == found[1]


def test_a_run_goes_on_with_other_numbers_of_ranks(first, tmp_path, kind):
    expected = first(1, TABLES, f"{kind}saved", tmp_path / "whole", 9)
    for ranks, steps in ((3, 3), (1, 6), (2, 9)):
        found = first(ranks, TABLES, f"{kind}saved", tmp_path / "parts", steps)
    assert found == expected


def test_ranks_that_die_are_replaced_with_the_rows_of_others(first, run_ranks, simulated_device, tmp_path):
    expected = first(1, DEATHS, "fixed", "-", "", tmp_path)
    job = run_ranks(3, ON_DEVICE, simulated_device, DEATHS, "fixed", "-", "1:2:loss,0:4:900,2:7:written", tmp_path)
    assert job.lines(0)[-1] == expected[-1] and job.said.count("; replaced") == 3, job.said


@pytest.mark.parametrize("engine", ["shared", "collective"])
def test_a_loop_of_ones_own_has_them_too(first, fork_ranks, tmp_path, engine):
    """Its dense part is not trained, so that the device makes no difference."""
    on_cpu = fork_ranks(3, LOOP, engine, "still", 6, "-", tmp_path / "cpu", variables={"OMP_NUM_THREADS": "1"}).lines(0)
    assert first(3, LOOP, engine, "still", 6, "-", tmp_path / "device") == on_cpu and on_cpu[0].startswith("rows ")


@pytest.mark.parametrize("seed", [5, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(200, 216))])
def test_random_loops_have_the_bits_of_those_without_the_device(first, fork_ranks, tmp_path, seed):
    n, folders = 2 + seed % 3, [tmp_path / name for name in ("cpu", "half", "device")]
    job = fork_ranks(n, RANDOM, seed, "shared", 0, 8, "-", folders[0], variables={"OMP_NUM_THREADS": "1"})
    first(n, RANDOM, seed, "collective", 0, 4, "-", folders[1], tmp_path)  # in files
    found = first(n, RANDOM, seed, "collective", 4, 8, *folders[1:])
    assert found[-1].startswith("state sha256: ") and found[-1] == job.lines(0)[-1]


MEMORY = """
import torch, unisono
from torch import nn
from unisono.embedding import Adam, Table, Tables, dense_parameters
from unisono.parallel import share_tables

class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        table = Table(rows=100_000, dim=32, init_std=0.1, optimizer=Adam(lr=0.1))
        self.words, self.head = Tables({"words": table}, **options)["words"], nn.Linear(32, 4)

    def forward(self, ids):
        return self.head(self.words(ids))

def loss(model, batch):
    assert batch[0].device.type == "sim" and model.head.weight.device.type == "sim"
    return model(batch[0]).square().mean((1, 2))

model = Net(divided=True)
trainer = unisono.Trainer(model, torch.optim.AdamW(dense_parameters(model)), virtual_ranks=2, progress=False)
data = torch.utils.data.TensorDataset(torch.randint(0, 100_000, (8, 5)))
for batch in trainer.batches(data, batch_size=8):
    trainer.step(loss, batch)
assert model.words.rows.count > 0
unisono.print0("peak", torch.ops.simulated.peak_nbytes(0, True))
model.words.weight.grad = torch.sparse_coo_tensor([[3]], torch.ones(1, 32), model.words.weight.shape)
model.double()
assert model.words.weight.dtype == torch.float64 and model.words.weight.device.type == "cpu"
assert model.to("cpu").to("sim:1").words.weight.grad.device.type == "cpu"
moved = Tables({"words": Table(rows=9, dim=2, optimizer=Adam(lr=0.1))}).to("sim:0")
try:
    share_tables(moved)
except ValueError as error:
    unisono.print0("refused:", error)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_tables_take_no_memory_of_the_device(first, tmp_path, ranks):
    (program := tmp_path / "memory.py").write_text(MEMORY)
    peak, refused = first(ranks, program)
    assert int(re.fullmatch(r"peak (\d+)", peak)[1]) < 20_000
    assert refused == (
        "refused: table 'words' is on sim:0, and ranks keep shared rows in memory of the CPU: leave the table on the "
        "CPU, or make it with divided=True, with which it stays there"
    )


LOOP_OVER = """
import sys
import torch, torch.distributed as dist
import unisono
from unisono.embedding import Adam, Table, Tables
from unisono.parallel import share_tables

engine, backend = sys.argv[1:]
dist.init_process_group(backend)
torch.manual_seed(0)
tables = Tables({"words": Table(rows=50_000, dim=8, init_std=0.1, optimizer=Adam(lr=0.1))}, divided=True)
shared, ids = share_tables(tables, engine=engine), torch.arange(600, device="sim:0").view(6, 100) * 77
for some in ids:
    tables["words"](some.chunk(2)[unisono.rank()]).square().sum().backward()
    shared.step()
with shared.evaluation():
    unisono.print0(tables["words"](ids).double().square().sum().item())
"""


@pytest.mark.parametrize("engine", ["shared", "collective"])
def test_a_group_of_devices_alone_is_no_obstacle(first, tmp_path, engine):
    """As one of NCCL is: tables then travel over another one."""
    (program := tmp_path / "loop.py").write_text(LOOP_OVER)
    found = [first(2, program, engine, backend) for backend in ("gloo", "sim:gloo")]
    assert found[0] == found[1] and float(found[0][0])
