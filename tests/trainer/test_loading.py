"""Weights alone, from and into files: the same on any number of ranks, and nothing is changed by what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.errors import CheckpointError
from unisono.trainer.weight_loading import match

PROGRAM = Path(__file__).parent / "programs" / "loading.py"
DATA = TensorDataset(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))


def test_weights_are_loaded_and_exported_alike_on_any_number_of_ranks(fork_ranks, tmp_path):
    said = {}
    for n, engine in ((1, "auto"), (2, "collective"), (3, "shared")):
        folder = tmp_path / f"{n}-{engine}"
        folder.mkdir()
        job = fork_ranks(n, PROGRAM, folder, engine)
        common = [line for line in job.lines() if not line.startswith("0 ")]
        said[n, engine] = [line.replace(str(folder), "") for line in common]
        for rank in range(n):
            own = [line for line in job.lines(rank) if line.startswith(f"{rank} ")]
            assert [line.split()[1] for line in own] == ["told:", "told:"] + ["differ:"] * (4 if n > 1 else 0)
            assert [line.partition("told: ")[2] for line in own[:2]] == [
                "the weights were not written",
                "the checkpoint of step 10, tagged 'blocked', was not written",
            ]
    alone = said[1, "auto"]
    for ranks, lines in said.items():
        assert lines == alone, ranks
    told = "\n".join(alone)
    assert "run step-000000005 [] []" in told
    assert "some.safetensors some.safetensors ['norm.weight', 'norm.bias', 'norm.running_mean'] ['head.weight']" in told
    assert "first.weight is float32[8, 7] there and float32[8, 6] here" in told
    assert "of its tensors and the model's, 9 are not in it (norm.weight, " in told
    assert "1 are in it only (head.weight)" in told
    assert "/nothing cannot be read: [Errno 2]" in told
    assert "It has the entries 'model', 'epoch'. If the weights are one of them, name it, as by key=\"model\"." in told
    assert "ema=True is for checkpoints" in told


class Odd(nn.Module):
    """A model with a buffer that is None at first, one that is not saved, and state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.register_buffer("late", None)
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.count = 0

    def forward(self, x):
        return self.net(x)

    def get_extra_state(self):
        return {"count": self.count}

    def set_extra_state(self, state):
        self.count = state["count"]


def trainer_of(models, **options):
    parameters = models.parameters() if isinstance(models, nn.Module) else next(iter(models.values())).parameters()
    options = {"virtual_ranks": 2, "progress": False, **options}
    return unisono.Trainer(models, torch.optim.SGD(parameters, lr=0.1), **options)


def test_what_torch_saves_of_an_odd_model_is_loaded_and_what_is_exported_torch_loads(tmp_path):
    model = Odd()
    model.late, model.count = torch.ones(3), 7
    torch.save(model.state_dict(), tmp_path / "odd.pt")
    trainer = trainer_of(Odd())
    trainer.load(tmp_path / "odd.pt")
    assert torch.equal(trainer.model.late, torch.ones(3))
    assert torch.equal(trainer.model.net.weight, model.net.weight)
    assert trainer.model.count == 0  # no weight
    trainer.model.count = 3
    trainer.export(tmp_path / "again.pt")
    model.load_state_dict(torch.load(tmp_path / "again.pt", weights_only=True))
    assert model.count == 3


def test_several_models_have_their_key_in_front_or_a_dict_each(tmp_path):
    def models():
        return {"generator": nn.Linear(4, 2), "judge": nn.Linear(4, 2)}

    source = models()
    torch.save({name: model.state_dict() for name, model in source.items()}, tmp_path / "both.pt")
    trainer = trainer_of(models())
    assert trainer.load(tmp_path / "both.pt")[1:] == ([], [])
    assert torch.equal(trainer.model["judge"].weight, source["judge"].weight)
    trainer.export(tmp_path / "both.safetensors")
    other = trainer_of(models())
    other.load(tmp_path / "both.safetensors")
    assert other.digest() == trainer.digest()
    with pytest.raises(CheckpointError, match=r"has none of the model's 2 tensors: it has generator\.bias, .*with sev"):
        trainer_of(nn.Linear(4, 2)).load(tmp_path / "both.safetensors")


class Bomb:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_nothing_in_a_file_is_executed_and_what_is_none_is_named(tmp_path):
    trainer = trainer_of(nn.Linear(4, 2))
    digest = trainer.digest()
    torch.save({"weight": torch.ones(2, 4), "bias": Bomb(tmp_path / "fired")}, tmp_path / "bomb.pt")
    torch.save(nn.Linear(4, 2), tmp_path / "module.pt")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    torch.save({"weight": torch.ones(2, 4), "bias": torch.ones(2).to_sparse()}, tmp_path / "sparse.pt")
    torch.save({"weight": torch.ones(2, 4), "bias": torch.ones(2) * 1j}, tmp_path / "complex.pt")
    whole = (tmp_path / "list.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.pt").write_text("hello, I am no file of weights")
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    for name, words in {
        "bomb.pt": "no code in a file is executed here",
        "module.pt": r"it names torch\.nn\.modules\.linear\.Linear",
        "list.pt": "holds a list; expected tensors by name, a state_dict",
        "sparse.pt": "'bias' .* its layout is torch.sparse_coo",
        "complex.pt": r"bias is complex64\[2\] there and float32\[2\] here",
        "half.pt": "looks like a file of torch.save, but torch cannot read it",
        "text.pt": r"\(30 bytes\) is neither a safetensors file nor one of torch.save",
        "empty.safetensors": r"\(0 bytes\) is neither",
        "folder": "holds no checkpoint: give the directory of a run",
    }.items():
        with pytest.raises(CheckpointError, match=words):
            trainer.load(tmp_path / name)
    assert not (tmp_path / "fired").exists()
    assert trainer.digest() == digest


