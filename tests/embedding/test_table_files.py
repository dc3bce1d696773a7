"""Tables in files: the values of those in memory, rows that are written when they are first updated, and refusals."""

from __future__ import annotations

import copy
import errno
import json
import os
import struct

import pytest
import torch

from unisono.embedding import SGD, Adagrad, Adam, RowwiseAdagrad, RowwiseAdam, Table, Tables, export_rows, table_file
from unisono.embedding.row_owners import RowOwners
from unisono.errors import UnisonoError

ROWS, DIM = 600, 3
RULES = [SGD(lr=0.1), Adagrad(lr=0.1), RowwiseAdagrad(lr=0.1), Adam(lr=0.1), RowwiseAdam(lr=0.1, weight_decay=0.1)]


def make(directory, rule=RULES[0], **options):
    torch.manual_seed(5)
    options = {"rows": ROWS, "dim": DIM, "init_std": 0.5, **options}
    return Tables({"item": Table(optimizer=rule, directory=directory, **options)})


def train(tables, steps=4):
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        tables["item"](torch.randint(0, ROWS, (9, 5), generator=generator)).square().sum().backward()
        tables.step(), tables.zero_grad()
    return tables


def values(tables):
    return tables["item"](torch.arange(ROWS).view(-1, 1)).detach().view(ROWS, DIM)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize(
    "options", [{"pooling": "sum", "padding_idx": 4}, {"padding_idx": 4}, {"dtype": torch.float64}]
)
def test_a_table_in_a_file_has_the_bits_of_one_in_memory(tmp_path, rule, options):
    there, here = train(make(tmp_path, rule, **options)), train(make(None, rule, **options))
    assert torch.equal(values(there), values(here)) and torch.equal(there["item"].weight, here["item"].weight)
    states = [t.optimizer.state[t["item"].weight] for t in (there, here)]
    assert [*states[0]] == [*states[1]] and all(torch.equal(states[0][k], states[1][k]) for k in [*states[0]][1:])
    assert all(map(there["item"].file.has, [there["item"].weight, *[*states[0].values()][1:]]))
    assert not any(tmp_path.iterdir())


def test_a_dynamic_table_can_be_in_a_file(tmp_path):
    options = {"rows": None, "capacity": 200, "when_full": "evict_oldest"}
    there, here = train(make(tmp_path, Adam(lr=0.1), **options), 9), train(make(None, Adam(lr=0.1), **options), 9)
    assert torch.equal(values(there), values(here)) and there["item"].rows.evicted > 0


def test_first_values_follow_from_the_seed_and_the_id():
    first, tables = values(make(None)), make(None)
    assert torch.equal(values(train(tables))[tables["item"].rows.written == 0], first[tables["item"].rows.written == 0])
    assert 0.45 < float(first.std()) < 0.55 and tables["item"].rows.count < 200
    assert not (tables["item"].weight[tables["item"].rows.written == 0] != 0).any()


