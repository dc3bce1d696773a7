"""Models that are divided over ranks: the bits of one rank, on any number of them, and checkpoints for any division."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "divided.py"
DIVIDED_SUMS = PROGRAM.with_name("divided_sums.py")
RESUMABLE = PROGRAM.with_name("divided_resumable.py")
SOME = ("fp16", "residual", "u_net", "frozen", "wide")
OTHERS = ("mlp", "bf16", "language_model", "checkpointed", "wandering", "wide")
# Each model meets one way in make test, but for one of another precision, and all of them in the soak.
CHOSEN = [
    (2, "block", ("bf16", "language_model")),  # for fp16 see test_twenty_steps.py
    (3, "named", ("mlp",)),
    (2, "joined", ("checkpointed",)),
    (3, "size", ("u_net",)),
    (3, "zero1", ("frozen", "wandering")),
    (4, "replicas", ("residual",)),
    (4, "size_replicas", ("wide",)),
    (2, "sums", ("residual", "wandering")),
    (4, "sums_size", ("checkpointed",)),
]
ALL = [
    (2, "block", SOME),
    (3, "named", OTHERS),
    (4, "block", OTHERS),
    (3, "joined", (*OTHERS, "u_net")),
    (2, "default", OTHERS),
    (2, "default_size", OTHERS),
    (3, "size", (*OTHERS, "u_net")),
    (3, "zero1", (*SOME, "wandering")),
    (4, "zero1", (*SOME, "language_model")),
    (4, "replicas", ("fp16", "residual", "wandering", "checkpointed", "wide")),
    (4, "size_replicas", ("checkpointed",)),
    *((ranks, "sums", (*SOME, *OTHERS[:-1])) for ranks in (2, 3, 4)),
    (4, "sums_size", OTHERS),
    (3, "sums_zero1", (*SOME, "wandering")),
]


@pytest.mark.parametrize(
    ("ranks", "by", "names"), [*CHOSEN, *(pytest.param(*each, marks=pytest.mark.soak) for each in ALL)]
)
def test_parts_of_ranks_change_no_bit(fork_ranks, fork_python, ranks, by, names):
    job = fork_ranks(ranks, PROGRAM, by, *names)
    expected = fork_python(PROGRAM, "whole", *names)
    assert [line.partition(":")[0] for line in expected] == [*names]
    assert [job.lines(rank) for rank in range(ranks)] == [expected] * ranks


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    [
        (3, range(1)),
        *(pytest.param(ranks, range(first, first + 12), marks=pytest.mark.soak)
          for ranks in (2, 3, 4) for first in (100, 200)),
    ],
)  # fmt: skip
def test_sums_that_are_divided_have_the_bits_of_one_rank(fork_ranks, fork_python, ranks, seeds):
    job = fork_ranks(ranks, DIVIDED_SUMS, "divided", ranks, *seeds)
    expected = fork_python(DIVIDED_SUMS, "whole", ranks, *seeds)
    assert len(expected) == len(seeds)
    assert [job.lines(rank) for rank in range(ranks)] == [expected] * ranks


@pytest.fixture(scope="module")
def undisturbed(fork_python, tmp_path_factory):
    return fork_python(RESUMABLE, tmp_path_factory.mktemp("undisturbed"), "")[-1].removeprefix("from 0 ")


@pytest.mark.parametrize(
    "parts",
    [
        [(2, "block", 2), (4, "zero1:2", 5), (3, "1,2", None)],
        [(2, "block", 2), (3, "sums", 5), (2, "sums", None)],
        pytest.param([(4, "sums", 2), (3, "sums", 5), (1, "", 7), (2, "sums", None)], marks=pytest.mark.soak),
        pytest.param(
            [(3, "block", 2), (1, "", 5), (3, "stages:1,3", 7), (4, "zero1:2", 8), (2, "1,2", None)],
            marks=pytest.mark.soak,
        ),
        [(4, "zero3:1,2,3", 4), (2, "block", 5), (4, "zero3:2", None)],
    ],
)
def test_a_run_goes_on_with_another_division(fork_ranks, tmp_path, undisturbed, parts):
    begun = 0
    for ranks, how, steps in parts:
        job = fork_ranks(ranks, RESUMABLE, tmp_path, how, *([f"max_steps={steps}"] if steps else []))
        found = [job.lines(rank)[-1] for rank in range(ranks)]
        assert all(line.startswith(f"from {begun} ") for line in found)
        begun = steps
    assert found == [f"from {parts[-2][2]} {undisturbed}"] * ranks


@pytest.mark.soak
@pytest.mark.parametrize("options", [[], ["best", "by_time"]])
@pytest.mark.parametrize("how", ["zero1:2", "zero3:2", "zero3:1,2,3"])
def test_stages_that_replicas_divide_save_and_load_in_mid_run(fork_ranks, tmp_path, undisturbed, how, options):
    """Weights are exported after step 3 and loaded after step 6."""
    job = fork_ranks(4, RESUMABLE, tmp_path, how, *options)
    assert [job.lines(rank)[-1] for rank in range(4)] == [f"from 0 {undisturbed}"] * 4


def test_rank_0_has_all_parts_when_it_saves_by_time_and_the_best(fork_ranks, fork_python, tmp_path, undisturbed):
    fork_ranks(2, RESUMABLE, tmp_path, "block", "by_time", "best", "max_steps=5")
    assert fork_python(RESUMABLE, tmp_path, "", "by_time", "best")[-1] == f"from 5 {undisturbed}"


def test_sigterm_saves_the_parts_of_all_ranks(run_ranks, fork_python, tmp_path, undisturbed):
    job = run_ranks(2, RESUMABLE, tmp_path, "block", "term=5", code=143)
    assert not job.out
    last = fork_python(RESUMABLE, tmp_path, "")[-1]
    assert last in {f"from {step} {undisturbed}" for step in (5, 6, 7, 8)}


@pytest.mark.soak
@pytest.mark.parametrize(("zero", "what"), [(1, "the optimizer's state"), (3, "the stage")])
def test_all_ranks_start_again_when_one_with_a_part_of_a_stage_dies(run_ranks, tmp_path, undisturbed, zero, what):
    job = run_ranks(4, RESUMABLE, tmp_path, f"zero{zero}:2", "die=5", flags=["--max-restarts", "1"])
    assert [job.lines(rank)[-1] for rank in range(4)] == [f"from 3 {undisturbed}"] * 4
    assert f"no rank can be replaced alone: with Pipeline(zero={zero}), the part of {what} of a rank" in job.said


@pytest.mark.parametrize("how", ["", pytest.param("build", marks=pytest.mark.soak)])
def test_all_ranks_start_again_when_one_with_a_part_of_the_model_dies(run_ranks, tmp_path, undisturbed, how):
    job = run_ranks(2, RESUMABLE, tmp_path, "block", how, "die=5", flags=["--max-restarts", "1"])
    words = undisturbed.split()
    expected = f"from 3 {' '.join([*words[:2], 'built', *words[3:]] if how else words)}"
    assert [job.lines(rank)[-1] for rank in range(2)] == [expected] * 2
    assert "no rank can be replaced alone: a model that is divided over ranks dies with the rank" in job.said
