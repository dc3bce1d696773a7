"""What a pipeline refuses: on all ranks, before anything is lost, with the reason and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "cut_refusals.py"
MESSAGES = {
    "unknown name": "ValueError: a stage is to begin with 'layer.2', which is not a submodule of the model; did you "
    "mean 'layers.2'?",
    "container": "CutError: a stage is to begin with 'layers', which the forward pass never calls.",
    "too many stages": "ValueError: 3 stages cannot be divided evenly among 2 ranks: start a multiple of 3 ranks, or a "
    "number that divides 3, or name other stages",
    "1f1b": 'ValueError: schedule="1f1b" needs a rank for each of the 4 stages of a replica, and there are 2 ranks: '
    'start a multiple of 4 ranks, name other stages, or give schedule="auto" for several stages on a rank',
    "more than blocks": "ValueError: 2 stages are to begin with 'layers.1': name each submodule once",
    "more stages than places": "ValueError: 12 stages need 12 places at which one may begin, and the model has 5: give "
    "fewer stages, or a model of smaller blocks",
    "too little memory": "ValueError: no division into 2 stages fits 0.00102 MiB each: the best one needs 0.0",
    "no stages": "ValueError: stages=[] leaves the model whole",
    "a name alone": "TypeError: stages='layers.2' is a str: give the number of stages, or the names of the submodules",
    "no pipeline": "TypeError: parallel='layers.2' is a str; give unisono.parallel.Pipeline(stages=[...])",
    "no schedule": "ValueError: schedule='1b1f' must be one of 'auto', 'gpipe', '1f1b', 'eager-1f1b', 'interleaved'",
    "replicas": "ValueError: 2 stages cannot be divided evenly among 2 ranks for 3 replicas: start 6 ranks, or",
    "zero": "ValueError: zero=2 must be 1, which divides the optimizer's state of stages over replicas, 3, which",
    "zero and its schedule": 'ValueError: schedule="1f1b" with zero=3 would bring the weights of a stage together for',
    "zero of Adafactor": "ValueError: Adafactor cannot be divided over ranks: it is not known to treat each element of",
    "zero of a view": "ValueError: Pipeline(zero=1) lets each rank have a part of each parameter's memory, and "
    "parameter 'head.weight' is not dense in memory",
    "zero in a loop": "ValueError: zero=1 divides the optimizer's state over replicas, and cut() makes one: leave it",
    "interleaved": "ValueError: 3 stages cannot be divided evenly among 2 ranks",
    "shared": 'ValueError: engine="shared" keeps one copy of the weights for all ranks',
    "carried": "ValueError: stateful['h'] is carried by virtual ranks",
    "compiled": "ValueError: parallel=Pipeline(...) runs the model's own forward pass",
    "several models": "ValueError: parallel=Pipeline(...) cuts one model, and there are 2: 'a', 'b'.",
    "reads numbers": "in forward reads numbers from a tensor that depends on a block",
    "an attribute": "what a block keeps in an attribute, let it return instead",
    "encode": "ValueError: step(encode=...) needs the whole model on each rank",
    "on_gradients": "ValueError: step(on_gradients=...) needs the whole model on each rank",
    "LBFGS": "ValueError: LBFGS computes the loss of the whole model at other weights",
    "digest": "UnisonoError: trainer.digest needs the whole model",
    "a call in mid-run": "UnisonoError: Net was called in mid-run outside of the steps and evaluations of its pipeline",
    "collect": "ValueError: trainer.collect(name='collect') calls a function of the whole model",
    "sharded": "ValueError: sharded=True divides a dataset among ranks",
}
OF_SEVERAL_RANKS = {
    "too many stages",
    "more stages than places",
    "too little memory",
    "1f1b",
    "replicas",
    "interleaved",
    "reads numbers",
    "an attribute",
    "container",
    "digest",
    "a call in mid-run",
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_is_an_error_that_says_what_to_do(fork_ranks, ranks):
    job = fork_ranks(ranks, PROGRAM)
    for rank in range(ranks):
        told = dict(line.split(": ", 1) for line in job.lines(rank))
        assert told.keys() == MESSAGES.keys()
        expected = MESSAGES if ranks > 1 else dict.fromkeys(OF_SEVERAL_RANKS, "not refused")
        missing = {name: told[name] for name in MESSAGES if expected.get(name, MESSAGES[name]) not in told[name]}
        assert not missing
