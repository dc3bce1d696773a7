"""Weights that a loop or a hook writes, where several ranks have copies: the same ones on all, or an error on all."""

import pytest

LAYOUTS = {
    "replicas": (2, "engine='collective'"),
    "zero=1": (2, "engine='auto', parallel=unisono.parallel.Shard(zero=1)"),
    "stages": (4, "engine='auto', parallel=unisono.parallel.Pipeline(stages=['2'])"),
    "stages, zero=1": (4, "engine='auto', parallel=unisono.parallel.Pipeline(stages=['2'], zero=1)"),
}
SCRIPT = """
def write(*_):
    with torch.no_grad():
        for p in model.parameters():
            if p.numel() == 1 or any(p.stride()):  # this rank has it
                p.mul_(0.9)
if R in {hooks}:
    optimizer.register_step_post_hook(write)
if R in {readers}:
    optimizer.register_step_post_hook(lambda *_: None)
trainer = make_trainer({options})
try:
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(loss, batch)
        if trainer.steps_done == 2 and R in {writers}:
            write()
    say(trainer.digest())
except UnisonoError as error:
    say(type(error).__name__, trainer.steps_done, error)
    os._exit(0)
"""


def script(layout, *, writers=(), hooks=(), readers=()):
    return SCRIPT.format(options=LAYOUTS[layout][1], writers=writers, hooks=hooks, readers=readers)


def soak(*values):
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("layout", "writer"),
    [
        ("zero=1", 0),
        ("stages", 3),
        soak("replicas", 1),
        soak("zero=1", 1),
        soak("stages", 0),
        soak("stages, zero=1", 0),
        soak("stages, zero=1", 3),
    ],
)
def test_weights_that_one_rank_alone_writes_are_an_error_on_all(run_alone, layout, writer):
    said = run_alone(LAYOUTS[layout][0], script(layout, writers=(writer,)))
    told = "RankMismatchError 2 ranks differ: weights differ at number 0: '"
    assert all(text.startswith(told) and f"on rank {writer}" in text for text in said), said


@pytest.mark.parametrize("layout", ["zero=1", "stages", soak("replicas"), soak("stages, zero=1")])
def test_weights_that_all_ranks_write_are_those_of_one_rank(run_alone, layout):
    n, _ = LAYOUTS[layout]
    ranks = tuple(range(n))
    assert run_alone(n, script(layout, writers=ranks)) == run_alone(1, script(layout, writers=ranks)) * n


@pytest.mark.parametrize("layout", ["replicas", soak("zero=1")])
def test_a_hook_after_the_step_that_writes_weights_on_one_rank_alone_is_found(run_alone, layout):
    ranks = (0, 1)
    assert run_alone(2, script(layout, hooks=ranks)) == run_alone(1, script(layout, hooks=ranks)) * 2
    said = run_alone(2, script(layout, hooks=(1,)))
    assert all(text.startswith("RankMismatchError 1 ranks differ: weights differ at number 0: ") for text in said)


@pytest.mark.parametrize("layout", ["replicas", soak("stages")])
def test_a_hook_after_the_step_of_one_rank_alone_that_writes_nothing_is_none_of_it(run_alone, layout):
    n, _ = LAYOUTS[layout]
    assert run_alone(n, script(layout, readers=(1,))) == run_alone(1, script(layout)) * n


@pytest.mark.parametrize("writers", [(2,), (0, 1, 2, 3), soak((0,))])
def test_buffers_of_a_stage_that_not_all_replicas_write_are_an_error_on_all(run_alone, writers):
    scaled = """
class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(6, 8)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
    def forward(self, x):
        return super().forward(x) * self.scale
model = nn.Sequential(Scaled(), nn.BatchNorm1d(8), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
"""
    text = script("stages", writers=writers).replace("write()", "(model[0].scale.mul_(0.5), model[0].cache.add_(R))")
    said = run_alone(4, scaled + text)
    if len(writers) == 4:
        assert said == run_alone(1, scaled + text) * 4
    else:
        told = "RankMismatchError 2 ranks differ: buffers differ at number 0: '0.scale = "
        assert all(text.startswith(told) and "' on rank 0 and '" in text and "on rank 2" in text for text in said), said
