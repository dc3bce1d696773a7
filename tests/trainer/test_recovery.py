"""A rank that dies is replaced while the others wait, and the run comes to the bits of one that nobody disturbed.

To look at a run alone: `unisono run -n 3 tests/trainer/programs/recovering.py JSON`. What the launcher does is tested
in launch/test_replaced_ranks.py, and repairs of the update in engine/test_update_protection.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from unisono.state.checkpoint_store import CheckpointStore

PROGRAM = Path(__file__).parent / "programs" / "recovering.py"
KILL = "SIGKILL"
Death = tuple[int, str, int | None, str]


class Recovered(NamedTuple):
    """A run that has ended well."""

    replaced: list[str]
    """What the launcher said about each recovery."""
    new: set[int]
    """The ranks that were new in the end."""
    events: list[dict[str, Any]]
    """The events of a run with a directory."""


Train = Callable[..., Recovered]


@pytest.fixture(scope="module")
def undisturbed(fork_python, tmp_path_factory) -> Callable[..., tuple[str, list[dict[str, Any]]]]:
    """What one rank comes to that nobody disturbs, and its events; each program is run once."""
    known: dict[str, tuple[str, list[dict[str, Any]]]] = {}

    def run(**asked: object) -> tuple[str, list[dict[str, Any]]]:
        own = {"workers": 0, "engine": "auto" if "stages" in asked else "shared", "backend": None, "stuck": None}
        key = json.dumps({**asked, **own}, sort_keys=True)
        if key not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            options = {**json.loads(key), "folder": str(folder), "directory": str(folder / "run")}
            known[key] = fork_python(PROGRAM, json.dumps(options))[-1], events_of(folder / "run")
        return known[key]

    return run


@pytest.fixture
def train(run_ranks, undisturbed, tmp_path) -> Train:
    """Run the program while ranks die, and compare all that its ranks come to with what one rank comes to."""

    def run(n: int, *deaths: Death, fuses: object = (), directory: bool = False, **asked: Any) -> Recovered:
        asked = {"engine": "shared", **asked}
        disturbance = {"folder": str(tmp_path), "deaths": deaths, "fuses": fuses}
        if directory:
            disturbance["directory"] = str(tmp_path / "run")
        job = run_ranks(n, PROGRAM, json.dumps({**asked, **disturbance}))
        expected, calm = undisturbed(**asked)
        assert [job.lines(rank)[-1] for rank in range(n)] == [expected] * n, job.err
        died = [any(tmp_path.glob(f"died{i}*")) for i in range(len(deaths))]
        assert all(died), f"deaths {died} did not come: {job.err}"
        replaced = re.findall(r"unisono: (.+; replaced, [\d.]+ s)", job.err)
        found = events_of(tmp_path / "run") if directory else []
        if directory:
            assert_told_once(found, calm, recoveries=len(replaced))
        new = {int(path.suffix[1:]) for path in tmp_path.glob("recovered.*")}
        return Recovered(replaced, new, found)

    return run


def events_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


def assert_told_once(found: list[dict[str, Any]], calm: list[dict[str, Any]], *, recoveries: int) -> None:
    """Events are those of the undisturbed run, and one for each recovery."""
    told = ("epoch", "step", "evaluation", "end")
    kept = ("event", "epoch", "step", "total_steps", "loss", "lr", "name", "values")
    brief = [
        [tuple(str(event.get(key)) for key in kept) for event in each if event["event"] in told]
        for each in (found, calm)
    ]
    assert brief[0] == brief[1]
    numbers = [event["number"] for event in found if event["event"] == "recovery"]
    assert len(numbers) == recoveries
    assert numbers == sorted({*numbers})  # one is left out where a rank died before all had met


def test_deaths_at_places_of_the_loop_change_no_bit(train):
    """Also between a call and its event: `train` compares those of epochs that have begun, and of the end."""
    deaths = [
        (0, "begin", None, KILL),
        (0, "before _tell_epoch", 0, KILL),
        (1, "loss", 1, KILL),
        (2, "stepped", 4, "SIGSEGV"),
        (0, "epoch", 1, KILL),
        (0, "before _tell_epoch", 5, KILL),
        (1, "body", 7, "error"),
        (0, "before release", 10, KILL),
    ]
    found = train(3, *deaths, optimizer="sgd", clip=0.5, directory=True)
    assert found.new == {0, 1, 2}
    assert "rank 1 was killed by SIGKILL in forward of step 2; replaced" in found.replaced[2]
    assert "rank 2 was killed by SIGSEGV in the loop, after step 4; replaced" in found.replaced[3]
    assert "rank 1 raised RuntimeError in the loop, after step 7; replaced" in found.replaced[6]


def test_deaths_while_ranks_read_and_evaluate_change_no_bit(train):
    """With messages between the ranks, and data workers."""
    deaths = [
        (1, "backward of loss", 2, KILL),
        (0, "evaluation", 4, KILL),
        (-1, "read", 77, KILL),
        (2, "end", 0, KILL),
    ]
    found = train(3, *deaths, engine="collective", workers=1, epochs=1, directory=True)
    assert found.new >= {0, 1, 2}
    assert "rank 1 was killed by SIGKILL in backward of step 3; replaced" in " ".join(found.replaced)


@pytest.mark.parametrize(("kind", "steps"), [(None, 1), (None, 3), ("gan", 0), ("gan", 1), ("bare", 2), ("bare", 4)])
def test_a_rank_that_misses_a_step_goes_on_as_the_others_do(train, kind, steps):
    """One that lacks the last message of the dead rank, when the other one is in the next step already.

    The loop draws random numbers after each step.
    """
    where = (1, "before send", [steps, 0, 192])  # with the buffers, its last message to rank 0
    found = train(3, (*where, "late 0.3"), (*where, KILL), engine="collective", kind=kind, epochs=1)
    assert (len(found.replaced), found.new) == (1, {1})


def test_a_rank_that_misses_the_beginning_of_an_epoch_goes_on_as_the_others_do(train):
    """One that lacks the number by which ranks compare what they call, when the other one is in the first step."""
    where = (1, "before number", [5, 2])
    asked = {"engine": "collective", "kind": "bare", "backend": "gloo", "apart": True}
    found = train(3, (*where, "late 0.3"), (*where, KILL), **asked)
    assert (len(found.replaced), found.new) == (1, {1})


def test_deaths_in_the_midst_of_large_messages_change_no_bit(train):
    """The messages of a step are 7 MB each: more than fits into the buffers of a connection."""
    deaths = [(1, "after launch", 2, KILL), (0, "after launch", 4, KILL)]
    found = train(3, *deaths, engine="collective", backend="gloo", width=250_000, epochs=1)
    assert found.new == {0, 1}


@pytest.mark.parametrize(
    ("rank", "delay_s"),
    [
        (1, 0.02),
        *(pytest.param(rank, d, marks=pytest.mark.soak) for rank in (0, 1, 2) for d in (0.0, 0.03, 0.04, 0.06)),
    ],
)
def test_a_death_while_a_large_state_is_sent_changes_no_bit(train, rank, delay_s):
    """Rank 0 sends 130 MB to the others of a recovery; it dies meanwhile, or one that receives them."""
    deaths = [(1, "loss", 2, KILL), (rank, "before send_state", None, f"soon {delay_s}")]
    found = train(3, *deaths, engine="collective", backend="gloo", width=400_000, epochs=1)
    assert found.new == {1, rank}


def test_deaths_while_rank_0_runs_a_block_first_change_no_bit(train):
    """Of one that waits, of the rank that the others wait for, and of two in the block after rank 0.

    The first ones die while another is about to make its Trainer: it cannot go on without them yet, but it can in a
    moment.
    """
    late = [(1, "before arm", None, "late 1"), (2, "before arm", None, "late 0.5")]
    deaths = [(0, "turn", None, "kill 2"), (0, "turn", None, KILL), (2, "turn", None, KILL), (1, "turn", None, KILL)]
    found = train(3, *late, *deaths, epochs=1)
    assert found.new == {0, 1, 2}
    assert len(found.replaced) > 1


@pytest.mark.parametrize(
    ("optimizer", "backend", "deaths"),
    [
        ("sgd", "shm", [(0, "before end", 0, KILL), (1, "after begin", 2, KILL), (0, "before commit", 4, KILL)]),
        ("adamw", None, [(1, "before settle", 0, KILL), (0, "after end", 2, KILL), (1, "after commit", 4, KILL)]),
    ],
    ids=["sgd", "adamw"],
)
def test_deaths_within_an_update_change_no_bit(train, optimizer, backend, deaths):
    """Also where the group is that of the script's own `unisono.init("shm")`."""
    assert train(3, *deaths, optimizer=optimizer, backend=backend, epochs=1).new == {0, 1}


