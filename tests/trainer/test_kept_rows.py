"""Tables whose rows are kept on two ranks: one that dies is replaced alone, and nothing is lost or done twice."""

import random
from pathlib import Path

import pytest
from safetensors.torch import load_file

from unisono.embedding import SGD, Table, Tables
from unisono.state.checkpoint_store import CheckpointStore
from unisono.state.digest import digest

PROGRAM = Path(__file__).parent / "programs" / "kept_rows.py"


@pytest.fixture(scope="module", params=["fixed", "dynamic"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def expected(kind, fork_python, tmp_path_factory):
    """What one process comes to."""
    (line,) = fork_python(PROGRAM, kind, "-", "", tmp_path_factory.mktemp("calm"))
    assert line.startswith("state sha256: ")
    return line


@pytest.fixture
def run(run_ranks, kind, expected, tmp_path):
    """Run the program on ranks of which some die, and check what it comes to."""

    def run(ranks, deaths, *, directory="-", files="", named="", replaced=None, **options):
        (tmp_path / "marks").mkdir(exist_ok=True)
        job = run_ranks(ranks, PROGRAM, f"{kind},{files},{named}", directory, deaths, tmp_path / "marks", **options)
        assert job.lines(0)[-1] == expected, job.said
        count = job.said.count("; replaced")
        assert count in (range(1, 5) if replaced is None else [replaced]) and "Traceback" not in job.said, job.said
        return job

    return run


def test_ranks_that_die_are_replaced_with_the_rows_of_others(run):
    run(3, "1:2:loss,0:4:900,2:7:written,1:8:evaluate,0:11:2500", replaced=5)


def test_rows_in_files_of_each_rank_are_replaced(run, tmp_path):
    (tmp_path / "disk").mkdir()
    run(3, "1:3:loss,0:5:1200", files=tmp_path / "disk", named="named", replaced=2)
    assert not any((tmp_path / "disk").iterdir())


def test_a_rank_that_has_missed_the_end_of_a_step_makes_its_update(run):
    """The first rank goes on to the next step, the second has died, and the third does not know how the step ended."""
    job = run(3, "1:5:written,2:5:late", replaced=1)
    assert job.lines(2) == ["made up for [5, 5]"]


def test_a_rank_is_replaced_while_checkpoints_are_written(run, run_ranks, kind, fork_python, tmp_path):
    """All of them are complete, and have what those of one process have."""
    fork_python(PROGRAM, kind, tmp_path / "calm", "", tmp_path)
    run(3, "1:3:written,0:5:written,2:8:export,1:9:2000", directory=tmp_path / "run", replaced=4)
    calm, store = CheckpointStore(tmp_path / "calm" / "checkpoints"), CheckpointStore(tmp_path / "run" / "checkpoints")
    expected = {info.step: digest(calm.load(info).groups) for info in calm.list()}
    found = {info.step: digest(store.load(info).groups) for info in store.list()}
    assert 14 in found and len(found) >= 4 and found.items() <= expected.items()
    words = [load_file(tmp_path / folder / "words.safetensors") for folder in ("calm", "run")]
    assert words[0].keys() == words[1].keys() and all(words[0][key].equal(words[1][key]) for key in words[0])


def test_rows_that_were_on_two_ranks_which_die_together_come_from_the_checkpoint(run, tmp_path):
    job = run(3, "1:5:loss,2:5:loss", directory=tmp_path / "run", replaced=0, flags=["--max-restarts", 1])
    assert "the two ranks that kept the same rows of a divided embedding table died together" in job.said
    assert "starting all 3 ranks again (restart 1 of 1)" in job.said


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_ranks_die_at_random_places(run, tmp_path, seed):
    chosen = random.Random(seed)
    ranks = chosen.choice([2, 3, 4])
    steps = sorted(chosen.sample(range(0, 13, 2), 4))  # a rank may be one step ahead of the dead
    # Some numbers of calls are more than a step has.
    deaths = ",".join(f"{chosen.randrange(ranks)}:{step}:{chosen.randrange(1, 3800)}" for step in steps)
    run(ranks, deaths, directory=chosen.choice(["-", tmp_path / "run"]), named="named" if seed % 2 else "")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"copies": 3, "divided": True}, "copies=3: each row is on one rank or on two"),
        ({"copies": 2}, "copies=2 is for rows that are divided over ranks: give divided=True"),
    ],
)
def test_copies_that_make_no_sense_are_refused(settings, why):
    with pytest.raises(ValueError, match=why):
        Tables({"item": Table(rows=9, dim=2, init_std=0.1, optimizer=SGD(lr=0.1))}, **settings)


WATCHED = """
import torch, unisono
from torch import nn
from unisono.embedding import SGD, Table, Tables

tables = Tables({"words": Table(rows=9, dim=2, init_std=0.1, optimizer=SGD(lr=0.1))}, divided=True, copies=2)
model = nn.Sequential(tables["words"], nn.Linear(2, 2))
optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
try:
    unisono.Trainer(model, optimizer, virtual_ranks=2, engine="collective", progress=False, digest_every=2)
except ValueError as error:
    print(error)
"""


def test_digests_between_steps_are_refused(fork_ranks, tmp_path):
    (program := tmp_path / "watched.py").write_text(WATCHED)
    (said,) = fork_ranks(2, program).lines(1)
    assert said.startswith("digest_every=2 reads the rows of all ranks between two steps, and those of table 'words'")
