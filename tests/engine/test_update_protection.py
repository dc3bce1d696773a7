"""A rank is killed at chosen moments of an update, and the others put back the state from before the step, to the bit.

The ranks run programs/killed_in_update.py, which see. "line" kills before a line of the engine's Python, so between any
two words that steer the repair; "operation" in the middle of an operation of torch, and what that writes is spoilt.
"""

import random
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "killed_in_update.py"


@pytest.fixture
def kill(fork_ranks, tmp_path):
    """Kill ranks in an update. Return the step of the survivors, and whether they could put the state back."""

    def run(n, case, kind, moment, *, victims, dies=(), step=6):
        folder = tmp_path / f"{case}-{kind}-{moment}-{n}-{step}"
        folder.mkdir()
        named = ",".join(map(str, victims))
        job = fork_ranks(n, PROGRAM, case, kind, moment, named, step, folder, code=None, watched=False)
        codes = [-9 if rank in {*victims, *dies} else 0 for rank in range(n)]
        assert job.codes == codes, f"{(case, kind, moment, n, step)}\n{job.err[-4000:]}"
        said = {line for rank in range(n) if not codes[rank] for line in job.lines(rank)}
        assert len(said) == 1, f"survivors differ: {said}"
        at, repaired, equal = said.pop().split()
        return int(at), repaired == "True", equal == "True"

    return run


@pytest.mark.parametrize(
    ("n", "case", "kind", "moment", "victims", "step"),
    [
        pytest.param(2, "small+adamw-fused+clip", "line", "0.5", [1], 5, id="all of a small model"),
        pytest.param(3, "large+adamw-fused+schedule", "operation", "0.9", [0], 9, id="portions of a large one, rank 0"),
        pytest.param(2, "large+nadam+change", "operation", "0.5", [1], 7, id="numbers in the state"),
        pytest.param(4, "large+joint", "line", "0.6", [1, 3], 6, id="two of four ranks, two optimizers"),
        pytest.param(3, "tables+adam", "line", "0.85", [0], 6, id="rows of tables, almost written"),
        pytest.param(2, "tables+sgd+clip", "operation", "0.6", [1], 6, id="rows of tables, of whole sums"),
        pytest.param(2, "large+momentum+zero", "operation", "0.8", [1], 6, id="a loop that writes to p.grad"),
        pytest.param(2, "small+lamb", "operation", "0.6", [1], 4, id="whole parameters, numbers in groups"),
        pytest.param(2, "one+adamw-fused", "operation", "0.5", [1], 4, id="one element"),
    ],
)
def test_survivors_put_back_the_state_from_before_the_step(kill, n, case, kind, moment, victims, step):
    assert kill(n, case, kind, moment, victims=victims, step=step) == (step, True, True)


@pytest.mark.parametrize("moment", ["70", "260"], ids=["update", "new state"])
def test_first_step_with_state_in_private_memory_is_undone(kill, moment):
    assert kill(2, "large+adamw-fused", "line", moment, victims=[1], step=0) == (0, True, True)


@pytest.mark.parametrize(("case", "step"), [("small+momentum", 0), ("large+adamw-fused+load", 3)])
def test_step_is_undone_when_survivors_have_replaced_the_optimizers_state(kill, case, step):
    assert kill(3, case, "arrival", "state", victims=[1], step=step) == (step, True, True)


@pytest.mark.parametrize("case", ["small+adamw-fused+dies", "large+adam+dies"])
def test_repair_in_which_another_rank_dies_is_made_again(kill, case):
    assert kill(4, case, "operation", "0.9", victims=[3], dies=[0]) == (6, True, True)


def test_step_is_undone_if_only_some_ranks_passed_the_first_barrier(kill):
    assert kill(3, "small+adamw-fused", "arrival", "gradients", victims=[2], step=5) == (5, True, True)


def test_step_is_committed_on_all_ranks_if_only_some_passed_the_last_barrier(kill):
    assert kill(3, "large+adamw-fused", "arrival", "weights", victims=[2], step=5) == (6, True, True)


@pytest.mark.parametrize("case", ["table+sgd", "small+adamw-fused+hook"])
def test_update_that_cannot_be_undone_is_reported(kill, case):
    _, repaired, equal = kill(2, case, "operation", "0.7", victims=[1])
    assert not repaired
    assert not equal


OPTIMIZERS = (
    "sgd", "momentum", "adam", "adamw-fused", "adamw-foreach", "adamw-tensor", "nadam", "radam", "adamax", "adagrad",
    "adagrad-fused", "adadelta", "rmsprop", "rprop", "asgd", "asgd-foreach", "adafactor", "lamb", "joint", "muon",
)  # fmt: skip
EXTRAS = ("", "", "+clip", "+schedule", "+fp16", "+fp16+overflow", "+change", "+zero", "+freeze", "+load")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_random_kills(kill, seed):
    chance = random.Random(seed)
    for _ in range(25):
        n, step = chance.randint(2, 4), chance.randint(1, 20)
        kind = chance.choice(["line", "operation"])
        optimizer, model = chance.choice(OPTIMIZERS), chance.choice(["small", "large", "large"])
        extra = chance.choice(EXTRAS)
        if optimizer in {"joint", "muon"} and extra in {"+schedule", "+zero", "+load"}:
            extra = ""
        victims = sorted(chance.sample(range(n), chance.randint(1, n - 1)))
        moment = f"{chance.random():.4f}"
        at, repaired, equal = kill(n, f"{model}+{optimizer}{extra}", kind, moment, victims=victims, step=step)
        assert (repaired, equal) == (True, True), (n, model, optimizer, extra, kind, moment, victims, step)
        assert at in {step, step + 1}, at


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_random_kills_with_tables(kill, seed):
    chance = random.Random(seed)
    for _ in range(10):
        n, step, kind = chance.randint(2, 4), chance.randint(0, 12), chance.choice(["line", "operation"])
        case = "tables+" + chance.choice(["adam", "momentum"]) + chance.choice(["", "", "+clip", "+change", "+load"])
        victims = sorted(chance.sample(range(n), chance.randint(1, n - 1)))
        moment = f"{0.3 + 0.7 * chance.random():.4f}" if step else str(chance.randint(40, 300))
        at, repaired, equal = kill(n, case, kind, moment, victims=victims, step=step)
        assert (repaired, equal) == (True, True), (n, case, kind, moment, victims, step)
        assert at in {step, step + 1}, at


@pytest.mark.soak
@pytest.mark.parametrize(("case", "step"), [("small+adamw-fused", 0), ("large+adamw-fused", 0), ("large+momentum", 5)])
def test_kill_before_lines_from_first_to_last(kill, case, step):
    committed = 0
    for number in range(0, 9000, 1 if step else 23):
        at, repaired, equal = kill(2, case, "line", str(number), victims=[1], step=step)
        assert (repaired, equal) == (True, True), number
        committed += at > step
        if committed > 3:  # the update has fewer lines
            break
    assert committed