def test_a_file_takes_no_room_before_the_first_step_and_all_of_it_then(tmp_path):
    tables = make(tmp_path, rows=10**6)
    file = tables["item"].file
    used = lambda: os.fstat(file.segment.fd).st_blocks * 512  # noqa: E731
    values(tables)
    assert used() < 10**6
    train(tables, 1)
    assert used() >= file.nbytes == 4096 * -(-12 * 10**6 // 4096)


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_an_export_has_all_rows(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr("unisono.embedding.export._CHUNK_NBYTES", 1000)
    tables, file = train(make(tmp_path, padding_idx=4)), tmp_path / f"rows.{suffix}"
    export_rows(tables["item"], file)
    if suffix == "npz":
        numpy = pytest.importorskip("numpy")
        found = {name: torch.from_numpy(array) for name, array in numpy.load(file).items()}
    else:
        found = pytest.importorskip("safetensors.torch").load_file(file)
    assert torch.equal(found["ids"], torch.arange(ROWS)) and torch.equal(found["weight"], values(tables))


def test_a_copy_is_in_memory(tmp_path):
    tables = train(make(tmp_path))
    copied = copy.deepcopy(tables)
    assert copied["item"].file is None and torch.equal(values(copied), values(tables))
    train(copied)
    assert not torch.equal(values(copied), values(tables))


def test_weights_can_be_loaded(tmp_path):
    tables, other = train(make(tmp_path)), make(tmp_path)
    other.load_state_dict(tables.state_dict())
    assert torch.equal(values(other), values(tables)) and other["item"].file.has(other["item"].weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"directory": "missing"}, r"directory='missing' does not exist. Give an existing folder"),
        ({"directory": __file__}, r"test_table_files.py' is no folder"),
        ({"directory": "/proc"}, r"directory='/proc' \(file system proc\) cannot have a file that is mapped"),
        ({"directory": ".", "init_std": None}, r"rows= and directory= needs init_std="),
        (
            {"directory": ".", "rows": None, "capacity": 9, "when_full": "grow"},
            r'when_full="grow" is for tables in mem',
        ),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_a_directory_that_is_no_path_is_refused():
    with pytest.raises(TypeError, match="directory is an int; give the path of a folder"):
        make(3)


def test_a_network_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(table_file, "file_system_of", lambda _: "nfs4")
    with pytest.raises(ValueError, match=r"is on a file system of a network \(nfs4\)"):
        make(tmp_path)


def test_a_disk_that_is_too_small_is_said_before(tmp_path):
    with pytest.raises(UnisonoError, match=r"the rows and the state of 'item' take .* GB in .* GB are free"):
        make(tmp_path, dim=2**40)


def test_a_disk_that_is_full_at_the_first_step_is_an_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tables = make(tmp_path)
    monkeypatch.setattr(table_file, "reserve", full)
    with pytest.raises(UnisonoError, match=r"rows of table 'item'.* take 8,192 bytes in .*No space left.*Nothing was"):
        train(tables)


def test_a_part_of_the_rows_takes_no_more_space_than_it_needs(tmp_path, monkeypatch):
    rows = 300_000
    parts = [
        RowOwners(rows, 64, rank=rank, ranks=3, shift=shift, in_file=True) for shift in (0, 1) for rank in range(3)
    ]
    for shift, owners in enumerate([parts[:3], parts[3:]]):
        kept = torch.zeros(rows, dtype=torch.int64)
        for each in owners:
            own = torch.cat([torch.arange(part.start, part.stop) for part in each.kept_ranges()])
            assert torch.equal(own, each.keep(torch.arange(rows)).nonzero().view(-1))
            assert 0.6 < 3 * len(own) / rows / (1 + shift) < 1.4
            kept[own] += 1
        assert (kept == 1 + shift).all()
    file = table_file.TableFile("item", tmp_path, (rows, 16), {"sum": (rows,)}, torch.float32)
    file.divide(parts[0].kept_ranges())
    file.reserve()
    own = sum(map(len, parts[0].kept_ranges()))
    taken = os.fstat(file.segment.fd).st_blocks * 512
    assert own * 68 <= taken < 1.1 * own * 68
    state = file.new_state()["sum"]
    state[parts[0].kept_ranges()[0].start] = 1
    assert not file.new_state()["sum"].any() and os.fstat(file.segment.fd).st_blocks * 512 == taken
    file.divide(parts[0].kept_ranges())
    monkeypatch.setattr(table_file, "free_bytes", lambda _: own * 68 - 1)
    with pytest.raises(
        UnisonoError, match=rf"this rank's part, {own}, of the rows of table 'item'.* {own * 68:,} bytes"
    ):
        file.reserve()
    assert os.fstat(file.segment.fd).st_blocks == 0


LIMITED = """
import json, resource, sys, torch
from unisono.embedding import RowwiseAdagrad, Table, Tables, export_rows
torch.zeros(1).exp()
limit = int(open("/proc/self/statm").read().split()[5]) * 4096 + (240 << 20)  # data: anonymous memory
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
settings = {"rows": 1_000_000, "dim": 64, "pooling": "sum", "init_std": 0.1, "directory": sys.argv[1]}
table = Table(optimizer=RowwiseAdagrad(lr=0.1), **settings)
tables = Tables({"item": table})
for step in range(3):
    tables["item"](torch.arange(step, 10**6, 999).view(-1, 1)).sum().backward()
    tables.step(), tables.zero_grad()
if sys.argv[2] == "export":
    export_rows(tables["item"], sys.argv[1] + "/rows.safetensors")
"""


@pytest.fixture
def limited(fork_python, tmp_path):
    """Train, and export or not, in a process that has less memory than the table."""

    def run(what):
        (script := tmp_path / "limited.py").write_text(LIMITED)
        fork_python(script, tmp_path, what)

    return run


def test_a_table_may_be_larger_than_the_memory_of_the_process(limited):
    limited("train")


@pytest.mark.soak
def test_a_table_that_is_larger_than_the_memory_is_exported(limited, tmp_path):
    limited("export")
    with (tmp_path / "rows.safetensors").open("rb") as file:
        header = json.loads(file.read(*struct.unpack("<Q", file.read(8))))
    assert header["weight"]["shape"] == [10**6, 64]
