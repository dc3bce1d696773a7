"""trainer.predict: every sample's output once, in the dataset's order, with the same bits on any number of ranks."""

from __future__ import annotations

import json
import struct

import pytest

BITS = """
from torch.utils.data import IterableDataset
from safetensors.torch import load_file
from unisono.state.digest import digest

class Stream(IterableDataset):
    def __iter__(self):
        return ((x, torch.rand(())) for x in data.tensors[0][:37])

def scores(model, batch):
    return model(batch[0])

def several(model, batch):
    logits = model(batch[0])
    noise = F.dropout(logits, training=True) + torch.rand(())
    return {"logits": logits, "top": logits.argmax(1), "noise": noise.double(), "half": logits[:, None].bfloat16(),
            "nothing": logits[:, :0], "yes": logits[:, 0] > 0}

trainer = make_trainer(engine=ENGINE, ema_decay=0.5)
for batch in trainer.batches(data, batch_size=12):
    trainer.step(loss, batch)
model[1].eval()
drawn = torch.rand(1)
found = {}
found["all"] = everywhere = trainer.predict(scores, data, to="all", batch_size=16)
main = trainer.predict(scores, data, batch_size=16)
assert main is None if R else torch.equal(main, everywhere)
torch.testing.assert_close(everywhere, model(data.tensors[0]).detach())
averaged = trainer.predict(scores, data, to="all", batch_size=16, ema=True)
assert not torch.equal(averaged, everywhere)
found["ema"] = averaged
found |= trainer.predict(several, data, to="all", batch_size=13, micro_batch_size=2)
found["tuple"] = trainer.predict(lambda m, b: (m(b[0]), b[1]), Stream(), to="all", batch_size=8)
assert type(found["tuple"]) is tuple and len(found["tuple"][0]) == 37
found["workers"] = trainer.predict(lambda m, b: b[1], Stream(), to="all", batch_size=8, workers=1)
assert torch.equal(found["workers"], found["tuple"][1])
found["complex"] = trainer.predict(lambda m, b: torch.view_as_complex(b[0][:, :2].contiguous()).conj(), data, to="all")
assert torch.equal(found["complex"].imag, -data.tensors[0][:, 1])

pieces = []
for outputs in trainer.predict(scores, data, to="iterator", batch_size=16):
    assert model.training and not model[1].training and torch.is_grad_enabled()
    pieces.append(outputs)
    found[f"drawn {len(pieces)}"] = torch.rand(1)
    if len(pieces) == 1:  # the loop may use the trainer in between
        assert torch.equal(trainer.predict(scores, data, to="all", batch_size=16), everywhere)
assert [len(piece) for piece in pieces] == [16, 16, 16, 12] and torch.equal(torch.cat(pieces), everywhere)
assert not torch.equal(found["drawn 1"], found["drawn 2"])
for outputs in trainer.predict(scores, data, to="iterator", batch_size=16):
    break  # on all ranks alike
for outputs in trainer.predict(scores, data, to="iterator", batch_size=16, workers=1):
    assert torch.equal(outputs, everywhere[:16])
    assert torch.equal(trainer.predict(scores, data, to="all", batch_size=16, workers=1), everywhere)
    break

kept = FOLDER / "new" / "outputs.safetensors"
for name, source in [("whole", data), ("stream", Stream())]:
    written = trainer.predict(several, source, to=kept, batch_size=13, micro_batch_size=2)
    assert written == kept and os.listdir(kept.parent) == ["outputs.safetensors"]
    found[name] = load_file(kept)
    dist.barrier()
assert {name: digest({"": value}) for name, value in found["whole"].items()} == {
    name: digest({"": found[name]}) for name in ("logits", "top", "noise", "half", "nothing", "yes")
}
assert len(found["stream"]["yes"]) == 37
trainer.predict(scores, data, to=str(kept), batch_size=16)
assert torch.equal(load_file(kept)["outputs"], everywhere)
found["after"] = torch.rand(1)
for batch in trainer.batches(data, batch_size=12):
    trainer.step(loss, batch)
say(digest(found), trainer.digest())
"""


@pytest.mark.parametrize(
    ("ranks", "engine"),
    [
        (3, "shared"),
        (2, "collective"),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in [(2, "shared"), (3, "collective")]),
    ],
)
def test_outputs_have_the_same_bits_on_any_number_of_ranks(run_alone, ranks, engine, tmp_path):
    def run(n):
        script = BITS.replace("ENGINE", repr(engine)).replace("FOLDER", f"Path({str(tmp_path / f'{engine}{n}')!r})")
        return run_alone(n, script)

    alone = run(1)
    assert run(ranks) == alone * ranks


