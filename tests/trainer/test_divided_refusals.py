"""What a division over ranks refuses: on all ranks, before anything is lost, with the reason and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "divided_refusals.py"
CANNOT = (
    "cannot be divided over ranks: it is not known to treat each element of a parameter alone. Those of torch that do"
)
MESSAGES = {
    "unknown name": "ValueError: by= names 'layer.2', which is not a submodule of the model; did you mean 'layers.2'?",
    "never called": "ValueError: by= names 'layers', a ModuleList, which is never called: name its items, such as "
    "'layers.0'",
    "nested": "ValueError: by= names 'layers.0' and 'layers.0.linear' inside it: name one of them",
    "twice": "ValueError: by=['layers.1', 'layers.1'] has 'layers.1' 2 times: name each submodule once",
    "no names": "ValueError: by=[] names no block",
    "a name alone": 'TypeError: by=\'layers.2\' is a str: give "block", "size", or the names of the submodules',
    "no name": "TypeError: by=[2] has 2, an int, where the name of a submodule is due",
    "a size of names": 'ValueError: unit_bytes=64 is the size of units that by="block" or "size" finds, and these are',
    "a size with zero=1": "ValueError: zero=1 keeps all weights on each rank, so unit_bytes=64 has no meaning: leave",
    "no size": "ValueError: unit_bytes=0 must be at least 1",
    "zero": "ValueError: zero=2 must be 3, which divides weights, gradients and the optimizer's state, or 1",
    "sums": "ValueError: sums='parts' must be one of 'whole', 'divided'",
    "zero=1 by size": "ValueError: zero=1 keeps all weights on each rank, so by='size' has no meaning: leave it out",
    "zero=1 and replicas": "ValueError: zero=1 keeps all weights on each rank already",
    "no replica": "ValueError: replicas=0 must be at least 1",
    "too many replicas": "ValueError: replicas=3 cannot share 2 ranks evenly: start 3, or leave out replicas=",
    "compiled blocks": 'ValueError: by="size" sees the operations that read parameters, and torch.compile has made',
    "with a pipeline": "stages that are divided over ranks in their turn are not there yet",
    "no division": "TypeError: parallel='layers.2' is a str; give unisono.parallel.Pipeline(stages=[...]) or",
    "shared": 'ValueError: engine="shared" keeps one copy of the weights for all ranks, and parallel= divides them',
    "compiled": "ValueError: parallel=Shard(...) brings the parameters of blocks together when they are called",
    "several models": "ValueError: parallel=Shard(...) divides one model, and there are 2: 'a', 'b'.",
    "carried": "ValueError: stateful['h'] is carried by virtual ranks, which parallel=Shard(...) does not know yet",
    "LBFGS": f"ValueError: LBFGS {CANNOT} are SGD, Adam, AdamW,",
    "Adafactor": f"ValueError: Adafactor {CANNOT}",
    "own optimizer": f"ValueError: OwnSGD {CANNOT}",
    "sparse": "ValueError: the gradient of '0.weight' is sparse, since its module was made with sparse=True",
    "shared memory": "parameter 'layers.0.linear.weight' shares its memory with parameter 'layers.1.linear.weight'",
    "encode": "ValueError: step(encode=...) needs the whole model on each rank",
    "on_gradients": "ValueError: step(on_gradients=...) needs the whole model on each rank",
    "closure": "ValueError: step(closure=...) needs the whole model on each rank",
    "collect": "ValueError: trainer.collect(name='collect') calls a function of the whole model",
    "opaque": "LossError: block 'layers.3' returned an object of type Result, in which no tensor is found",
    "elsewhere": "A parameter that is used without a call of its block is NaN there: with parallel=Shard(...)",
    "multiplying": "LossError: parameter 'layers.1.linear.bias' was used outside of its block",
    "writing": "LossError: parameter 'layers.2.linear.weight' was written to in the forward pass",
    "digest": "UnisonoError: trainer.digest needs the whole model",
    "a call": "UnisonoError: Net was called outside of trainer.step, trainer.evaluate and trainer.predict",
    "zeroing": "UnisonoError: parameter 'layers.1.linear.bias' was written to where this rank has no more than a part",
    "new parameter": "UnisonoError: parameter 'late' was not there when the model was divided",
}
OF_SEVERAL_RANKS = {
    "too many replicas",
    "sparse",
    "opaque",
    "elsewhere",
    "multiplying",
    "digest",
    "a call",
    "new parameter",
    "zeroing",
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


FAILING = """
import copy, pickle
import torch, unisono
from torch import nn
from torch.utils.data import TensorDataset

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
data = TensorDataset(torch.randn(32, 8))
trainer = unisono.Trainer(
    model, torch.optim.AdamW(model.parameters()), virtual_ranks=4, progress=False, parallel=unisono.parallel.Shard()
)
teacher = copy.deepcopy(model)
fails = {1: 0, 2: 1}  # which rank, by step

def loss(model, batch):
    result = model(batch[0]).square().mean(1)
    if trainer.steps_done in fails and fails.pop(trainer.steps_done) == trainer.rank:
        raise OSError("a file is missing")
    return result * float("nan") if trainer.steps_done == 3 and not told else result

told = []
for _ in trainer.epochs(2):
    for batch in trainer.batches(data, batch_size=8):
        assert teacher(data.tensors[0]).isfinite().all()
        for attempt in range(2):
            try:
                trainer.step(loss, batch)
                break
            except Exception as error:
                if trainer.steps_done == 3:
                    told.append(error)
                print(f"{trainer.steps_done} {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
assert torch.equal(pickle.loads(pickle.dumps(model))(data.tensors[0]), model(data.tensors[0]))
print(trainer.digest())
"""
PEER = "PeerError: rank {} failed while this rank needed its part of the model; its own error says why."


@pytest.mark.parametrize("settings", ["", 'sums="divided"', pytest.param("zero=1", marks=pytest.mark.soak)])
def test_a_step_that_fails_on_one_rank_fails_on_all_and_may_be_made_again(fork_ranks, fork_python, tmp_path, settings):
    job = fork_ranks(2, FAILING.replace("Shard()", f"Shard({settings})"))
    undone = " The step did not happen: weights and buffers keep their values from before it."
    nan = "3 NonFiniteLossError: the loss is nan at epoch 0, step 3."
    assert job.lines(0)[:3] == ["1 OSError: a file is missing", f"2 {PEER.format(1)}{undone}", f"{nan}{undone}"]
    assert job.lines(1)[:3] == [f"1 {PEER.format(0)}{undone}", "2 OSError: a file is missing", f"{nan}{undone}"]
    program = tmp_path / "calm.py"
    program.write_text(FAILING.replace("{1: 0, 2: 1}", "{}").replace('float("nan")', "1.0"))
    assert job.lines(0)[3:] == job.lines(1)[3:] == fork_python(program)
