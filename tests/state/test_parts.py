"""Checkpoints that several processes write, each a part, and of which parts are read."""

import os
import random
import signal
import time

import pytest
import torch
from checkpoint_contents import assert_equal, flip
from safetensors.torch import load_file

from unisono.errors import CheckpointError, CorruptCheckpointError
from unisono.state.part_plan import Claim, even_claims, plan_parts
from unisono.state.part_writing import FileRange, PartsError, PartWriter, await_parts
from unisono.state.tensor_file import TensorFile, TensorRange

CUT = 400_000
RANKS = 3


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(1000, 900, generator=generator),
        "b": torch.arange(7, dtype=torch.float64),
        "c": torch.tensor([1 + 2j, 3j]),
        "n": torch.arange(5, dtype=torch.int16).view(torch.bfloat16),
        "none": torch.empty(0),
    }


def claims(rank):
    """What a rank has: "w" is cut in three, and all have "b"."""
    own = {0: [Claim("w", 0, CUT), Claim("c", 0, 2)], 1: [Claim("w", CUT, 2 * CUT)], 2: [Claim("w", 2 * CUT, 900_000)]}
    return [*own[rank], Claim("b", 0, 7), *([Claim("n", 0, 5)] if rank == 2 else [])]


def plan():
    return plan_parts("model", tensors(), {"tied": "w"}, [claims(rank) for rank in range(RANKS)])


def ranges(rank):
    made, values = plan(), tensors()
    parts = [
        FileRange("model.safetensors", at, values[each.name].view(-1)[each.start : each.stop])
        for each, at in made.starts[rank].items()
    ]
    return parts if rank else [FileRange("model.safetensors", 0, made.layout.header), *parts]


def write(store, others, step=1):
    """Write a checkpoint as rank 0 does, while forked processes do what `others` say for their rank."""
    work = store.begin_parts(step)
    started, go = os.pipe()
    children = []
    for rank in range(1, RANKS):
        child = os.fork()
        if not child:
            status = 1
            try:
                writer = PartWriter(work.path, rank)
                os.write(go, b".")
                others(rank, writer)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    writer = PartWriter(work.path, 0)
    for _ in children:
        assert os.read(started, 1) == b"."
    try:
        other = {"other": {"step": torch.tensor(3.0)}}
        return store.write_parts(work, writer, ranges(0), plans={"model": plan()}, groups=other, document={"epoch": 1})
    finally:
        for child in children:
            os.waitpid(child, 0)
        os.close(started)
        os.close(go)


def write_own(rank, writer):
    writer.write(ranges(rank), {"model.safetensors": plan().layout})


@pytest.fixture
def written(store):
    return write(store, write_own)


def test_parts_of_processes_are_one_plain_file(store, written):
    assert sorted(path.name for path in written.path.iterdir()) == [
        "manifest.json", "model.safetensors", "other.safetensors", "state.json",
    ]  # fmt: skip
    store.verify(written)
    loaded = store.load(written)
    assert loaded.document == {"epoch": 1}
    assert_equal(loaded.groups["model"], tensors())
    assert_equal(loaded.groups["other"], {"step": torch.tensor(3.0)})
    assert torch.equal(load_file(written.path / "model.safetensors")["w"], tensors()["w"])


@pytest.mark.parametrize("by_parts", [True, False])
def test_ranges_are_read_into_memory_that_is_there(store, written, by_parts):
    info = written if by_parts else store.write(2, {"model": tensors()}, {"epoch": 1})
    checkpoint = store.open(info)
    assert checkpoint.document() == {"epoch": 1}
    file, values = checkpoint.group("model"), tensors()
    assert {name: (form.dtype, form.shape) for name, form in file.forms.items()} == {
        name: (value.dtype, value.shape) for name, value in values.items()
    }
    spans = [("w", CUT - 5, 10), ("w", 899_999, 1), ("b", 2, 3), ("c", 1, 1), ("n", 0, 5), ("w", 0, 2 * CUT)]
    places = [torch.empty(length, dtype=values[name].dtype) for name, _, length in spans]
    file.read(TensorRange(name, start, into) for (name, start, _), into in zip(spans, places, strict=True))
    for (name, start, length), found in zip(spans, places, strict=True):
        assert_equal({name: found}, {name: values[name].view(-1)[start : start + length]})
    with pytest.raises(ValueError, match=r"10 elements of torch\.float32 from 899995 on are not in w"):
        file.read([TensorRange("w", 899_995, torch.empty(10))])


def test_a_damaged_part_is_found_by_those_who_read_it_and_names_its_writer(store, written):
    at = plan().layout.starts["w"] + 4 * (CUT + 100)
    flip(written.path / "model.safetensors", at, 3)
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors: .* to .*, which rank 1 wrote"):
        store.verify(written)
    with pytest.raises(CorruptCheckpointError, match="which rank 1 wrote"):
        store.load(written)
    file = store.open(written).group("model")
    file.read([TensorRange("w", 0, torch.empty(CUT)), TensorRange("w", 2 * CUT, torch.empty(100_000))])
    with pytest.raises(CorruptCheckpointError, match="which rank 1 wrote"):
        file.read([TensorRange("w", CUT, torch.empty(1))])
    found = []
    for part in range(4):
        try:
            store.open(written).verify(part=part, parts=4)
        except CorruptCheckpointError:
            found.append(part)
    assert len(found) == 1