@pytest.mark.parametrize(
    ("engine", "stages"),
    [("shared", ["before repair", "after connect"]), ("collective", ["after rejoin", "after send_state"])],
)
def test_deaths_within_a_recovery_change_no_bit(train, engine, stages):
    deaths = []
    for i, stage in enumerate(stages):
        deaths += [(0, "loss", 3 * i, KILL), (1, stage, 3 * i, KILL)]
    found = train(3, *deaths, engine=engine, epochs=1, directory=True)
    assert found.new == {0, 1}
    assert [event["number"] for event in found.events if event["event"] == "recovery"] == [2, 4]


PIPELINE = {"engine": "auto", "stages": ["blocks.2"]}


def test_deaths_in_a_pipeline_change_no_bit(train):
    """In forward, backward, update and commit, and as rank 0 brings the stages together for a checkpoint."""
    deaths = [
        (1, "after begin_forward", 1, KILL),
        (0, "before end_backward", 3, KILL),
        (1, "evaluation", 4, KILL),
        (0, "before write", 4, KILL),
        (0, "after gather", 5, KILL),
    ]
    found = train(2, *deaths, **PIPELINE, clip=0.5, epochs=1, directory=True)
    assert found.new == {0, 1}
    assert "rank 1 was killed by SIGKILL in forward of step 2; replaced" in found.replaced[0]
    assert "rank 0 was killed by SIGKILL in backward of step 4; replaced" in found.replaced[1]
    assert "rank 0 was killed by SIGKILL in the update of step 5; replaced" in found.replaced[3]