CHUNKS = """
import unisono.trainer.prediction as prediction
prediction._CHUNK_NBYTES = 3 * 12 * 12  # three batches of twelve samples
from unisono.state.digest import digest
from safetensors.torch import load_file

rounds = []
trainer = make_trainer()
inner = trainer._run.world.__class__.gather
def gather(world, value, call):
    rounds.append(call)
    return inner(world, value, call)
trainer._run.world.__class__.gather = gather
kept = Path("chunks.safetensors")
trainer.predict(lambda m, b: m(b[0]), data, to=kept, batch_size=12)
say(len([call for call in rounds if call == "trainer.predict"]), digest(load_file(kept)))
"""


def test_outputs_travel_and_are_written_chunk_by_chunk(run_alone, tmp_path, monkeypatch):
    """Opening the file; one batch, whose size decides; three; the last one with the end; the end of the file."""
    monkeypatch.chdir(tmp_path)
    (alone,) = run_alone(1, CHUNKS)
    assert alone.startswith("5 ")
    assert run_alone(2, CHUNKS) == [alone] * 2


def test_a_file_can_be_mapped_by_others(fork_ranks, tmp_path):
    """Its tensors are aligned, wide types first, whatever the length of the header."""
    script = """
import torch, unisono
model = torch.nn.Linear(2, 2)
trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters()), virtual_ranks=2, progress=False)
data = torch.utils.data.TensorDataset(torch.randn(7, 2))
trainer.predict(lambda m, b: {"a": b[0][:, 0] > 0, "b": m(b[0]).double(), "c": m(b[0])}, data, to="x.safetensors")
"""
    monkey = tmp_path / "work"
    monkey.mkdir()
    fork_ranks(1, f"import os; os.chdir({str(monkey)!r})\n{script}")
    content = (monkey / "x.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    assert length % 8 == 0
    assert [header[name]["data_offsets"] for name in "bca"] == [[0, 112], [112, 168], [168, 175]]
    assert len(content) == 8 + length + 175


REFUSED = """
import numpy as np
from torch.utils.data import IterableDataset
from unisono.errors import DataError, PeerError

trainer = make_trainer(engine=ENGINE)

def ragged(model, batch):
    return torch.zeros(len(batch[0]), 2 + int(batch[1][0] == 2))

def failing(model, batch):
    if R == dist.get_world_size() // 2:
        raise KeyError("mine")
    return model(batch[0])

class Unequal(IterableDataset):
    def __iter__(self):
        return ((x,) for x in data.tensors[0][:30 + 5 * R])

class Empty(IterableDataset):
    def __iter__(self):
        return iter(())

functions = {
    "mean": lambda m, b: m(b[0]).mean(),
    "list": lambda m, b: [1.0] * len(b[0]),
    "numpy": lambda m, b: m(b[0]).numpy(),
    "nothing": lambda m, b: None,
    "text": lambda m, b: {"text": "a"},
    "nested": lambda m, b: {"inner": {"x": m(b[0])}},
    "number": lambda m, b: {0: m(b[0])},
    "empty": lambda m, b: {},
    "sparse": lambda m, b: m(b[0]).to_sparse(),
    "ragged": ragged,
    "failing": failing,
    "torchs": lambda m, b: [dist.all_reduce(torch.ones(1)), m(b[0])][1],
    "step": lambda m, b: trainer.predict(lambda m, b: b[0], data),
}
for name, function in functions.items():
    for to in ("main", "iterator", "x.safetensors"):
        try:
            found = trainer.predict(function, data, to=to, batch_size=12)
            list(found) if to == "iterator" else found
        except Exception as error:
            say(name, "|", type(error).__name__, "|", error)
        else:
            say(name, "| was let through")
for name, source in [("empty stream", Empty()), ("no samples", []), ("unequal", Unequal())]:
    try:
        trainer.predict(lambda m, b: b[0], source, to="all", batch_size=12)
    except DataError as error:
        say(name, "| DataError |", error)
    else:
        say(name, "| was let through")
try:
    trainer.predict(lambda m, b: torch.complex(b[0], b[0]), data, to="x.safetensors")
except LossError as error:
    say("complex | LossError |", error)
dist.barrier()  # rank 0 has removed what it began
assert not [name for name in os.listdir() if "safetensors" in name], os.listdir()
assert torch.is_grad_enabled() and model.training
for batch in trainer.batches(data, batch_size=12):
    trainer.step(loss, batch)
say(trainer.digest())
"""

WORDS = {
    "mean": "returned shape [] for a micro-batch of 3 samples; the first dimension must be the samples: [3] or",
    "list": "returned a list of 3 values; put them into one tensor with torch.stack",
    "numpy": "returned a numpy array of shape [3, 3]; leave out .numpy()",
    "nothing": "returned None; return a tensor whose first dimension is the 3 samples",
    "text": "returned a str as its entry 'text'; return a tensor",
    "nested": "returned a dict of 1 values as its entry 'inner'; return a tensor",
    "number": "returned a dict with the key 0: use names as keys",
    "empty": "returned an empty dict; return a tensor",
    "sparse": "of layout torch.sparse_coo: return value.to_dense()",
    "ragged": "and float32[samples, 3] for samples",
    "failing": "mine",
    "torchs": "called 1 collective of torch.distributed",
    "step": "called trainer.predict, in the middle of",
}


@pytest.mark.parametrize(("n", "engine"), [(1, "auto"), (2, "shared"), (3, "collective")])
def test_what_is_refused_is_refused_on_all_ranks_and_the_run_goes_on(run_alone, n, engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    everyone = [said.splitlines() for said in run_alone(n, REFUSED.replace("ENGINE", repr(engine)))]
    assert len({lines[-1] for lines in everyone}) == 1
    for rank, lines in enumerate(everyone):
        for name, words in WORDS.items():
            found = [line.split(" | ") for line in lines if line.startswith(f"{name} | ")]
            assert len(found) == 3
            for _, kind, text in found:
                assert words in text
                if name == "failing":
                    assert kind == ("KeyError" if rank == n // 2 else "PeerError")
        told = {line.split(" | ")[0]: line for line in lines}
        assert "yielded nothing in epoch 0" in told["empty stream"]
        assert "is empty" in told["no samples"]
        assert "cannot hold outputs of type torch.complex64" in told["complex"]
        assert ("rank 1 read" in told["unequal"]) == (n > 1)
        assert sum("let through" in line for line in lines) == (n == 1)  # one rank's stream is like no other


APART = """
from unisono.errors import PeerError, RankMismatchError

trainer = make_trainer(engine=ENGINE)
done = 0
try:
    for outputs in trainer.predict(lambda m, b: m(b[0]), data, to="iterator", batch_size=12):
        done += 1
        if R == 1 and done == 2:
            break
    for batch in trainer.batches(data, batch_size=12):
        trainer.step(loss, batch)
except RankMismatchError as error:
    say(done, error)
try:
    trainer.predict(lambda m, b: m(b[0]), data, to=f"{R}.safetensors")
except RankMismatchError as error:
    say(error)
"""


@pytest.mark.parametrize("engine", ["shared", "collective"])
def test_a_rank_that_leaves_the_iterator_early_is_told_so_with_the_others(run_alone, engine):
    for rank, said in enumerate(run_alone(2, APART.replace("ENGINE", repr(engine)))):
        first, second = said.splitlines()
        assert first.startswith("2 ")
        assert "the next batch of trainer.predict" in first
        assert "trainer.batches()" in first
        assert "to='0.safetensors'" in second, rank
        assert "to='1.safetensors'" in second


FULL = """
import resource
trainer = make_trainer()
Path("there.safetensors").mkdir(exist_ok=True)
for to in ("there.safetensors", "/proc/none/x.safetensors"):
    try:
        trainer.predict(lambda m, b: m(b[0]), data, to=to)
    except Exception as error:
        say(type(error).__name__, "|", error)
Path("old.safetensors").write_text("old") if R == 0 else None
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    trainer.predict(lambda m, b: m(b[0]).repeat(1, 40), data, to="old.safetensors", batch_size=12)
except Exception as error:
    say(type(error).__name__, "|", error)
dist.barrier()
say(Path("old.safetensors").read_text(), [name for name in os.listdir() if name.startswith(".")])
"""


def test_a_file_that_cannot_be_written_is_an_error_on_all_ranks_and_leaves_the_old_one(
    run_alone, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    main, other = (said.splitlines() for said in run_alone(2, FULL))
    assert main[0].startswith("IsADirectoryError | there.safetensors is a folder")
    assert main[2].startswith("OSError | [Errno 27] old.safetensors cannot be written (File too large). Free space")
    for line, theirs in zip(main[:3], other[:3], strict=True):
        kind, text = line.split(" | ")
        assert theirs == f"PeerError | rank 0 failed in trainer.predict: {kind}: {text}"
    assert main[3] == other[3] == "old []"
