"""A placed model is the same model: outputs, gradients, names, copies, compiled; and says what cannot be placed."""

from __future__ import annotations

import copy
import io
import pickle
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from placed_models import Skips, Toy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import unisono
from unisono.parallel import DataParallel, Pipeline, Whole, cut, place

pytestmark = pytest.mark.usefixtures("one_thread")

CPU, META = torch.device("cpu"), torch.device("meta")
TWICE = MappingProxyType({"net1": "cpu", "net2": "cpu"})


def gradients(model: nn.Module, output: Tensor) -> list[Tensor]:
    model.zero_grad()
    output.square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("split_size", [None, 1 << 40, 4, 3, 9])
def test_a_split_batch_gives_the_bits_of_a_loop_over_its_parts(split_size):
    model, x = Toy(), torch.randn(11, 6)
    plain = copy.deepcopy(model)
    names, parameters = list(model.state_dict()), list(model.parameters())
    place(model, TWICE, split_size=split_size)
    for mode in (True, False):
        torch.manual_seed(3)
        output = model.train(mode)(x)
        torch.manual_seed(3)  # dropout draws what it draws in a loop
        expected = torch.cat([plain.train(mode)(part) for part in x.split(min(split_size or 11, 11))])
        assert torch.equal(output, expected)
        assert equal(gradients(model, output), gradients(plain, expected))
    assert equal(list(model.buffers()), list(plain.buffers()))
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def test_optimizers_clipping_autocast_and_checkpointing_work_as_before():
    models = [Toy(), Toy()]
    models[1].load_state_dict(models[0].state_dict())
    place(models[0], TWICE, split_size=5)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, fused=True) for model in models]
    for _ in range(3):
        x, norms = torch.randn(10, 6), []
        for model, optimizer in zip(models, optimizers, strict=True):
            torch.manual_seed(1)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                if model is models[0]:
                    output = checkpoint(model, x, use_reentrant=False)
                else:
                    output = torch.cat([model(part) for part in x.split(5)])
            assert output.dtype == torch.bfloat16
            output.square().sum().backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
        assert norms[0] == norms[1]
    # Running statistics count the pass of the recomputation, as without place().
    assert equal(list(models[0].parameters()), list(models[1].parameters()))


class Log(nn.Module):
    def __init__(self, name: str, log: list[tuple[str, int]]) -> None:
        super().__init__()
        self.name, self.log = name, log
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.log.append((self.name, int(x[0, 0])))
        return x * self.weight


def test_layers_are_called_in_the_order_of_a_pipeline_by_hand():
    log: list[tuple[str, int]] = []
    first, second = Log("first", log), Log("second", log)
    x = torch.arange(4.0).repeat_interleave(3)[:11, None]

    # As in a ResNet-50 with split_size by hand: the second layer computes a part, then the first one the next part.
    splits = iter(x.split(3))
    result, before = [], first(next(splits))
    for after in splits:
        result.append(second(before))
        before = first(after)
    result.append(second(before))
    by_hand, log[:] = list(log), []

    model = nn.Sequential(first, second)
    place(model, {"0": "cpu", "1": "cpu"}, split_size=3)
    assert torch.equal(model(x), torch.cat(result))
    assert log == by_hand


