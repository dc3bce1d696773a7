"""What a rank takes and gives back in steps, without the C library's heap."""

import math
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from unisono.engine.tree_all_reduce import NodeLayout
from unisono.estimate.costs import Workload
from unisono.estimate.device_memory import memory_on_devices
from unisono.estimate.model_profile import profile_model
from unisono.estimate.operator_times import OperatorTimes
from unisono.estimate.rank_share import RankShare
from unisono.estimate.stage_memory import cut, with_stages
from unisono.estimate.step_memory import (
    in_one_process,
    with_divided_state,
    with_replicas,
    with_shards,
    with_shared_memory,
)
from unisono.parallel.pipeline.schedule import make_schedule

WIDTH, BLOCKS, LEAVES = 256, 4, 8
WEIGHTS = 4 * BLOCKS * (WIDTH + 1) * WIDTH


def build(blocks=BLOCKS, width=WIDTH):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(blocks)])
    data = [(torch.zeros(width), 1)]
    return model, torch.optim.AdamW(model.parameters()), loss, data


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.fixture(scope="module")
def record():
    return profile_model(build, micro_batch=4, stages=[], times=OperatorTimes()).record


def share(record, ranks, micro_batches=1, *, in_turn=False):
    layout = NodeLayout.of(leaves=LEAVES, world_size=ranks, virtual_ranks=LEAVES, in_turn=in_turn)
    return RankShare(record, layout, 0, micro_batches, 1024)


def alive_after(trace, of=None):
    """Return the bytes of each kind at the end, and the most that were there at a time, of one kind or of all."""
    blocks, used, most = {}, Counter(), 0
    for what, number, nbytes, kind in trace.operations:
        if what == "give":
            of_kind, size = blocks.pop(number)  # a KeyError: it was given back twice, or never taken
            used[of_kind] -= size
        elif what != "trim":
            blocks[number] = kind, nbytes
            used[kind] += nbytes
            most = max(most, used[of] if of else used.total())
    return used, most


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_stays_from_step_to_step_is_that_of_the_engine(record, micro_batches):
    def kept(trace):
        used, _ = alive_after(trace)
        assert used["activations"] == 0
        return [round(used[kind] / WEIGHTS, 2) for kind in ("parameters", "gradients", "optimizer")]

    assert kept(in_one_process(share(record, 1, micro_batches))) == [1, 1, 2]
    assert kept(with_replicas(share(record, 2, micro_batches))) == [1, 1, 2]
    assert kept(with_shared_memory(share(record, 2, micro_batches), keeps_own=True)) == [0, 0, 0]
    assert kept(with_divided_state(share(record, 4, micro_batches))) == [1.25, 0.25, 0.5]
    for by in ("block", "size"):
        assert kept(with_shards(share(record, 4, micro_batches), by=by, replicas=1)) == [0.25, 0.25, 0.5]
        assert kept(with_shards(share(record, 4, micro_batches), by=by, replicas=2)) == [0.5, 0.25, 0.5]


def test_one_process_holds_as_many_sums_as_the_tree_needs(record):
    _, most = alive_after(in_one_process(share(record, 1)))
    assert 1 + 2 + 3 <= most / WEIGHTS < 1 + 2 + 3 + 0.3  # weights, state, three sums
    _, most = alive_after(in_one_process(share(record, 1, micro_batches=2)))
    assert 1 + 2 + 4 <= most / WEIGHTS < 1 + 2 + 4 + 0.3  # three sums, and the gradient of a share in the making


def test_stages_have_the_passes_of_the_model_once(record):
    stages = cut(record, ["1", "3"])
    assert [len(stage.parameters) for stage in stages] == [2, 4, 2]
    events = [event for stage in stages for event in (*stage.forward, *stage.backward)]
    assert Counter(events) == Counter(record.passes)
    for stage in stages:
        assert Counter((*stage.for_inputs, *stage.for_weights)) == Counter(stage.backward)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "gpipe"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("zero", [None, 1])
