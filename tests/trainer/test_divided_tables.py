"""Tables whose rows are divided over ranks: the bits of one rank with whole tables, in each part of a run."""

from pathlib import Path

import pytest

from tests.digests import digests
from unisono.embedding import SGD, Table, Tables
from unisono.report.comparison import compare_runs
from unisono.watch import read_events

PROGRAM = Path(__file__).parent / "programs" / "divided_tables.py"


@pytest.fixture(scope="module", params=["", "dynamic,"])
def kind(request):
    """What tables are: fixed or dynamic ones."""
    return request.param


@pytest.fixture(scope="module")
def on_one_rank(kind, fork_python, tmp_path_factory):
    return digests(fork_python(PROGRAM, f"{kind}clipped,steps,full", tmp_path_factory.mktemp("tables")), least=7)


def digests_of(job, *, least):
    return digests([line.split("] ", 1)[-1] for line in job.lines()], least=least)


def test_rows_that_are_divided_have_the_bits_of_whole_tables(fork_ranks, kind, on_one_rank, tmp_path):
    job = fork_ranks(3, PROGRAM, f"{kind}clipped,steps,full", tmp_path)
    assert digests_of(job, least=7) == on_one_rank
    assert len({*on_one_rank.values()}) == len(on_one_rank)


def test_rows_that_are_divided_can_be_in_files(fork_ranks, fork_python, kind, on_one_rank, tmp_path):
    files, in_files = tmp_path / "disk", {"FILES": str(tmp_path / "disk")}
    files.mkdir()
    job = fork_ranks(3, PROGRAM, f"{kind}clipped,steps,full", tmp_path, variables=in_files)
    assert digests_of(job, least=7) == on_one_rank
    (expected,) = digests(fork_python(PROGRAM, f"{kind}saved", tmp_path / "whole", 9), least=1).values()
    for n, steps, variables in ((3, 3, in_files), (2, 5, {}), (4, 9, in_files)):  # and in memory
        job = fork_ranks(n, PROGRAM, f"{kind}saved", tmp_path / "parts", steps, variables=variables)
    assert f"saved = {expected}" in "\n".join(job.lines()) and not any(files.iterdir())


@pytest.mark.soak
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_each_rule_has_the_bits_of_whole_tables(fork_ranks, fork_python, kind, on_one_rank, tmp_path, n):
    expected = on_one_rank | digests(fork_python(PROGRAM, f"{kind}rules", tmp_path), least=5)
    job = fork_ranks(n, PROGRAM, f"{kind}rules,clipped,steps,full", tmp_path)
    assert digests_of(job, least=12) == expected


def test_a_run_goes_on_with_other_numbers_of_ranks(fork_ranks, fork_python, kind, tmp_path):
    (expected,) = digests(fork_python(PROGRAM, f"{kind}saved", tmp_path / "whole", 9), least=1).values()
    for n, steps in ((3, 3), (1, 6)):
        fork_ranks(n, PROGRAM, f"{kind}saved", tmp_path / "parts", steps)
    lines = fork_ranks(2, PROGRAM, f"{kind}saved", tmp_path / "parts", 9).lines()
    assert f"saved = {expected}" in "\n".join(lines)
    assert len([*(tmp_path / "parts" / "checkpoints").glob("step-*")]) == 3


def test_a_hook_of_one_rank_alone_sees_all_gradients(fork_ranks, fork_python, kind, tmp_path):
    expected = digests(fork_python(PROGRAM, f"{kind}hooked"), least=2)
    assert digests_of(fork_ranks(3, PROGRAM, f"{kind}hooked"), least=2) == expected


def test_weights_of_two_runs_are_compared_on_the_way(fork_ranks, fork_python, kind, tmp_path):
    """Rank 0 reads the rows that others have."""
    expected = digests(fork_python(PROGRAM, f"{kind}watched", tmp_path / "one"), least=1)
    assert digests_of(fork_ranks(3, PROGRAM, f"{kind}watched", tmp_path / "three"), least=1) == expected
    (pair,) = compare_runs([tmp_path / "one", tmp_path / "three"])["pairs"]
    assert (pair["digests"], pair["digest_step"]) == (3, None)
    found = [read_events(tmp_path / name / "events.jsonl") for name in ("one", "three")]
    one, three = ([each["tensors"] for each in events if each["event"] == "digest"] for events in found)
    assert one == three and len(one) == 3
    names = ["bags.weight", "rare.rows.written", "rare.weight", "words.weight"] if not kind else ["words.rows.ids"]
    assert all(one[0][name] != one[2][name] for name in names) and {*names} <= {*one[0]}


def test_ranks_write_the_rows_that_have_changed(fork_ranks, fork_python, kind, tmp_path):
    """Also those that no step has changed, after weights were loaded, and in a run that goes on."""
    expected = [digests(fork_python(PROGRAM, f"{kind}changes", tmp_path / "whole"), least=n) for n in (7, 13)]
    jobs = [(n, fork_ranks(3, PROGRAM, f"{kind}changes", tmp_path / "parts")) for n in (7, 13)]
    assert [digests_of(job, least=n) for n, job in jobs] == expected


