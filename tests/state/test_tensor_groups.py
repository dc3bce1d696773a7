"""The tensors of a run that one rank sends to the others, small ones together and large ones alone."""

SCRIPT = """
import torch, unisono
from unisono.collectives.world import World
from unisono.state.tensor_groups import broadcast_groups

job = unisono.init()
world = World.connect(job.device)
generator = torch.Generator().manual_seed(5)
dtypes = [torch.float32, torch.bool, torch.int64, torch.bfloat16, torch.complex64, torch.float64, torch.uint8]
values = {
    f"{dtype} {shape}": torch.randint(0, 2, shape, generator=generator).to(dtype)
    for dtype in dtypes for shape in [(), (0,), (3,), (5, 7), (300, 301)]
}
values["large"] = torch.randn(600, 1000, generator=generator)
values["again"] = values["large"]
groups = {"model": values, "none": {}, "other": {"step": torch.tensor(7.0)}}

def make():
    assert world.rank == 1
    return {"facts": [1, 2]}, groups

document, found = broadcast_groups(world, make, source=1, wanted=world.rank != 2)
assert document == {"facts": [1, 2]}
assert list(found) == ["model", "none", "other"]
if world.rank == 2:
    assert not any(found.values())
else:
    assert list(found["model"]) == list(values)
    for group, tensors in groups.items():
        for name, tensor in tensors.items():
            got = found[group][name]
            assert got.dtype == tensor.dtype and got.shape == tensor.shape and torch.equal(got, tensor), name
    assert found["model"]["again"] is found["model"]["large"]
print("equal")
"""


def test_ranks_receive_what_one_of_them_sends(fork_ranks):
    job = fork_ranks(3, SCRIPT)
    assert [job.lines(rank) for rank in range(3)] == [["equal"]] * 3
