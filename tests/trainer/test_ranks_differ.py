"""Ranks that do not do the same: every rank is told what differs and where, and none hangs or goes on.

What rank 1 does otherwise stands in programs/ranks_differ.py. Jobs run without a launcher, which would end ranks that
wait for one that has failed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from unisono.mismatch import tell_differences

PROGRAM = Path(__file__).parent / "programs" / "ranks_differ.py"

AT_THE_START = {
    "argument seed": "seed is 0 on rank 0 and 1 on rank 1",
    "argument virtual_ranks": "virtual_ranks is 4 on rank 0 and 8 on rank 1",
    "argument directory": r"directory is None on rank 0 and '.*/run' on rank 1",
    "argument resume": "resume is 'auto' on rank 0 and 'never' on rank 1",
    "argument checkpoints": "checkpoints.keep is 3 on rank 0 and 7 on rank 1",
    "argument clip_grad_norm": "clip_grad_norm is None on rank 0 and 1.0 on rank 1",
    "argument autocast": "autocast is None on rank 0 and 'bf16' on rank 1",
    "argument ema_decay": "ema_decay is None on rank 0 and 0.9 on rank 1",
    "argument engine": "engine is 'auto' on rank 0 and 'collective' on rank 1",
    "argument overlap": "overlap is True on rank 0 and False on rank 1",
    "argument threads": "threads is 1 on rank 0 and 2 on rank 1",
    "argument scheduler_interval": "scheduler_interval is 'step' on rank 0 and 'epoch' on rank 1",
    "argument stateful": r"the names of stateful are 0 on rank 0 and 1 on rank 1 \('counter' is not on all\)",
    "another_division": r"parallel is .*Shard\(by='block'.*\).* on rank 0 and .*Shard\(by='size'.*\).* on rank 1",
    "another_place_of_sums": r"parallel is .*sums='whole'\).* on rank 0 and .*sums='divided'\).* on rank 1",
    "another_directory": r"directory is '.*/rank0' on rank 0 and '.*/rank1' on rank 1",
    "another_learning_rate": "lr of parameter group 0 is 0.01 on rank 0 and 0.02 on rank 1",
    "another_optimizer": "the class of the optimizer is 'AdamW' on rank 0 and 'SGD' on rank 1",
    "another_order": "the parameters of parameter group 0 differ at number 0: 'first.weight' on rank 0 and "
    "'table.weight' on rank 1",
    "fewer_parameters": r"the parameters of parameter group 0 are 7 on rank 0 and 2 on rank 1 \('.*' is not on all\)",
    "more_groups": "the number of parameter groups is 1 on rank 0 and 2 on rank 1",
    "state_of_the_optimizer": "'first.bias in the state of the optimizer' of rank 1 is not that of rank 0",
    "another_scheduler": "the class of the scheduler is 'StepLR' on rank 0 and 'ExponentialLR' on rank 1",
    "another_step_size": "step_size of the scheduler is 2 on rank 0 and 3 on rank 1",
    "frozen_parameter": "requires_grad of 'first.bias' is True on rank 0 and False on rank 1",
    "frozen_norm": r"the mode of 'norm' \(BatchNorm1d\) is 'training' on rank 0 and 'evaluation' on rank 1",
    "another_momentum": r"momentum of 'norm' \(BatchNorm1d\) is 0.1 on rank 0 and 0.5 on rank 1",
    "another_padding": r"what 'table' \(Embedding\) was made with is '5, 4' on rank 0 and '5, 4, padding_idx=2' on",
    "another_dtype": r"parameter 'last.weight' is 'float32 \[3, 8\]' on rank 0 and 'float64 \[3, 8\]' on rank 1",
    "other_strides": r"parameter 'first.weight' is 'float32 \[8, 6\]' on rank 0 and 'float32 \[8, 6\] with strides",
    "sparse_table": r"sparse gradients are 0 on rank 0 and 1 on rank 1 \('table.weight' is not on all\)",
    "another_width": r"parameter 'first.weight' is 'float32 \[8, 6\]' on rank 0 and 'float32 \[9, 6\]' on rank 1",
    "another_weight": r"'first.weight' of rank 1 is not that of rank 0 \(1 of 12 tensors differ\)",
    "another_hidden_buffer": "'hidden' of rank 1 is not that of rank 0",
    "several_models": "the names of the models differ at number 0: '' on rank 0 and 'net.' on rank 1",
    "another_default_dtype": r"torch.get_default_dtype\(\) is 'torch.float32' on rank 0 and 'torch.float64' on rank 1",
}

# {most} and {one} are the other ranks and rank 1.
WRITTEN = "buffers written since the last step are 0 {most} and 1 {one}"
IN_THE_LOOP = {
    "frozen before the first step": "requires_grad of 'net.first.weight' is True {most} and False {one}; .* and 1 more",
    "learning_rate": "lr of parameter group 0 of optimizer 'net' is 0.01 {most} and 0.005 {one}",
    "learning_rate_in_a_tensor": "lr of parameter group 0 of optimizer 'judge' is 0.1\\d* {most} and 0.05\\d* {one}",
    "plateau": "lr of parameter group 0 of optimizer 'net' is 0.01 {most} and 0.005 {one}",
    "betas": r"betas of parameter group 0 of optimizer 'net' is \(0.9, 0.999\) {most} and \(0.8, 0.9\) {one}",
    "frozen": "ranks differ: requires_grad of 'net.first.weight' is True {most} and False {one}. The step did not",
    "most_frozen": "requires_grad of 'net.first.weight' is True {most} and False {one}; .* and 2 more",
    "added_group": "the number of parameter groups of optimizer 'judge' is 1 {most} and 2 {one}. The step did not",
    "norm_in_evaluation": r"the mode of 'net.norm' \(BatchNorm1d\) is 'training' {most} and 'evaluation' {one}",
    "momentum": r"momentum of 'net.norm' \(BatchNorm1d\) is 0.1 {most} and 0.5 {one}",
    "running_mean": rf"{WRITTEN} \('net.norm.running_mean = \w{{{{8}}}}' is not on all\)",
    "buffer_with_a_nan": rf"{WRITTEN} \('net.offset = \w{{{{8}}}}' is not on all\)",
    "model_in_evaluation": r"the mode of 'net' \(Model\) is 'training' {most} and 'evaluation' {one}",
    "another optimizer": r"trainer.step\(optimizer='net'\) {most}, trainer.step\(optimizer='judge'\) {one}",
    "evaluation": r"trainer.step\(optimizer='net'\) {most}, trainer.evaluate\(name='evaluation', ema=False\) {one}",
    "evaluation by the others": r"trainer.evaluate\(.*\) {most}, trainer.step\(optimizer='net'\) {one}",
    "another evaluation": r"trainer.evaluate\(name='a', .*\) {most}, trainer.evaluate\(name='b', .*\) {one}",
    "batches": r"trainer.step\(optimizer='net'\) {most}, trainer.batches\(\) {one}",
    "load_state_dict": r"where the weights lie \(anew after load_state_dict\) is 'before' {most} and 'anew' {one}",
    "a batch left out": r"ranks differ: step is \d+ {most} and \d+ {one}. The step did not happen",
}
OTHERS = r"differ at number \d: '{name} = \w{{{{8}}}}' {{most}} and '{name} = \w{{{{8}}}}' {{one}}"
WRITTEN_WEIGHTS = {
    "a weight": "ranks differ: weights " + OTHERS.format(name="net.last.weight"),
    "a weight by its data": "ranks differ: weights " + OTHERS.format(name="net.last.weight"),
    "all that is loaded": "ranks differ: buffers written since the last step are 0 {most} and 4 {one}",
}


def told_by(lines: list[str]) -> dict[str, str]:
    return dict(re.findall(r"^(.+) -> RankMismatchError: (.+)$", "\n".join(lines), re.MULTILINE))


def test_what_the_trainer_is_given_is_compared_at_the_start(fork_ranks, tmp_path):
    job = fork_ranks(2, PROGRAM, "start", tmp_path)
    for rank in range(2):
        told = told_by(job.lines(rank))
        assert told.keys() == AT_THE_START.keys()
        for name, words in AT_THE_START.items():
            assert re.search(words, told[name]), told[name]
    assert not list(tmp_path.glob("ran[k0-9]*/checkpoints"))


@pytest.mark.parametrize(
    ("engine", "ranks", "options"),
    [
        ("shared", 2, []),
        ("shared", 3, ["large"]),
        ("collective", 3, []),
        ("collective", 2, ["large"]),
        ("collective", 2, ["hosts"]),
    ],
)
def test_what_the_loop_does_is_compared_in_every_step(fork_ranks, tmp_path, engine, ranks, options):
    job = fork_ranks(ranks, PROGRAM, engine, tmp_path, *options)
    most = {2: "on rank 0", 3: "on ranks 0, 2"}[ranks]
    expected = dict(IN_THE_LOOP)
    if engine == "collective":  # each rank has weights of its own
        del expected["load_state_dict"]
        expected |= WRITTEN_WEIGHTS
        if torch.cuda.is_available():  # what GPUs hold is not looked at
            del expected["a weight by its data"]
    for rank in range(ranks):
        told = told_by(job.lines(rank))
        assert told.keys() == expected.keys()
        for name, words in expected.items():
            assert re.search(words.format(most=most, one="on rank 1"), told[name]), told[name]
    assert len(set(re.findall("weights sha256: (.*)", job.out))) == 1


def test_many_differences_are_told_in_a_few_clauses():
    documents = [{f"entry {i}": float(rank == 3) for i in range(9)} | {"equal": 1.0} for rank in range(5)]
    told = tell_differences(documents)
    assert told.startswith("entry 0 is 0.0 on ranks 0-2, 4 and 1.0 on rank 3; entry 1")
    assert told.endswith("; and 5 more")
    assert tell_differences([{"a": float("nan")}, {"a": float("nan")}]) is None
    assert tell_differences([{"a": 1}, {"a": True}]) == "a is 1 on rank 0 and True on rank 1"
    assert len(tell_differences([{"a": "x" * 9999}, {"a": "y"}])) < 200