@pytest.mark.parametrize(
    ("ranks", "asked", "deaths"),
    [
        pytest.param(
            2,
            {},
            [(1, "before commit", 0, KILL), (0, "after commit", 0, KILL), (1, "after gather", 5, KILL)],
            marks=pytest.mark.soak,
        ),
        (
            4,
            {"max_steps": 4},
            [
                *((rank, "before send", 1, KILL) for rank in (0, 3)),
                (1, "loss", 2, KILL),
                (2, "before send_state", 2, KILL),
                (2, "after write", 3, KILL),
            ],
        ),
        (
            2,
            {"stages": 4, "autocast": "fp16"},
            [(1, "after update", 0, KILL), (1, "after end", 2, KILL), (0, "before _unscale", 4, KILL)],
        ),
        pytest.param(
            3,
            {"stages": ["blocks.1", "blocks.3"], "max_steps": 4},
            [(1, "loss", 2, KILL), (2, "before send_state", 2, KILL)],
            marks=pytest.mark.soak,
        ),
    ],
    ids=[
        "first and last step",
        "two replicas, both stages, and within a recovery",
        "interleaved, fp16",
        "three stages",
    ],
)
def test_deaths_at_places_of_a_pipeline_change_no_bit(train, ranks, asked, deaths):
    train(ranks, *deaths, **{**PIPELINE, "epochs": 1, **asked})


@pytest.mark.soak
def test_deaths_with_messages_in_a_group_of_the_backend_shm_change_no_bit(train):
    deaths = [(0, "before launch", 2, KILL), (2, "evaluation", 4, KILL)]
    assert train(3, *deaths, engine="collective", backend="shm", epochs=1).new == {0, 2}