class Nested(nn.Module):
    """Takes and returns nested values; appends to a list that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), Inner()

    def forward(self, x: Any, seen: list[str], **more: Any) -> Any:
        return self.b(self.a(x["x"]), seen, **more)


@dataclass
class Output:
    value: Tensor
    others: tuple[Tensor, dict[str, Tensor]]
    count: int
    part: Any


class Inner(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor, seen: list[str], **more: Any) -> Output:
        seen.append("called")
        self.got = more
        mask = more["mask"]
        return Output(super().forward(x), (x + mask, {"x": x}), 2, Whole(x))


def test_inputs_and_outputs_are_moved_and_divided_in_nested_values():
    model, seen = Nested(), []
    place(model, {"a": "cpu", "b": "meta"}, split_size=2)
    given = {"mask": Whole(torch.zeros(4)), "pair": (torch.ones(5), [torch.ones(5, 1), None]), "kept": UserDict(k=1)}
    output = model({"x": torch.randn(5, 4)}, seen, **given)
    assert seen == ["called"] * 3  # a list that needs no copy is not copied
    assert model.b.got["pair"][1][0].device == META
    assert model.b.got["pair"][0].shape == (1,)
    assert (output.value.shape, output.others[1]["x"].device, output.count) == ((5, 4), META, 2)
    assert output.part.shape == (2, 4)
    returned = place(model, {"a": "meta", "b": "meta"}, output_device="meta")
    assert returned.devices == [META]


def test_a_packed_sequence_keeps_its_lengths_on_the_cpu():
    model = nn.Sequential(nn.Identity(), nn.LSTM(3, 4))
    place(model, {"1": "meta"})
    packed = nn.utils.rnn.pack_sequence([torch.randn(2, 3), torch.randn(1, 3)])
    output, _ = model(packed)
    assert (output.data.device, output.batch_sizes.device) == (META, CPU)


def test_glue_code_brings_tensors_of_two_devices_together():
    model = Skips()
    placed = place(model, {"": "cpu", "inner.b": "meta", "head": "meta"})
    output = model(torch.randint(0, 16, (2, 5)), extra={"more": [torch.ones(2, 5, 8)]})
    assert {key: output[key].device for key in ("logits", "tied")} == {"logits": META, "tied": META}
    assert output["others"][1][0].device == CPU
    assert placed.layers == {"embed": CPU, "inner.a": CPU, "inner.b": META, "head": META}
    with pytest.raises(RuntimeError, match="meta"):
        torch.ones(2) + output["logits"].new_ones(2)  # outside of the model, nothing is moved


def test_a_layer_that_fails_leaves_no_trace():
    model = Skips()
    place(model, {"": "cpu", "head": "meta"})
    tokens = torch.randint(0, 16, (2, 5))
    model.inner["b"].register_forward_hook(fail := lambda *_: (_ for _ in ()).throw(KeyError("hook")))
    with pytest.raises(KeyError, match="hook"):
        model(tokens)
    model.inner["b"]._forward_hooks.popitem()
    del fail
    assert not torch.overrides._get_current_function_mode_stack()
    assert model(tokens)["logits"].device == META


def test_copies_and_pickles_are_placed_and_their_own():
    model = Toy()
    model.eval()
    placed = place(model, {"net1": "cpu", "net2": "cpu"}, split_size=3)
    x = torch.randn(7, 6)
    expected = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        copy.copy(model),
        torch.load(file, weights_only=False),
        torch.optim.swa_utils.AveragedModel(model).module,
    ]
    for each in copies:
        assert isinstance(each, Toy)
        assert torch.equal(each(x), expected)
    with torch.no_grad():
        copies[0].net1.weight.zero_()
    assert torch.equal(model(x), expected)
    copies[0].to("meta")
    assert copies[0](x).device == META
    assert model(x).device == CPU
    assert repr(placed) == "PlacedModel(net1: cpu, net2: cpu)"
    assert repr(model) == repr(Toy().eval())


def test_a_model_is_placed_anew_and_becomes_an_ordinary_one():
    model = Toy()
    before = set(vars(model))
    first = place(model, {"net1": "cpu", "net2": "cpu"}, split_size=3)
    second = place(model, {"": "cpu", "net2.0": "cpu"})
    first.remove()  # of an earlier placement: nothing
    assert (second.split_size, list(second.layers)) == (None, ["net1", "net2.0", "net2.1"])
    assert len(model.net1._forward_pre_hooks) == 1
    assert not model.net2._forward_pre_hooks
    second.remove()
    second.remove()
    assert type(model) is Toy
    assert set(vars(model)) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    moved = place(model, {"net1": "cpu", "net2": "meta"})
    model.to("meta")
    assert moved.layers == {"net1": META, "net2": META}
    assert model.half()(torch.ones(2, 6, dtype=torch.half)).device == META


COMPILED = f"""
import functools, sys, warnings; sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from placed_models import Toy
from unisono.parallel import place

warnings.simplefilter("error")
warnings.filterwarnings("ignore", "The .grad attribute")  # that the compiler reads of the inputs of a layer
compiled = functools.partial(torch.compile, backend="eager")
for how in sys.argv[1:]:
    torch.manual_seed(0)
    model, x = Toy().eval(), torch.randn(4, 6)
    expected = torch.cat([model(part) for part in x.split(2)])
    place(model, {{"net1": "cpu", "net2": "cpu"}}, split_size=2)
    called = compiled(model) if how == "whole" else model
    if how == "method":
        model.compile(backend="eager")
    elif how == "layer":
        model.net2.compile(backend="eager")
    equal = [torch.equal(called(x), expected)]
    with torch.no_grad():
        equal.append(torch.equal(called(x), expected))
    print(how, equal)