def test_a_missing_file_is_named(store, written):
    (written.path / "model.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors.* cannot be read"):
        store.open(written).group("model")


def die(rank, writer):
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    write_own(rank, writer)


def fail(rank, writer):
    if rank == 2:
        (writer._work / "model.safetensors").unlink(missing_ok=True)
        (writer._work / "model.safetensors").mkdir()
    write_own(rank, writer)


def fail_to_report(rank, writer):
    """As where the disk has room for all but the report."""
    if rank == 2:
        (writer._work / "part-00002.new").mkdir()
    write_own(rank, writer)


def write_on(rank, writer):
    """Make files for as long as there is the folder, while rank 0 removes it because of rank 1."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for number in range(100_000):
        (writer._work / f"more-{number}").touch()


def leave_out(rank, writer):
    writer.write(ranges(rank)[:-1] if rank == 1 else ranges(rank), {"model.safetensors": plan().layout})


@pytest.mark.parametrize(
    ("others", "match"),
    [
        (die, "rank 2 ended before it had written its part"),
        (write_on, "rank 1 ended before it had written its part"),
        (fail, r"rank [012] could not write its part: \[Errno|Is a directory"),
        (fail_to_report, r"rank 2 could not write its part: \[Errno 21\] Is a directory\. .*choose another directory"),
        (leave_out, "the parts of model.safetensors end at"),
    ],
)
def test_a_checkpoint_with_a_part_that_is_not_there_is_not_there(store, others, match):
    old = write(store, write_own)
    began_s = time.monotonic()
    with pytest.raises(CheckpointError, match=match):
        write(store, others, step=2)
    assert time.monotonic() - began_s < 20
    assert [path.name for path in store.folder.iterdir()] == [old.path.name]
    store.verify(old)


def test_a_writer_without_the_folder_says_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        PartWriter(tmp_path / "elsewhere", 1)


def test_a_rank_that_has_not_begun_is_given_up_and_one_that_writes_is_not(tmp_path):
    files = {"model.safetensors": plan().layout}
    asked = []

    def gives_up(is_begun):
        asked.append(is_begun)
        if is_begun and len(asked) > 2:
            writer.write(ranges(0), files)  # the part comes at last
        return "" if is_begun else "when a rank was lost"

    writer = PartWriter(tmp_path, 0)
    with pytest.raises(PartsError, match="rank 1 had not written its part when a rank was lost"):
        await_parts(tmp_path, [0, 1], files, gives_up=gives_up)
    assert asked == [True, True, True, False]


def test_a_rank_with_other_tensors_is_refused(tmp_path):
    other = plan_parts(
        "model", {**tensors(), "z": torch.empty(1)}, {}, [[Claim("z", 0, 1), *claims(0)], *map(claims, (1, 2))]
    )
    PartWriter(tmp_path, 1).write(ranges(1), {"model.safetensors": other.layout})
    with pytest.raises(PartsError, match=r"rank 1 has other tensors than rank 0 for model\.safetensors"):
        await_parts(tmp_path, [1], {"model.safetensors": plan().layout})


def test_even_parts_are_all_elements_once_and_differ_by_less_than_an_element_of_each_end():
    draw = random.Random(3)
    for _ in range(200):
        dtypes = [
            draw.choice([torch.float32, torch.float64, torch.int8, torch.bfloat16]) for _ in range(draw.randrange(6))
        ]
        forms = {f"t{i}": torch.empty(draw.choice([0, 1, 5, 1000]), dtype=dtype) for i, dtype in enumerate(dtypes)}
        parts = draw.randrange(1, 6)
        found = even_claims(forms, parts)
        spans = [(claim.name, i) for own in found for claim in own for i in range(claim.start, claim.stop)]
        assert spans == [(name, i) for name, form in forms.items() for i in range(form.numel())]
        sizes = [sum((c.stop - c.start) * forms[c.name].element_size() for c in own) for own in found]
        total = sum(form.numel() * form.element_size() for form in forms.values())
        assert len(sizes) == parts and all(abs(size - total / parts) < 9 for size in sizes)


def test_ranges_without_an_owner_are_refused():
    with pytest.raises(CheckpointError, match=r"no rank has the elements of model\.w from 2 on, of 4"):
        plan_parts("model", {"w": torch.empty(4, device="meta")}, {}, [[Claim("w", 0, 2)], [Claim("w", 3, 4)]])


def test_a_file_of_another_program_is_read_in_parts(tmp_path):
    from safetensors.torch import save_file

    save_file({"w": torch.arange(10.0), "b": torch.ones(3)}, tmp_path / "plain.safetensors")
    file, into = TensorFile(tmp_path / "plain.safetensors"), torch.empty(3)
    file.read([TensorRange("w", 4, into)])
    assert into.tolist() == [4, 5, 6]
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "plain.safetensors").read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        TensorFile(tmp_path / "cut.safetensors")