def test_ranks_are_freed_from_operations_that_would_wait_for_a_dead_rank_for_ever(train, tmp_path):
    """As with NCCL: no error, and sums without a meaning; see programs/unending_backend.py.

    Rank 0 cannot be freed at first, and is replaced as well.
    """
    deaths = [(1, "after _agree", 0, KILL), (0, "before launch", 3, KILL), (0, "after rejoin", 3, KILL)]
    found = train(3, *deaths, engine="collective", backend="unending", stuck=0, epochs=1)
    assert "rank 0 was killed by SIGABRT" in found.replaced[0]
    waited = {path.name.split(".")[1] for path in tmp_path.glob("freed.*")}
    assert waited, "nobody waited in an operation"
    survivor = (tmp_path / "process.2").read_text()
    assert len([*tmp_path.glob(f"aborted.{survivor}.*")]) >= 2, "a group after a recovery is watched as well"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "deaths",
    [
        [(1, "backward of loss", 2, KILL), (0, "backward of loss", 6, KILL)],
        [(1, "before launch", 2, KILL), (0, "after launch", 6, KILL)],
        [(1, "loss", 2, KILL), (1, "after rejoin", 2, KILL), (0, "evaluation", 4, KILL)],
    ],
    ids=["backward", "sum", "recovery"],
)
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_deaths_of_ranks_on_gpus_change_no_bit(train, backend, deaths):
    train(2, *deaths, engine="collective", backend=backend, device="cuda")


def test_deaths_between_two_steps_with_one_batch_change_no_bit(train):
    """All but one rank die at once, in the second step, and one between the two."""
    deaths = [(rank, "forge", 3, KILL) for rank in (0, 2)] + [(1, "between", 4, KILL)]
    found = train(3, *deaths, kind="gan", workers=1, epochs=1)
    assert found.new == {0, 1, 2}


@pytest.mark.parametrize(
    ("asked", "deaths"),
    [
        ({"kind": "fit"}, [(1, "evaluation", 3, KILL), (0, "stepped", 7, KILL)]),
        ({"kind": "sampled", "max_steps": 6}, [(0, "collect", 2, KILL), (1, "loss", 5, KILL)]),
        pytest.param(
            {"kind": "joined", "epochs": 1}, [(1, "backward of loss", 1, KILL)], marks=pytest.mark.soak
        ),  # test_scaling.py has these
    ],
    ids=lambda value: value.get("kind") if isinstance(value, dict) else None,
)
def test_deaths_in_other_forms_of_the_loop_change_no_bit(train, asked, deaths):
    train(2, *deaths, directory=True, **asked)


@pytest.mark.parametrize("engine", ["shared", pytest.param("collective", marks=pytest.mark.soak)])
def test_a_death_in_a_checkpoint_leaves_only_whole_ones(train, fork_python, undisturbed, tmp_path, engine):
    found = train(2, (0, "before _rename_durably", None, KILL), engine=engine, epochs=1, directory=True)
    assert len(found.replaced) == 1
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert store.list()[0].step == 5
    for info in store.list():
        store.verify(info)
    assert {path.name for path in store.folder.iterdir()} == {info.path.name for info in store.list()}
    # The run can be gone on with.
    options = {"engine": engine, "epochs": 2, "folder": str(tmp_path), "directory": str(tmp_path / "run")}
    assert fork_python(PROGRAM, json.dumps(options))[-1] == undisturbed(epochs=2)[0]


def test_a_run_whose_ranks_all_die_in_a_checkpoint_starts_again_from_a_whole_one(run_ranks, undisturbed, tmp_path):
    asked = {"engine": "shared", "every_steps": 3, "pause_s": 0.05, "deaths": [(0, "before _rename_durably", 8, "all")]}
    folders = {"folder": str(tmp_path), "directory": str(tmp_path / "run")}
    job = run_ranks(3, PROGRAM, json.dumps({**asked, **folders}), flags=["--max-restarts", "1"])
    assert "starting all 3 ranks again (restart 1 of 1)" in job.said
    assert {job.lines(rank)[-1] for rank in range(3)} == {undisturbed()[0]}
    resumed = [event["total_steps"] for event in events_of(tmp_path / "run") if event["event"] == "resume"]
    assert resumed == [5]


def test_a_rank_without_memory_for_a_segment_is_replaced(run_ranks, fork_python, tmp_path):
    """Rank 0 makes the segments, and the others wait for it: they must not take its failure for theirs."""
    program, there = PROGRAM.with_name("no_memory.py"), tmp_path / "there"
    there.touch()
    expected = fork_python(program, there, 0)[-1]
    done = run_ranks(2, program, tmp_path / "once", 0)
    assert "rank 0 raised UnisonoError in the sum of step 3; replaced" in done.said
    assert done.lines()[-1] == expected