try:
    place(compiled(Toy()), {{"": "cpu"}})
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("ways", [("whole", "layer"), pytest.param(("method",), marks=pytest.mark.soak)])
def test_placed_models_can_be_compiled_and_compiled_ones_not_placed(fork_python, tmp_path, ways):
    (script := tmp_path / "compiled.py").write_text(COMPILED)
    *same, refused = fork_python(script, *ways)
    assert same == [f"{how} [True, True]" for how in ways]
    assert "the model is compiled to one program" in refused


def test_users_hooks_see_whole_batches():
    model, seen = Toy(), []
    place(model, TWICE, split_size=2)
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    model.register_forward_hook(lambda *args: seen.append(args[2].shape[0]))
    model(torch.randn(5 + 1, 6))
    assert seen == [6, 6]


def shared(model: nn.Module) -> nn.Module:
    model[2].weight = model[0].weight
    return model


def linears(count: int = 3) -> nn.Module:
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)])


TIED = linears()
shared(TIED)
ONE = nn.Linear(4, 4)

REFUSALS: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "unknown name": (linears, {"4": "cpu"}, {}, "'4' is to be placed, which is not a submodule of the model"),
    "nearest name": (Toy, {"net_1": "cpu"}, {}, "; did you mean 'net1'?"),
    "outside": (Toy, {"net1": "cpu"}, {}, r"'net2\.0\.weight': no device is given for it\. Name the module"),
    "own parameter": (Skips, {"embed": "cpu", "inner": "cpu", "head": "cpu"}, {}, "'position', 'scale': no device"),
    "no such device": (Toy, {"net1": "cpu", "net2": "cuda:7"}, {}, "cuda:7 is not there: this process has 0 devices"),
    "unknown device": (Toy, {"": "gpu"}, {}, "'gpu' is no device that torch knows"),
    "other device": (Toy, {"": "hpu"}, {}, "hpu is not there: this torch has no support for hpu"),
    "output device": (Toy, {"": "cpu"}, {"output_device": "cuda:9"}, "cuda:9 is not there"),
    "no name": (Toy, {3: "cpu"}, {}, "devices has the key 3, an int"),
    "no device": (Toy, {"": None}, {}, "None is a NoneType: give a device"),
    "empty": (Toy, {}, {}, "devices is empty"),
    "empty list": (Toy, [], {"by": "time"}, "devices is empty"),
    "a text": (Toy, "cuda:0", {}, "devices='cuda:0' is a str"),
    "not by": (Toy, ["cpu", "cpu"], {}, 'a list of devices needs by="memory" or by="time"'),
    "wrong by": (Toy, ["cpu", "cpu"], {"by": "size"}, "by='size' must be one of 'memory', 'time'"),
    "by and names": (Toy, {"": "cpu"}, {"by": "time"}, "by= is for a list of devices"),
    "inputs and names": (Toy, {"": "cpu"}, {"inputs": ()}, "inputs= is for a list of devices"),
    "no inputs": (Toy, ["cpu", "cpu"], {"by": "time"}, "give the arguments of a forward pass as inputs="),
    "a tensor": (Toy, ["cpu"], {"by": "time", "inputs": torch.ones(2)}, "inputs is a Tensor: give a tuple"),
    "memory": (Toy, ["cpu"], {"by": "memory", "memory_gib": -1}, "memory_gib=-1 must be positive"),
    "memories": (Toy, ["cpu"], {"by": "memory", "memory_gib": [1, 2]}, "2 numbers for 1 devices"),
    "too many": (linears, ["cpu"] * 4, {"by": "memory"}, "4 devices need 4 places at which one may begin, and the"),
    "split_size": (Toy, {"": "cpu"}, {"split_size": 0}, "split_size=0 must be at least 1"),
    "split type": (Toy, {"": "cpu"}, {"split_size": "8"}, "split_size='8' must be a whole number"),
    "tied": (
        lambda: TIED,
        {"": "cpu", "2": "meta"},
        {},
        r"'0\.weight' and '2\.weight' are one tensor, .* cpu and meta",
    ),
    "one module": (lambda: nn.Sequential(ONE, ONE), {"0": "cpu", "1": "meta"}, {}, "'0' and '1' are one module"),
    "no values": (
        lambda: linears().to("meta"),
        {"": "cpu"},
        {},
        r"'0\.weight' is on the meta device and has no values",
    ),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), {"": "cpu"}, {}, r"'0\.weight' has no size yet"),
    "wrapped": (lambda: nn.DataParallel(Toy()), {"": "cpu"}, {}, r"wrapped in DataParallel: give place\(\) the module"),
    "no module": (lambda: 3, {"": "cpu"}, {}, r"model is an int: give place\(\) a torch.nn.Module"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_placed_is_refused_before_anything_moves(case):
    make, devices, options, message = REFUSALS[case]
    model = make()
    kind = type(model)
    with pytest.raises((ValueError, TypeError), match=message):
        place(model, devices, **options)
    assert type(model) is kind
    if isinstance(model, nn.Module):
        assert not any(module._forward_pre_hooks for module in model.modules() if not isinstance(module, nn.LazyLinear))
        assert len({parameter.device for parameter in model.parameters()}) == 1


def test_parts_of_placed_models_and_patched_ones_are_refused():
    outer = nn.Sequential(Toy(), nn.ReLU())
    place(outer[0], {"": "cpu"})
    with pytest.raises(ValueError, match=r"'0' has been placed on its own: remove\(\) that before"):
        place(outer, {"": "cpu"})
    model = Toy()
    place(model, {"": "cpu", "net2": "cpu"})
    with pytest.raises(ValueError, match="a part of one that has been placed"):
        place(model.net2, {"": "cpu"})
    model = Toy()
    model.forward = model.forward
    with pytest.raises(ValueError, match="another forward in the object"):
        place(model, {"": "cpu"})
    with pytest.raises(TypeError, match="model = place"):
        place(Toy(), {"": "cpu"})(torch.ones(2, 6))


class Returns(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x: {"loss": x.sum()},
            r"output\['loss'\] has no dimensions, in each of 3 micro-batches of 2, 2, 1 samples",
        ),
        (len, "output differs between micro-batches: 2 in micro-batch 0, 2 in micro-batch 1, 1 in"),
        (lambda x: [x] * len(x), "output has another structure in some micro-batches"),
        (lambda x: x.T, r"output cannot be concatenated along dimension 0: its shapes are \[4, 2\] in micro-batch 0"),
        (lambda x: x.new_ones(3, 3), "output has 3, 3, 3 rows in micro-batches of 2, 2, 1 samples"),
    ],
)
def test_outputs_that_cannot_be_joined_are_refused(function, message):
    model = nn.Sequential(Returns(function))
    place(model, {"": "cpu"}, split_size=2)
    with pytest.raises(ValueError, match=message):
        model(torch.ones(5, 4))
    assert model(torch.ones(2, 4)) is not None  # one micro-batch