def test_a_damaged_checkpoint_is_not_loaded_and_of_a_run_the_one_before_it(tmp_path):
    trainer = trainer_of(nn.Linear(4, 2), directory=tmp_path / "run")
    weights = []
    for _ in trainer.epochs(2):
        for batch in trainer.batches(DATA, batch_size=4):
            trainer.step(lambda model, batch: model(batch[0]).square().sum(1), batch)
        weights.append(trainer.model.weight.detach().clone())
    newest = tmp_path / "run" / "checkpoints" / "step-000000004"
    content = bytearray((newest / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (newest / "model.safetensors").write_bytes(content)
    events = []
    other = trainer_of(nn.Linear(4, 2), listeners=[events.append])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected sha256"):
        other.load(newest)
    assert other.load(tmp_path / "run").source.endswith("step-000000002")
    assert torch.equal(other.model.weight, weights[0])
    (warning,) = [event["message"] for event in events if event["event"] == "warning"]
    assert "Loading from step 2 instead." in warning
    copied = (newest.parent / "step-000000002").rename(tmp_path / "mine")
    other.load(copied)


def test_a_script_that_loads_at_each_start_does_not_overwrite_a_resumed_run(tmp_path):
    torch.save(nn.Linear(4, 2).state_dict(), tmp_path / "pretrained.pt")

    def start():
        return trainer_of(nn.Linear(4, 2), directory=tmp_path / "run")

    def train(trainer, epochs):
        for _ in trainer.epochs(epochs):
            for batch in trainer.batches(DATA, batch_size=4):
                trainer.step(lambda model, batch: model(batch[0]).square().sum(1), batch)

    first = start()
    first.load(tmp_path / "pretrained.pt")
    train(first, 1)
    second = start()
    with pytest.raises(ValueError, match=r"goes on after step 2, and .* load before the first step only: `if not trai"):
        second.load(tmp_path / "pretrained.pt")
    assert second.digest() == first.digest()
    second.load(tmp_path / "run")  # its own are allowed
    assert second.digest() == first.digest()
    train(second, 2)
    second.load(tmp_path / "pretrained.pt")  # and so is everything once it has gone on


def test_loading_before_the_first_step_starts_the_average_there_too(tmp_path):
    torch.save({"weight": torch.ones(2, 4), "bias": torch.ones(2)}, tmp_path / "ones.pt")
    trainer = trainer_of(nn.Linear(4, 2), ema_decay=0.5)
    trainer.load(tmp_path / "ones.pt")
    ones = trainer.evaluate(lambda model, batch: model.bias.sum().expand(len(batch[0])), DATA, ema=True)
    assert ones == 2.0


def test_a_write_between_steps_is_found_before_a_load(run_alone, tmp_path):
    script = f"""
trainer = make_trainer()
path = {str(tmp_path)!r} + "/a.safetensors"
for batch in trainer.batches(data, batch_size=12):
    trainer.step(loss, batch)
    if batch.step == 0:
        trainer.export(path)
        trainer.load(path)
    if batch.step == 2:
        if R:
            with torch.no_grad():
                model[2].bias.mul_(0.5)
        dist.barrier()
        before = trainer.digest()
        try:
            trainer.load(path)
        except UnisonoError as error:
            say(error, trainer.digest() == before)
        break
"""
    for said in run_alone(2, script):
        assert said.startswith("parameter '2.bias' was written to between two steps")
        assert said.endswith("True\n")


def test_match_is_exact():
    own = {"a": torch.ones(2), "b": torch.ones(3)}
    tied = {**own, "c": own["a"]}
    assert match(tied, {"a": own["a"], "b": own["b"].double()}, strict=True, where="x") == (["a", "b"], [], [])
    with pytest.raises(CheckpointError, match=r"1 are not in it \(b\); 1 are in it only \(d\)"):
        match(own, {"a": own["a"], "d": own["a"]}, strict=True, where="x")
    assert match(own, {"a": own["a"], "d": own["a"]}, strict=False, where="x") == (["a"], ["b"], ["d"])


@pytest.mark.parametrize("incremental", [None, True])
def test_files_of_a_model_without_tables_are_complete_unless_asked_otherwise(tmp_path, incremental):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 300_000), nn.Linear(300_000, 2))
    model[0].requires_grad_(False)
    trainer = unisono.Trainer(
        model,
        torch.optim.SGD(model[1].parameters(), lr=0.1),
        virtual_ranks=1,
        directory=tmp_path,
        checkpoints=unisono.Checkpoints(incremental=incremental),
        progress=False,
    )
    for _ in trainer.epochs(2):
        for batch in trainer.batches(DATA, batch_size=8):
            trainer.step(lambda model, batch: model(batch[0]).square().mean(1), batch)
    newest = max((tmp_path / "checkpoints").glob("step-*")) / "model.safetensors"
    assert ("0.weight~rows" in load_file(newest)) == bool(incremental)
    assert load_file(newest)["0.weight"].shape == ((0, 4) if incremental else (300_000, 4))
