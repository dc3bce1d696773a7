"""What virtual ranks make and carry: the same bits on any number of ranks, on both engines and after a resume."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from refusals import check_refused, each_case
from unisono.errors import DataError, LossError

PROGRAMS = Path(__file__).parent / "programs"
NAMES = ["rollouts", "carried", "queue_of_keys"]
STOPS = {"rollouts": (3, 9), "carried": (9, 13), "queue_of_keys": (3, 7)}
"""Numbers of steps after which a run is stopped, in the middle of an epoch."""


@pytest.fixture(scope="module")
def on_one_rank(fork_python):
    """The last two lines of each program on one rank: a result of it, and its digest."""
    return {name: fork_python(PROGRAMS / f"{name}.py", "auto")[-2:] for name in NAMES}


@pytest.mark.parametrize(
    ("n", "engine"), [(3, "shared"), *(pytest.param(n, "collective", marks=pytest.mark.soak) for n in (2, 4))]
)
@pytest.mark.parametrize("name", NAMES)
def test_number_of_ranks_and_engine_change_no_bit(fork_ranks, on_one_rank, name, n, engine):
    assert fork_ranks(n, PROGRAMS / f"{name}.py", engine).lines()[-2:] == on_one_rank[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_stops_in_mid_epoch_goes_on_with_the_same_bits_on_other_ranks(
    fork_ranks, on_one_rank, name, tmp_path
):
    program = PROGRAMS / f"{name}.py"
    first, second = STOPS[name]
    fork_ranks(3, program, "shared", tmp_path, first)
    stopped = fork_ranks(1, program, "auto", tmp_path, second)
    assert stopped.lines()[-1] != on_one_rank[name][-1]
    assert fork_ranks(2, program, "collective", tmp_path).lines()[-2:] == on_one_rank[name]


def test_a_run_whose_function_fails_is_saved_as_it_was_before_it(fork_ranks, on_one_rank, tmp_path):
    program = PROGRAMS / "carried.py"
    failed = fork_ranks(2, program, "collective", tmp_path, "fail", code=None)
    assert failed.code == 1
    assert "KeyError: 'no such field'" in failed.err
    assert max(path.name for path in (tmp_path / "checkpoints").glob("*[0-9]")).endswith("14")
    assert fork_ranks(3, program, "shared", tmp_path).lines()[-2:] == on_one_rank["carried"]


def test_truncated_backpropagation_is_that_of_one_process(monkeypatch):
    """In float64, the whole batch of streams at once gives the same weights up to rounding."""
    monkeypatch.syspath_prepend(PROGRAMS)
    program = __import__("carried")
    plain = make_reader(program)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(2):
        state = tuple(torch.zeros(1, program.STREAMS, 9, dtype=torch.float64) for _ in range(2))
        for chunk in range(program.CHUNKS):
            positions = range(chunk * program.STREAMS, (chunk + 1) * program.STREAMS)
            tokens = torch.stack([program.Streams()[p] for p in positions])
            scores, state = plain(tokens[:, :-1], tuple(part.detach() for part in state))
            optimizer.zero_grad()
            F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
    trainer = program.make("auto")
    for _ in trainer.epochs(2):
        for batch in trainer.batches(program.Streams(), batch_size=program.STREAMS, shuffle=False):
            trainer.step(program.read, batch)
    for ours, theirs in zip(trainer.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def make_reader(program):
    torch.manual_seed(0)
    return program.Reader().double()


FAILURES = """
from unisono.errors import DataError, PeerError, RankMismatchError

count = unisono.Carried(lambda: torch.zeros(2))
trainer = make_trainer(engine=sys.argv[1], stateful={"count": count})

def counted(model, batch, factor=1.0):
    count.value = count.value + 1
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none") * factor

def told(models):
    return count.value.tolist()

for batch in trainer.batches(data, batch_size=12):
    try:
        trainer.step(partial(counted, factor=float("nan")), batch)
    except NonFiniteLossError:
        say("refused", trainer.collect(told))
    trainer.step(counted, batch)
    break
say("counted", trainer.collect(told))

def play(models, fails=None):
    count.value = count.value + 10
    if R == fails:
        raise KeyError("no such field")
    return torch.randn(3, 6), torch.zeros(3, dtype=torch.long)