def test_a_stage_keeps_its_part_of_the_state(record, schedule, replicas, zero):
    passes = make_schedule(schedule, ranks=2, micro_batches=LEAVES // replicas)
    for number, stage in enumerate(cut(record, ["2"])):
        used, _ = alive_after(with_stages(share(record, replicas), {number: stage}, passes.actions[number], zero=zero))
        divides = zero == 1 and replicas > 1
        assert used["activations"] == 0
        assert used["optimizer"] == pytest.approx(WEIGHTS / (2 if divides else 1), rel=0.03)
        assert used["parameters"] == pytest.approx(WEIGHTS / 2 * (1.5 if divides else 1), rel=0.03)


@pytest.mark.parametrize("ranks", [2, 4])
def test_with_divided_sums_a_rank_keeps_as_much_and_takes_less_in_a_step(record, ranks):
    whole = with_shards(share(record, ranks), by="block", replicas=1)
    divided = with_shards(share(record, ranks, in_turn=True), by="block", replicas=1, divides_sums=True)
    assert alive_after(divided)[0] == alive_after(whole)[0]
    most = [alive_after(trace, of="gradients")[1] / WEIGHTS for trace in (whole, divided)]
    shares, block = -(-LEAVES // ranks), 1 / BLOCKS
    assert most[0] > 1 + 1 / ranks  # with two shares or more
    assert shares > 1 and most[1] < (1 + math.log2(LEAVES)) / ranks + 3 * block


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_rank_keeps_a_part_of_stages_that_replicas_divide(record, replicas):
    passes = make_schedule("breadth-first", ranks=2, micro_batches=LEAVES // replicas, stages_per_rank=2)
    stages = cut(record, ["1", "2", "3"])
    for rank in range(2):
        own = {number: stages[number] for number in (rank, rank + 2)}
        used, most = alive_after(with_stages(share(record, replicas), own, passes.actions[rank], zero=3))
        assert used["activations"] == 0
        part = 0.5 / replicas
        assert [used[kind] / WEIGHTS for kind in ("parameters", "optimizer")] == pytest.approx(
            [part, 2 * part], abs=0.02
        )
        _, with_weights = alive_after(with_stages(share(record, replicas), own, passes.actions[rank], zero=1))
        assert most < 0.9 * with_weights


def test_a_rank_keeps_the_state_of_several_stages_and_updates_them_at_once(record):
    passes = make_schedule("interleaved", ranks=2, micro_batches=LEAVES, stages_per_rank=2)
    stages = cut(record, ["1", "2", "3"])
    for rank in range(2):
        own = {number: stages[number] for number in (rank, rank + 2)}
        used, _ = alive_after(with_stages(share(record, 1), own, passes.actions[rank], zero=None))
        assert used["activations"] == 0
        assert [used[kind] / WEIGHTS for kind in ("parameters", "optimizer")] == pytest.approx([0.5, 1], rel=0.03)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_gpu_holds_what_a_simulated_one_does(ranks):
    """The table of docs/shards.md: AdamW, 16 blocks of 1 MiB, a share for each rank."""
    profile = profile_model(partial(build, blocks=16, width=512), micro_batch=1, stages=[], times=OperatorTimes())
    found = {each.name: each for each in memory_on_devices(profile, Workload(ranks=ranks, virtual_ranks=ranks))}
    parts = {name: each.device_nbytes / profile.parameters_nbytes for name, each in found.items()}
    assert parts[f"{ranks} ranks, zero=1, offload"] == pytest.approx(2.06, abs=0.05)
    assert parts[f"{ranks} shards, offload"] == pytest.approx(0.26, abs=0.05)
    if ranks > 1:
        assert parts[f"{ranks} shards"] == pytest.approx({2: 2.25, 4: 1.25}[ranks], abs=0.1)
        assert found[f"{ranks} shards"].host_nbytes == 0
    host = found[f"{ranks} shards, offload"].host_nbytes * ranks / profile.parameters_nbytes
    assert 4 <= host < 4 + 2.5  # weights and sums, which are pinned as powers of two, two averages, and an update's own
