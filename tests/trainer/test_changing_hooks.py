"""Hooks of optimizers that change gradients, which depends on the number of ranks: refused, on any number."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import TensorDataset

import unisono
from unisono.errors import UnisonoError

CHANGES = {
    "scale": "p.grad.mul_(0.5)",
    "replace": "p.grad = p.grad / 2",
    "drop": "p.grad = None",
    "clip": "torch.nn.utils.clip_grad_norm_([p], 1e-3)",
}
REFUSED = (
    r"a hook of {} has changed the gradient of '{}' before its step: .*change.*\. What it changes on several ranks"
)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model, optimizer, **options):
    data = TensorDataset(torch.randn(24, 6), torch.arange(24) % 3)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, progress=False)
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(loss, batch, **options)


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_hook_that_changes_a_gradient_is_refused_before_weights_are_written(change):
    model = make_model()
    before, p = weights_of(model), model[2].weight

    def change_it(*_):
        exec(change, {"torch": torch, "p": p})

    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(change_it)
    with pytest.raises(UnisonoError, match=REFUSED.format("AdamW", "2.weight")):
        train(model, optimizer)
    assert all(map(torch.equal, before, weights_of(model)))
    assert change_it in optimizer._optimizer_step_pre_hooks.values()
    assert not any("_ChangedGradients" in type(each).__name__ for each in optimizer._optimizer_step_pre_hooks.values())


def test_a_hook_of_all_optimizers_is_refused_as_well():
    model = make_model()

    def change(*_):
        model[0].bias.grad.zero_()

    handle = register_optimizer_step_pre_hook(change)
    try:
        with pytest.raises(UnisonoError, match=REFUSED.format("SGD", "0.bias")):
            train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    finally:
        handle.remove()


def test_each_of_several_optimizers_is_looked_at():
    model = make_model()
    optimizers = {
        "first": torch.optim.AdamW(model[0].parameters()),
        "last": torch.optim.SGD(model[2].parameters(), lr=0.1),
    }

    def change(*_):
        model[2].bias.grad.mul_(2.0)

    optimizers["last"].register_step_pre_hook(change)
    with pytest.raises(UnisonoError, match=REFUSED.format("SGD", "2.bias")):
        train(model, optimizers)


def test_a_hook_before_a_step_with_a_closure_is_refused():
    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    before = weights_of(model)

    def change(*_):
        model[0].weight.grad.neg_()

    optimizer.register_step_pre_hook(change)
    with pytest.raises(UnisonoError, match=REFUSED.format("LBFGS", "0.weight")):
        train(model, optimizer)
    assert all(map(torch.equal, before, weights_of(model)))


def test_hooks_that_read_and_functions_that_may_change_go_on():
    model, seen = make_model(), []
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: seen.append(model[0].weight.grad.norm().item()))
    train(model, optimizer, on_gradients=lambda model: model[0].weight.grad.mul_(0.5))
    assert len(seen) == 2
    assert all(seen)


MODES = {
    "shared": ("", "engine='shared'"),
    "collective": ("", "engine='collective'"),
    "fp16": ("", "autocast='fp16'"),
    "stages": ("", "engine='auto', parallel=unisono.parallel.Pipeline(stages=['2'])"),
}
SCRIPT = """
def change(*_):
    for p in model.parameters():
        if p.grad is not None:
            {change}
if R in {ranks}:
    optimizer.register_step_pre_hook(change)
trainer = make_trainer({options})
try:
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(loss, batch)
    say(trainer.digest())
except UnisonoError as error:
    say(type(error).__name__, error)
    os._exit(0)
"""


def soak(value):
    return pytest.param(value, marks=pytest.mark.soak)


@pytest.mark.parametrize("mode", ["shared", "collective", soak("fp16"), soak("stages")])
def test_a_hook_that_changes_gradients_is_refused_on_several_ranks(run_alone, mode):
    said = run_alone(2, SCRIPT.format(change="p.grad.mul_(0.5)", ranks=(0, 1), options=MODES[mode][1]))
    refused = [text for text in said if "a hook of AdamW has changed the gradient of" in text]
    assert refused, said
    assert all(text in refused or text.startswith("PeerError") for text in said)


@pytest.mark.parametrize("mode", ["shared", soak("collective"), soak("fp16"), soak("stages")])
def test_a_hook_of_one_rank_alone_that_reads_changes_nothing(run_alone, mode):
    options = MODES[mode][1]
    plain = run_alone(1, SCRIPT.format(change="pass", ranks=(), options=options))
    assert run_alone(2, SCRIPT.format(change="p.grad.norm().item()", ranks=(1,), options=options)) == plain * 2


def test_a_hook_of_one_rank_alone_that_changes_gradients_ends_the_others_where_weights_are_shared(run_alone):
    said = run_alone(2, SCRIPT.format(change="p.grad = p.grad * 2", ranks=(1,), options="engine='shared'"))
    assert "a hook of AdamW has changed the gradient of '0.weight' before its step: change." in said[1]
    assert said[0].startswith("PeerError")


@pytest.mark.parametrize("options", ["by=['0', '2']", soak("zero=1")])
def test_hooks_that_find_no_gradients_in_shards_are_warned_of_once(run_alone, options):
    shard = f"engine='auto', parallel=unisono.parallel.Shard({options})"
    script = SCRIPT.format(change="1 / 0", ranks=(0, 1), options=shard)
    said = run_alone(2, f"import io\nsys.stderr = io.StringIO()\n{script}\nsay(sys.stderr.getvalue())")
    warning = "hooks that run before the step of an optimizer find no gradients here"
    assert [text.count(warning) for text in said] == [1, 0]
