import itertools

import pytest
from torch.utils.data import DistributedSampler

from unisono.plan import dealt, even_range, even_steps, num_dealt, num_steps, owner, rank_block

SIZES = [(n, batch) for n in (1, 2, 3, 7, 8, 9, 16, 23, 64) for batch in (1, 2, 3, 8, 9, 64, 100)]


@pytest.mark.parametrize("virtual_ranks", range(1, 10))
@pytest.mark.parametrize(("num_samples", "batch_size"), SIZES)
def test_virtual_ranks_share_each_position_of_an_epoch_once(num_samples, batch_size, virtual_ranks):
    positions = range(num_samples)
    steps = [positions[s * batch_size : (s + 1) * batch_size] for s in range(num_steps(num_samples, batch_size))]
    assert list(itertools.chain(*steps)) == list(positions)
    assert all(steps)
    for step in steps:
        shares = [step[dealt(v, virtual_ranks)] for v in range(virtual_ranks)]
        assert sorted(itertools.chain(*shares)) == list(step)
        # Dealt as cards are: no share is more than one longer than another, and earlier ones are the longer ones.
        lengths = [len(share) for share in shares]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] - lengths[-1] <= 1
        assert lengths == [num_dealt(len(step), v, virtual_ranks) for v in range(virtual_ranks)]
        assert all(step[place] in shares[owner(place, virtual_ranks)] for place in range(len(step)))


@pytest.mark.parametrize("virtual_ranks", [1, 2, 3, 4, 8])
def test_a_virtual_rank_has_what_distributed_sampler_deals_to_a_rank(virtual_ranks):
    num_samples, batch_size = 48 * virtual_ranks, 4 * virtual_ranks
    steps = [range(first, first + batch_size) for first in range(0, num_samples, batch_size)]
    for v in range(virtual_ranks):
        ours = itertools.chain.from_iterable(step[dealt(v, virtual_ranks)] for step in steps)
        theirs = DistributedSampler(range(num_samples), num_replicas=virtual_ranks, rank=v, shuffle=False)
        assert list(ours) == list(theirs)


@pytest.mark.parametrize("virtual_ranks", range(1, 40))
def test_ranks_have_contiguous_blocks_that_cover_all_virtual_ranks(virtual_ranks):
    for world_size in range(1, virtual_ranks + 1):
        blocks = [rank_block(rank, world_size=world_size, virtual_ranks=virtual_ranks) for rank in range(world_size)]
        assert list(itertools.chain(*blocks)) == list(range(virtual_ranks))
        lengths = {len(block) for block in blocks}
        assert min(lengths) >= 1
        assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("virtual_ranks", range(1, 20))
def test_virtual_ranks_in_turn_are_those_that_ranks_compute_at_the_same_time(virtual_ranks):
    for world_size in range(1, virtual_ranks + 1):
        deal = [
            rank_block(rank, world_size=world_size, virtual_ranks=virtual_ranks, in_turn=True)
            for rank in range(world_size)
        ]
        turns = [[block[turn] for block in deal if turn < len(block)] for turn in range(len(deal[0]))]
        assert list(itertools.chain(*turns)) == list(range(virtual_ranks))
        assert all(len(turn) == world_size for turn in turns[:-1])


@pytest.mark.parametrize(("world_size", "idle"), [(9, "1 rank would be idle"), (12, "4 ranks would be idle")])
def test_more_ranks_than_virtual_ranks_are_refused(world_size, idle):
    with pytest.raises(ValueError, match=f"world_size={world_size} exceeds virtual_ranks=8: {idle}"):
        rank_block(0, world_size=world_size, virtual_ranks=8)


@pytest.mark.parametrize("rank", [-1, 3])
def test_rank_out_of_range_is_named(rank):
    with pytest.raises(ValueError, match=rf"rank={rank} is outside \[0, 3\)"):
        rank_block(rank, world_size=3, virtual_ranks=8)


@pytest.mark.parametrize("ranks", range(1, 6))
@pytest.mark.parametrize("batch_size", range(1, 14))
def test_even_steps_cover_the_epoch_give_every_rank_something_and_go_on_alike_from_any_step(batch_size, ranks):
    if batch_size < ranks:
        return
    for n in range(ranks, 45):
        cut = {"num_samples": n, "batch_size": batch_size, "ranks": ranks}
        steps = [even_range(s, **cut) for s in range(even_steps(n, batch_size, ranks=ranks))]
        assert list(itertools.chain(*steps)) == list(range(n))
        assert all(len(step) == batch_size for step in steps[:-2])
        assert all(len(step) >= ranks for step in steps)
        # What makes BatchNorm fail: one sample on a rank. Only where batches are too small for more.
        if n >= 4 * ranks and batch_size >= 4 * ranks:
            assert all(len(step) >= 2 * ranks for step in steps)
        for number, step in enumerate(steps):
            left = range(even_steps(n, batch_size, ranks=ranks, start=step.start))
            assert [even_range(s, **cut, start=step.start) for s in left] == steps[number:]