def attempt(function):
    try:
        next(trainer.rollouts(function, steps=100))
    except (KeyError, DataError, PeerError, RankMismatchError) as error:
        say(type(error).__name__, error)

for _ in trainer.batches(data, batch_size=12):  # the rest of the epoch
    pass
attempt(partial(play, fails=1))
say("after it", trainer.collect(told))
attempt(lambda models: torch.zeros(0, 6) if R == 1 else torch.zeros(2, 6))
attempt(lambda models: (torch.zeros(2, 6), torch.zeros(3)))
attempt(lambda models: next(models.parameters()).add_(1.0))
if R == 0:
    attempt(play)
else:
    try:
        trainer.evaluate(counted, data, batch_size=12)
    except RankMismatchError as error:
        say(type(error).__name__, error)
"""


@pytest.mark.parametrize("engine", ["shared", "collective"])
def test_a_failure_puts_values_back_and_comes_on_all_ranks(run_alone, engine):
    script = FAILURES.replace("sys.argv[1]", repr(engine))
    for rank, out in enumerate(run_alone(2, script)):
        lines = out.splitlines()
        assert lines[0] == f"refused {[[0.0, 0.0]] * 4}"
        assert lines[1] == f"counted {[[1.0, 1.0]] * 4}"
        peer = "PeerError rank 1 failed in the function of trainer.rollouts: KeyError: 'no such field'"
        assert lines[2] == ("KeyError 'no such field'" if rank else peer)
        assert lines[3] == f"after it {[[1.0, 1.0]] * 4}"
        assert "returned for virtual rank 2 no samples" in lines[4]
        assert lines[4].startswith("DataError" if rank else "PeerError rank 1 failed")
        assert f"DataError the function of trainer.rollouts returned for virtual rank {2 * rank} tensors" in lines[5]
        assert "DataError the function of trainer.rollouts wrote to '0.weight'" in lines[6]
        assert "RankMismatchError" in lines[7]
        assert "trainer.rollouts" in lines[7]


DATA = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3)


def make_trainer(**options):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return unisono.Trainer(model, optimizer, **{"virtual_ranks": 4, "progress": False, **options})


def generator(name="noise", virtual_rank=0):
    return make_trainer().generator(name, virtual_rank)


def rollouts(function=lambda model: torch.zeros(2, 4), **options):
    return next(make_trainer().rollouts(function, **{"steps": 2, **options}))


def collect(function=lambda model: 1, **options):
    return make_trainer().collect(function, **options)


TABLES = {
    unisono.Carried: [
        ({"initial": torch.zeros(2)}, TypeError, "initial is a Tensor, which cannot be called: give a function"),
        ({"initial": list, "reset_each_epoch": 1}, TypeError, "reset_each_epoch=1 must be True or False"),
    ],
    generator: [
        ({"name": 3}, TypeError, "name=3 must be a text"),
        ({"name": "two words"}, ValueError, "name='two words' must have no spaces in it"),
        ({"virtual_rank": 4}, ValueError, "virtual_rank=4 is outside [0, 4)"),
        ({"virtual_rank": 0.5}, TypeError, "virtual_rank=0.5 must be a whole number"),
    ],
    rollouts: [
        ({"function": 3}, TypeError, "the function of trainer.rollouts is an int, which cannot be called"),
        ({"steps": 0}, ValueError, "steps=0 must be at least 1"),
        ({"steps": None}, TypeError, "steps=None must be a whole number"),
        ({"micro_batch_size": 0}, ValueError, "micro_batch_size=0 must be at least 1"),
        ({"function": lambda model: torch.zeros(())}, DataError, "for virtual rank 0 tensors of the shapes []"),
        ({"function": lambda model: [3, "a"]}, DataError, "returned for virtual rank 0 no tensor"),
        ({"function": lambda model: {1, 2}}, DataError, "returned for virtual rank 0 a set: use tensors"),
        ({"function": lambda model: {None: torch.zeros(1)}}, DataError, "a dict with a key of type NoneType"),
    ],
    collect: [
        ({"function": None}, TypeError, "the function of trainer.collect is a NoneType, which cannot be called"),
        ({"name": ""}, ValueError, "name='' must not be empty"),
    ],
}


@each_case(TABLES)
def test_what_cannot_be_meant_is_refused_in_a_sentence(call, options, error, words):
    check_refused(call, options, error, words)


def read(model, batch, carried, change=lambda value: value + 1):
    carried.value = change(carried.value)
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def test_a_carried_value_is_refused_where_it_has_no_meaning():
    carried = unisono.Carried(lambda: torch.zeros(2))
    with pytest.raises(RuntimeError, match="this Carried belongs to no Trainer"):
        print(carried.value)
    trainer = make_trainer(stateful={"carried": carried})
    with pytest.raises(RuntimeError, match="not in your loop"):
        carried.value = 1
    with pytest.raises(ValueError, match="this Carried already belongs to a Trainer"):
        make_trainer(stateful={"carried": carried})
    batch = next(trainer.batches(DATA, batch_size=12))
    written = "a tensor in the value of a Carried was written to, for virtual rank 0"
    with pytest.raises(LossError, match=written):
        trainer.step(partial(read, carried=carried, change=lambda value: value.add_(1)), batch)
    with pytest.raises(TypeError, match="the value of a Carried holds a set: use tensors"):
        trainer.step(partial(read, carried=carried, change=lambda value: {1}), batch)
    trainer.step(partial(read, carried=carried), batch)

    def write(model, batch):
        carried.value.add_(1)
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    with pytest.raises(LossError, match=written):
        trainer.step(write, batch)


def test_a_carried_value_needs_shares_of_one_micro_batch():
    carried = unisono.Carried(lambda: torch.zeros(2))
    trainer = make_trainer(stateful={"carried": carried})
    batch = next(trainer.batches(DATA, batch_size=12, micro_batch_size=2))
    with pytest.raises(LossError, match="the share of virtual rank 0 is computed in 2 micro-batches"):
        trainer.step(partial(read, carried=carried), batch)


def test_a_loss_over_the_global_batch_needs_samples_that_are_dealt_evenly():
    lengths = iter([3, 3, 2, 2, 2, 3, 3, 2])
    trainer = make_trainer()

    def loss(model, encodings):
        return encodings.square().sum(1)

    batches = trainer.rollouts(lambda model: torch.randn(next(lengths), 4), steps=2)
    trainer.step(loss, next(batches), encode=lambda model, batch: model(batch))
    uneven = next(batches)
    with pytest.raises(
        ValueError, match=r"encode=\.\.\. needs samples that are dealt evenly, and the 10 of this batch"
    ):
        trainer.step(loss, uneven, encode=lambda model, batch: model(batch))
    trainer.step(lambda model, batch: loss(model, model(batch)), uneven)


def test_generators_follow_from_name_place_and_virtual_rank():
    trainer = make_trainer()

    def draw(name="noise", virtual_rank=0):
        return torch.rand((), generator=trainer.generator(name, virtual_rank)).item()

    assert list(trainer.local_virtual_ranks) == [0, 1, 2, 3]
    drawn = [draw(), draw("other"), draw(virtual_rank=1)]
    assert drawn[0] == draw()
    for batch in trainer.batches(DATA, batch_size=12):
        drawn.append(draw())
        trainer.step(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"), batch)
        drawn.append(draw())
    assert len(set(drawn)) == 7


def test_samples_made_in_inference_mode_can_be_trained_on():
    @torch.inference_mode()
    def play(model):
        return torch.randn(2, 4) * model(torch.ones(4)).sum()

    trainer = make_trainer()
    before = trainer.digest()
    for batch in trainer.rollouts(play, steps=2):
        trainer.step(lambda model, batch: (model(batch) * batch[:, :1]).sum(1), batch)
    assert trainer.digest() != before


def test_an_epoch_that_was_begun_with_rollouts_does_not_go_on_with_a_dataset():
    trainer = make_trainer()
    for batch in trainer.rollouts(lambda model: torch.randn(2, 4), steps=2):
        trainer.step(lambda model, batch: model(batch).sum(1), batch)
        break
    with pytest.raises(ValueError, match="before step 1, with rollouts; the epoch cannot go on with batch_size=12"):
        trainer.batches(DATA, batch_size=12)