def test_inputs_of_unequal_sizes_are_refused():
    model = Nested()
    place(model, {"": "cpu"}, split_size=2)
    with pytest.raises(ValueError, match=r"input\[0\]\[0\]\['x'\] has 5 samples .* input\[1\]\['mask'\] has 4"):
        model({"x": torch.ones(5, 4)}, [], mask=torch.ones(4))


def test_values_do_not_come_back_from_the_meta_device():
    model = linears()
    place(model, {"": "cpu", "1": "meta"})
    with pytest.raises(ValueError, match=r"a layer on cpu gets a tensor of shape \[2, 4\] from the meta device"):
        model(torch.ones(2, 4))


def test_pipelines_and_data_parallel_refuse_placed_models():
    model = linears()
    placed = place(model, {"": "cpu", "1": "cpu"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"DataParallel copies a model to other devices, and place\(\) has put layers"):
        DataParallel(model, ["cpu", "cpu"])
    with pytest.raises(ValueError, match=r"cut\(\) runs a model with one stage on each rank, and place\(\)"):
        cut(model, Pipeline(stages=["1"]))
    with pytest.raises(
        ValueError, match=r"parallel=Pipeline\(...\) runs a model with one stage on each rank, and place"
    ):
        unisono.Trainer(model, optimizer, virtual_ranks=1, parallel=Pipeline(stages=["1"]))
    placed.remove()
    assert cut(model, Pipeline(stages=["1"])).has_last_stage
