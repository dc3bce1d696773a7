"""Shards in a loop of your own: bits of one process that adds the shares of ranks, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "shard_loop.py"
REFUSALS = PROGRAM.with_name("shard_loop_refusals.py")


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (1, "block"),
        (2, "zero1"),
        (3, "block"),
        (2, "built"),
        pytest.param(2, "block", marks=pytest.mark.soak),
        pytest.param(2, "named", marks=pytest.mark.soak),
        pytest.param(3, "size", marks=pytest.mark.soak),
        pytest.param(3, "zero1", marks=pytest.mark.soak),
        pytest.param(4, "replicas", marks=pytest.mark.soak),
    ],
)
def test_a_loop_has_the_bits_of_one_process_that_adds_the_shares(fork_ranks, fork_python, tmp_path, ranks, how):
    expected = fork_python(PROGRAM, f"shares={ranks}", "reference")
    job = fork_ranks(ranks, PROGRAM, f"shares={ranks}", how, tmp_path)
    assert [job.lines(rank) for rank in range(ranks)] == [expected] * ranks


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (1, "block"),
        (2, "size"),
        *(
            pytest.param(ranks, how, marks=pytest.mark.soak)
            for ranks in (2, 3, 4)
            for how in ("block", "size", "zero1", "built", "replicas")
            if (ranks, how) not in {(2, "size"), (3, "replicas")}
        ),
    ],
)
def test_several_optimizers_and_a_scaler_have_the_bits_of_one_process(fork_ranks, fork_python, tmp_path, ranks, how):
    program = PROGRAM.with_name("shard_loop_optimizers.py")
    expected = fork_python(program, f"shares={ranks}", "reference")
    job = fork_ranks(ranks, program, f"shares={ranks}", how, tmp_path)
    assert [job.lines(rank) for rank in range(ranks)] == [expected] * ranks
    scales = [float(line.split()[-1]) for line in expected if line.startswith("step ")]
    assert scales[5] < scales[4]  # all ranks skip what overflows on the last one


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((3, "size"), [(1, "block"), (2, "block")]),
        pytest.param((1, "block"), [(3, "size"), (2, "zero1"), (4, "replicas")], marks=pytest.mark.soak),
        pytest.param((2, "zero1"), [(3, "block"), (1, "block"), (2, "built")], marks=pytest.mark.soak),
        pytest.param((4, "replicas"), [(3, "zero1"), (1, "block"), (2, "named")], marks=pytest.mark.soak),
    ],
)
def test_parts_are_loaded_by_another_number_of_ranks_with_another_division(fork_ranks, tmp_path, before, after):
    ranks, how = before
    expected = fork_ranks(ranks, PROGRAM, f"shares={ranks}", how, tmp_path).lines(0)[-3:]
    for others, way in after:
        job = fork_ranks(others, PROGRAM, f"shares={others}", way, tmp_path, "load")
        assert [job.lines(rank) for rank in range(others)] == [expected] * others


@pytest.mark.parametrize(("ranks", "by"), [(2, "block"), pytest.param(3, "size", marks=pytest.mark.soak)])
def test_sync_batch_norm_normalises_over_all_ranks(fork_ranks, fork_python, ranks, by):
    program = PROGRAM.with_name("shard_sync_norm.py")
    expected = fork_python(program, by)
    job = fork_ranks(ranks, program, by)
    assert [job.lines(rank) for rank in range(ranks)] == [expected] * ranks


CANNOT = "cannot be divided over ranks: it is not known to treat each element of a parameter alone."
MESSAGES = {
    "no model": "TypeError: model is a list: unisono.parallel.shard takes one torch.nn.Module, then its optimizer",
    "no optimizer": "TypeError: optimizer is a type: unisono.parallel.shard takes one torch.optim.Optimizer",
    "no optimizers": "ValueError: the dict of optimizers is empty: unisono.parallel.shard takes at least one",
    "no optimizer of a name": "TypeError: optimizer 'body' is a NoneType: unisono.parallel.shard takes one torch",
    "no name": "TypeError: an optimizer is named 0: give them names, as in {{'body': ..., 'head': ...}}",
    "a parameter in common": "ValueError: optimizers 'body' and 'head' have a parameter of shape [2, 16] in common",
    "unknown optimizer": "ValueError: optimizer is 'haed': sharded.step takes the name of one of 'body', 'head', or",
    "an optimizer": "ValueError: optimizer is an SGD: sharded.step takes the name of one of 'body', 'head', or none",
    "a name for one": "ValueError: optimizer is 'head', and unisono.parallel.shard was given one without a name: leave",
    "a frozen optimizer": "ValueError: optimizer 'head' has no parameter that requires a gradient: there is nothing to",
    "no scaler": 'TypeError: scaler is a float; expected torch.amp.GradScaler("cpu")',
    "a scaler elsewhere": "ValueError: scaler is for xpu, and the model is on the CPU: make it by torch.amp.GradScaler",
    "float16 weights": "ValueError: parameter 'layers.0.weight' has dtype float16, whose gradient GradScaler cannot",
    "a disabled scaler": "not refused",
    "a scaled loss": "ValueError: loss is scaled, and sharded.backward does that: give it without scaler.scale",
    "other scale": "RankMismatchError: ranks call different things: sharded.step(scale=1024.0) on rank 0, "
    "sharded.step(scale=2048.0) on rank 1",
    "another scaler": "RankMismatchError: unisono.parallel.shard was given different things on different ranks: the "
    "state of scaler is",
    "other optimizers": "CheckpointError: the parts are of SGD 'body' with 1 parameter group and AdamW 'head' with 1 "
    "parameter group, and the loop has AdamW with 1 parameter group: load parts of the same optimizers",
    "no settings": "TypeError: parallel is a str; expected unisono.parallel.Shard(...)",
    "unknown name": "ValueError: by= names 'layer.1', which is not a submodule of the model; did you mean 'layers.1'?",
    "LBFGS": f"ValueError: LBFGS {CANNOT}",
    "compiled": "ValueError: unisono.parallel.shard brings the parameters of blocks together when they are called",
    "wrapped": "TypeError: model is wrapped in DataParallel, which looks after parameters too: give the module in it",
    "too many replicas": "ValueError: replicas=3 cannot share 2 ranks evenly: start 3, or leave out replicas=",
    "apart": "ValueError: the optimizer has a parameter of shape [3] that the model does not have",
    "frozen": "ValueError: the optimizer has no parameter that requires a gradient: there is nothing to train",
    "meta": "ValueError: parameter 'layers.0.weight' is on the meta device: give it values before",
    "lazy": "ValueError: parameter 'weight' has no shape yet: run a forward pass before unisono.parallel.shard",
    "replicated": "ValueError: parameter 'layers.0.weight' has a gradient hook of replicate(), a Trainer or another",
    "again": "ValueError: parameter 'layers.0.weight' has a gradient hook of replicate(), a Trainer or another",
    "parallelized": "ValueError: parameter 'layers.0.weight' is a DTensor, divided among ranks already: give unisono.",
    "parallelized and replicated": "TypeError: model.layers.0.weight is a DTensor, of which each rank has a part, and",
    "other settings": "has the part of it that this needs, and unisono.parallel.shard was given parallel=Shard(",
    "written": "ValueError: parameter 'head.weight' was added or changed after unisono.parallel.build",
    "a call of the handle": "TypeError: shard() returns a handle and leaves the model as it is: keep both",
    "no backward": "LossError: no rank called sharded.backward in step 0, so there is nothing to update",
    "loss.backward": "UnisonoError: loss.backward() reached a model that unisono.parallel.shard has divided",
    "a number": "TypeError: loss is a float: give sharded.backward the tensor that the loss function returned",
    "several losses": "ValueError: loss has shape [4], and must be one number: take loss.mean()",
    "twice": "UnisonoError: sharded.backward was called again in one step, and the gradients of the last call are on",
    "after clipping": "UnisonoError: sharded.backward was called after clip_grad_norm_ in the same step",
    "a call after clipping": "Net was called outside of sharded.step(), sharded.no_grad() and sharded.whole()",
    "clip twice": "UnisonoError: sharded.clip_grad_norm_ was called twice in one step: call it once",
    "caught": "UnisonoError: sharded.clip_grad_norm_ failed in this step, and the program went on in its block",
    "clip at zero": "ValueError: max_norm=0 must be positive; math.inf returns the norm and clips nothing",
    "nan": "NonFiniteLossError: the loss of step 0 is nan on rank {last}. The step did not happen",
    "elsewhere": "A parameter that is used without a call of its block is NaN there: leave such blocks out of by=",
    "optimizer.step": "UnisonoError: AdamW.step() was called, and with unisono.parallel.shard the end of",
    "backward outside": "UnisonoError: sharded.backward was called outside of sharded.step()",
    "clip outside": "UnisonoError: sharded.clip_grad_norm_ was called outside of sharded.step()",
    "a call": "UnisonoError: Net was called outside of sharded.step(), sharded.no_grad() and sharded.whole()",
    "state_dict": "UnisonoError: the weights of Net are divided over ranks, so that this one has a part alone",
    "load_state_dict": "UnisonoError: the weights of Net are divided over ranks, so that this one has a part alone",
    "optimizer.state_dict": "UnisonoError: the state of AdamW is divided over ranks, so that this one has a part alone",
    "step in whole": "UnisonoError: sharded.step() was called within sharded.whole(): leave that block before",
    "whole in step": "UnisonoError: sharded.whole() was called within sharded.step(): leave that block before",
    "everywhere": "TypeError: everywhere=1 must be True or False, and is an int",
    "state_dict in step": "UnisonoError: sharded.state_dict() was called within sharded.step(): leave that",
    "one part": "TypeError: parts is a dict, as of one rank: give load_state_dict a list of what state_dict returned",
    "no parts": "CheckpointError: there are no parts: give load_state_dict what state_dict returned on each rank",
    "a part missing": "CheckpointError: the state is that of 2 ranks, and the parts of rank 0 are missing: give",
    "a part twice": "CheckpointError: the part of rank 0 is there twice: give load_state_dict what state_dict returned",
    "no part": "CheckpointError: a dict among the parts is not one: give load_state_dict what state_dict returned on",
    "other moments": "after 0 steps, and one of {ranks} ranks after 7: give load_state_dict what state_dict returned",
    "another form": "CheckpointError: a part has version 2 of the form, and this version of unisono reads 1: load it",
    "another model": "CheckpointError: parameter 'head.weight' is float32 [2, 16] with strides [16, 1] in the "
    "parts, and float32 [3, 16] with strides [16, 1] in the model: load parts of the same model",
    "a step after": "UnisonoError: sharded.load_state_dict failed, on this rank or another one, when some values may",
    "unreadable": "OSError: a file is missing",
    "zero_": "UnisonoError: parameter 'layers.1.weight' was written to where this rank has no more than a part of it",
    "data.fill_": "UnisonoError: parameter 'layers.1.weight' was written to where this rank has no more than a part",
    "written on one rank": "UnisonoError: parameter 'layers.1.weight' was written to where this rank has no more than",
    "of rank": "RankMismatchError: unisono.parallel.shard was given different things on different ranks: parameter "
    "'head.weight' is 'float32 [2, 16]' on rank 0 and 'float32 [3, 16]' on rank 1",
    "wrong here": f"ValueError: LBFGS {CANNOT}",
    "other state": "RankMismatchError: the optimizer's state differs between ranks: that of 'layers.0.weight' on",
    "other rate": "RankMismatchError: ranks differ: lr of parameter group 0 is 0.1 on rank 0 and 1.1 on rank 1.",
    "other calls": "RankMismatchError: ranks call different things: sharded.no_grad() on rank 0, sharded.step()",
    "clips alone": "RankMismatchError: ranks call different things: the end of sharded.step() on rank 0, "
    "sharded.clip_grad_norm_(1.0) on rank 1",
    "fails late": "UnisonoError: an earlier step failed on this rank after gradients had been summed",
    "a copy": "not refused",
}
OF_SEVERAL_RANKS = {
    "too many replicas", "replicated", "other settings", "written", "elsewhere", "a call", "state_dict",
    "load_state_dict", "optimizer.state_dict", "a call after clipping", "of rank", "wrong here", "other state",
    "zero_", "data.fill_", "written on one rank", "other rate", "other calls", "clips alone", "fails late",
    "other scale", "another scaler", "parallelized", "parallelized and replicated",
}  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_is_an_error_that_says_what_to_do(fork_ranks, ranks):
    job = fork_ranks(ranks, REFUSALS)
    for rank in range(ranks):
        told = dict(line.split(": ", 1) for line in job.lines(rank))
        assert told.keys() == MESSAGES.keys()
        expected = {name: message.format(last=ranks - 1, ranks=ranks) for name, message in MESSAGES.items()}
        if ranks == 1:
            expected |= dict.fromkeys(OF_SEVERAL_RANKS, "not refused")
            expected["a part missing"] = expected["no parts"]
        elif rank == 0:
            expected["written on one rank"] = "PeerError: rank 1 failed while this rank needed its part of the model"
            for name, call in (("wrong here", "unisono.parallel.shard"), ("unreadable", "sharded.load_state_dict")):
                expected[name] = f"PeerError: {call} was not done, for it failed on rank 1, with {MESSAGES[name]}"
        missing = {name: told[name] for name, words in expected.items() if words not in told[name]}
        assert not missing