def test_rows_are_sent_ahead_where_lookups_are_named(fork_ranks, fork_python, kind, tmp_path):
    expected = digests(fork_python(PROGRAM, f"{kind}ahead", tmp_path), least=1)
    assert digests_of(fork_ranks(3, PROGRAM, f"{kind}ahead", tmp_path), least=1) == expected
    files = {"FILES": str(tmp_path)}
    assert digests_of(fork_ranks(2, PROGRAM, f"{kind}ahead", tmp_path, variables=files), least=1) == expected


def test_what_is_done_between_steps_counts_for_rows_sent_ahead(fork_ranks, fork_python, kind, tmp_path):
    expected = digests(fork_python(PROGRAM, f"{kind}between", tmp_path), least=1)
    for n in (2, 3):
        assert digests_of(fork_ranks(n, PROGRAM, f"{kind}between", tmp_path), least=1) == expected


def test_rows_that_were_written_after_they_were_sent_are_refused(fork_ranks):
    """By one rank alone, whose users have old ones; and by all, but past torch's counting of writes."""
    job = fork_ranks(3, PROGRAM, "stale")
    for step, users in ((6, "ranks 0, 2"), (7, "ranks 0-2")):
        for rank in range(3):
            told = [line for line in job.lines(rank) if line.startswith(f"refused in step {step}: ")]
            assert len(told) == 1, job.out
            assert "rows of table 'words' were written between two steps, after they had been sent" in told[0]
            assert f"{users} used the old ones: write rows on all ranks, and by operations" in told[0]


def test_traffic_grows_with_the_ids_of_a_step_alone(fork_ranks):
    fork_ranks(2, PROGRAM, "traffic")


def test_a_rank_that_fails_answers_the_others_first(fork_ranks):
    job = fork_ranks(3, PROGRAM, "fails", code=None, watched=False)
    assert all(job.codes)
    assert job.err.count("ValueError: of rank 1 alone") == 1 and "[1]" in job.err
    assert job.err.count("unisono.errors.PeerError") >= 2


@pytest.mark.soak
def test_a_killed_rank_sends_all_back_to_the_last_checkpoint(run_ranks, fork_python, tmp_path):
    (expected,) = digests(fork_python(PROGRAM, "saved", tmp_path / "calm", 9), least=1).values()
    job = run_ranks(3, PROGRAM, "killed", tmp_path / "run", flags=["--max-restarts", 1])
    assert f"saved = {expected}" in job.out
    assert "rows of an embedding table that is divided over ranks die with the rank that has them" in job.err


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"capacity": 9, "when_full": "grow"}, 'it has when_full="grow": give it the capacity that it may need'),
        ({"rows": 9}, "it needs init_std="),
    ],
)
def test_tables_that_cannot_be_divided_are_refused(settings, why):
    with pytest.raises(ValueError, match=f"divided=True is not possible for table 'item': {why}"):
        Tables({"item": Table(dim=2, optimizer=SGD(lr=0.1), **settings)}, divided=True)


def test_a_host_needs_room_for_its_part(monkeypatch):
    settings = {"item": Table(rows=1 << 37, dim=2, init_std=0.1, optimizer=SGD(lr=0.1))}
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(MemoryError, match=r"this host's part of the tables, 0\.25 of rows and state, takes"):
        Tables(settings, divided=True)


ASKED_TO_END = """
import os, signal, sys, time
from pathlib import Path
import torch, unisono
from torch import nn
from torch.utils.data import TensorDataset
from unisono.embedding import SGD, Table, Tables, dense_parameters
from unisono.launch.control import running_jobs


def launcher():
    process, launchers = os.getpid(), running_jobs()
    while process not in launchers:
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return process


torch.manual_seed(0)
tables = Tables(
    {"item": Table(rows=50, dim=4, pooling="sum", init_std=0.1, optimizer=SGD(lr=0.1))},
    divided=True,
    copies=int(sys.argv[2]),
)
model = nn.Sequential(tables["item"], nn.Linear(4, 2))
trainer = unisono.Trainer(
    model,
    torch.optim.SGD(dense_parameters(model), lr=0.1),
    virtual_ranks=4,
    engine="collective",
    progress=False,
    directory=sys.argv[1],
    checkpoints=unisono.Checkpoints(every_steps=1000, every_minutes=None),
)
unisono.print0("after", trainer.steps_done, flush=True)


def loss(model, batch):
    if trainer.steps_done == 3 and trainer.world_size == 3:
        time.sleep(0.1)  # all are within the step
        if trainer.rank == 1:
            os.kill(launcher(), signal.SIGTERM)
        time.sleep(0.3)
    return model(batch[0]).square().sum(1)


for epoch in trainer.epochs(3):
    for batch in trainer.batches(TensorDataset(torch.arange(96).view(-1, 2) % 50), batch_size=8):
        trainer.step(loss, batch)
unisono.print0("state sha256:", trainer.digest(), flush=True)
"""


@pytest.mark.parametrize("copies", [1, 2])
def test_a_job_that_is_asked_to_end_within_a_step_saves_after_it(run_ranks, tmp_path, copies):
    """No rank ends at once, since all are needed to save."""
    job = run_ranks(3, ASKED_TO_END, tmp_path / "run", copies, code=143)
    assert "not saved" not in job.said, job.said
    done = run_ranks(2, ASKED_TO_END, tmp_path / "run", copies)
    calm = run_ranks(2, ASKED_TO_END, tmp_path / "calm", copies)
    assert done.lines(0)[0] in {"after 4", "after 5"} and done.lines(0)[-1] == calm.lines(0)[-1]
