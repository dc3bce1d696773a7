"""Images and texts in a run's log: which pixels become which file, what is refused, and what a report keeps of them."""

import json
import os
import random

import numpy as np
import PIL.Image
import pytest
import torch

import unisono
from unisono.report.samples import Samples
from unisono.report.source import open_run
from unisono.report.thumbnails import read_thumbnails
from unisono.watch import read_events

BYTES = torch.arange(5 * 7 * 3, dtype=torch.uint8).view(5, 7, 3)
OPACITY = torch.cat([BYTES, torch.full((5, 7, 1), 77, dtype=torch.uint8)], 2)
NO_GRAY = BYTES[:, :, :1].expand(5, 7, 3)


def logged(folder, kind="log"):
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == kind]


@pytest.mark.parametrize(
    ("pixels", "mode", "expected"),
    [
        (BYTES, "RGB", BYTES),
        (BYTES.permute(2, 0, 1), "RGB", BYTES),
        (OPACITY, "RGBA", OPACITY),
        (BYTES[:, :, 0], "L", BYTES[:, :, 0]),
        (BYTES[None, :, :, 0], "L", BYTES[:, :, 0]),
        (BYTES.double().requires_grad_() / 255, "RGB", BYTES),
        (BYTES.to(torch.bfloat16)[:, :, 0] / 255, "L", BYTES[:, :, 0]),
        (BYTES[:, :, 0] > 50, "L", (BYTES[:, :, 0] > 50).to(torch.uint8) * 255),
        (torch.tensor([[-0.5, 0.5, 1.5, torch.nan, torch.inf]]), "L", torch.tensor([[0, 128, 255, 0, 255]])),
        (BYTES.numpy()[::-1], "RGB", BYTES.flip(0)),
        (np.float32(BYTES.numpy() / 255).astype(">f4"), "RGB", BYTES),
        (PIL.Image.fromarray(OPACITY.numpy()), "RGBA", OPACITY),
        (PIL.Image.fromarray(NO_GRAY.contiguous().numpy()).convert("CMYK"), "RGB", NO_GRAY),
        (PIL.Image.fromarray((BYTES[:, :, 0] > 50).numpy()), "L", (BYTES[:, :, 0] > 50).to(torch.uint8) * 255),
    ],
)
def test_a_file_has_the_pixels(tmp_path, pixels, mode, expected):
    with unisono.RunLog(tmp_path, progress=False) as log:
        log.log(**{"a/b c": unisono.Image(pixels, caption="größe \ud800"), "rate": 0.5})
    (event,) = logged(tmp_path)
    assert event["values"] == {"rate": 0.5}
    image = event["images"]["a/b c"]
    assert (image["caption"], "thumbnail" in image) == ("größe ?", False)
    with PIL.Image.open(tmp_path / image["path"]) as found:
        assert (found.format, found.mode, found.size) == ("PNG", mode, (image["width"], image["height"]))
        assert np.array_equal(np.asarray(found), expected.numpy())
    assert image["nbytes"] == (tmp_path / image["path"]).stat().st_size
    assert not logged(tmp_path, "warning")


def test_a_large_image_is_reduced_and_has_a_thumbnail(tmp_path):
    left = torch.cat([torch.zeros(600, 1024), torch.ones(600, 1024)], 1)
    with unisono.RunLog(tmp_path, progress=False) as log:
        log.log(halves=unisono.Image(left))
    image = logged(tmp_path)[0]["images"]["halves"]
    for path, size in ((image["path"], (1024, 300)), (image["thumbnail"], (160, 47))):
        with PIL.Image.open(tmp_path / path) as found:
            assert found.size == size
            width, height = size
            assert (found.getpixel((0, 0)), found.getpixel((width - 1, height - 1))) == (0, 255)


@pytest.mark.parametrize(
    ("pixels", "options", "error", "message"),
    [
        ([[0.5]], {}, TypeError, "was given a list: give a tensor, a NumPy array or a picture of PIL"),
        (torch.zeros(4, 5, dtype=torch.int64), {}, TypeError, "a Tensor of int64: give uint8 from 0 to 255, or floats"),
        (np.zeros((4, 5), complex), {}, TypeError, "of complex128: give uint8"),
        (torch.zeros(4, 5).to_sparse(), {}, TypeError, "a sparse tensor"),
        (
            torch.zeros(8, 3, 4, 5),
            {},
            ValueError,
            r"the shape \[8, 3, 4, 5\] is not H x W, .*; log one image of a batch, such as images\[0\]",
        ),
        (torch.zeros(5), {}, ValueError, r"the shape \[5\] is not H x W, H x W x C or C x H x W; C is 1, 3 or 4"),
        (torch.zeros(5, 6, 2), {}, ValueError, r"the shape \[5, 6, 2\] is not"),
        (torch.zeros(3, 9, 4), {}, ValueError, r"may be C x H x W or H x W x C: say layout='CHW' or 'HWC'"),
        (torch.zeros(5, 6, 3), {"layout": "CHW"}, ValueError, r"\[5, 6, 3\] is not C x H x W"),
        (torch.zeros(5, 6), {"layout": "HWC"}, ValueError, r"\[5, 6\] is not H x W x C"),
        (torch.zeros(5, 6), {"layout": "WH"}, ValueError, "layout='WH' must be 'HWC' or 'CHW'"),
        (torch.zeros(5, 6), {"caption": 3}, TypeError, "caption=3 must be a text, and is an int"),
        (torch.zeros(0, 6), {}, ValueError, r"6 x 0 x 1 \(width, height, channels\) are 0 values"),
        (torch.zeros(1).expand(9000, 9000), {}, ValueError, "are 81,000,000 values; give an image of 1 to 67,108,864"),
    ],
)
def test_what_is_no_image_is_refused(pixels, options, error, message):
    with pytest.raises(error, match=message):
        unisono.Image(pixels, **options)
    assert unisono.Image(torch.zeros(3, 9, 4), layout="HWC").channels == 4


def test_a_run_without_a_directory_refuses_images_and_takes_texts():
    seen = []
    with unisono.RunLog(None, progress=False, listeners=[seen.append]) as log:
        with pytest.raises(ValueError, match=r"log.log\(a=...\) is an image, and this run has no directory"):
            log.log(a=unisono.Image(torch.zeros(2, 2)))
        with pytest.raises(ValueError, match=r"such as value.mean\(\), or unisono.Image\(a\) if it is one"):
            log.log(a=torch.zeros(2, 2))
        log.log(told="x" * 10_001 + "\ud800")
    assert seen[1]["texts"] == {"told": "x" * 10_000 + "… (10,002 characters)"}
    assert seen[1]["values"] == {}


def test_images_that_cannot_be_written_end_no_run(tmp_path):
    (tmp_path / "images").write_text("a file in the place of the folder")
    with unisono.RunLog(tmp_path, progress=False) as log:
        for number in range(3):
            log.log(a=unisono.Image(torch.zeros(2, 2)), number=number)
            log.log(alone=unisono.Image(torch.zeros(2, 2)))
    assert [event["values"] for event in logged(tmp_path)] == [{"number": 0}, {"number": 1}, {"number": 2}]
    (warning,) = logged(tmp_path, "warning")
    assert warning["message"].startswith("images are not logged from now on: ")


def test_floats_that_are_far_outside_are_named_once(tmp_path):
    with unisono.RunLog(tmp_path, progress=False) as log:
        log.log(a=unisono.Image(torch.full((2, 2), 255.0)), b=unisono.Image(torch.full((2, 2), -9.0)))
    (warning,) = logged(tmp_path, "warning")
    assert "the image 'a' has floats up to 254 outside of 0 to 1, which are clipped" in warning["message"]


SCRIPT = """
import torch, unisono
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.arange(24) % 3)
def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
trainer = unisono.Trainer(
    model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=4, directory={folder!r}, progress=False,
    checkpoints=unisono.Checkpoints(every_steps=4, every_epoch=False),
)
for epoch in trainer.epochs(2):
    for batch in trainer.batches(data, batch_size=4):
        trainer.step(loss, batch)
        if {logs}:
            pixels = model.weight.detach().clamp(0, 1).repeat(9, 9)
            trainer.log(weight=unisono.Image(pixels), said=f"step {{trainer.steps_done}} <script>", rank=trainer.rank)
        if trainer.steps_done == {stop}:
            raise KeyError("stop")
"""


def ends(folder):
    return [event["digest"] for event in logged(folder, "end")]


def test_a_repeated_step_is_shown_once_and_bits_stay(tmp_path, fork_ranks):
    fork_ranks(2, SCRIPT.format(folder=str(tmp_path / "run"), logs=True, stop=7), code=1)
    exec(SCRIPT.format(folder=str(tmp_path / "run"), logs=True, stop=0), {})
    exec(SCRIPT.format(folder=str(tmp_path / "plain"), logs=False, stop=0), {})
    assert ends(tmp_path / "run") == ends(tmp_path / "plain") != []
    # After a resume at step 4, steps 5 to 7 are logged again.
    assert [event["total_steps"] for event in logged(tmp_path / "run")] == [*range(1, 8), *range(5, 13)]
    assert {event["values"]["rank"] for event in logged(tmp_path / "run")} == {0}
    document = open_run(tmp_path / "run")
    for entries in (document["images"]["weight"], document["texts"]["said"]):
        steps = [entry["step"] for entry in entries]
        assert steps == sorted(set(steps)) and len(steps) > 3 and (steps[0], steps[-1]) == (1, 12)
    assert all(each["text"] == f"step {each['step']} <script>" for each in document["texts"]["said"])
    # The same bits have made the same files.
    assert len(list((tmp_path / "run" / "images").iterdir())) == 12


def test_only_images_of_the_run_are_read_and_not_too_many(tmp_path):
    with unisono.RunLog(tmp_path / "run", progress=False) as log:
        noise = torch.rand(150, 150, 4, generator=torch.Generator().manual_seed(0))
        for number in range(9):
            log.log(**{f"name {number % 2}": unisono.Image(noise.roll(number, 0))})
            log.step(loss=1.0)
    (tmp_path / "secret.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "run" / "images" / "text.png").write_text("no image")
    os.mkfifo(tmp_path / "run" / "images" / "pipe.png")
    size = {"width": 2, "height": 2}
    bad = {
        "out": {"path": "../secret.png", **size}, "absolute": {"path": str(tmp_path / "secret.png"), **size},
        "text": {"path": "images/text.png", **size}, "pipe": {"path": "images/pipe.png", **size},
        "gone": {"path": "images/gone.png", **size}, "sizes": {"path": "images/a.png", "width": "2", "height": 0},
        "thumbnail": {"path": "images/a.png", "thumbnail": "images/../../secret.png", **size}, "list": [1],
    }  # fmt: skip
    with (tmp_path / "run" / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": 2e9, "event": "log", "epoch": 0, "total_steps": 9, "images": bad}) + "\n")
    document = open_run(tmp_path / "run")
    assert {*document["images"]} == {"name 0", "name 1", *bad} - {"sizes", "list"}
    found = read_thumbnails(document, tmp_path / "run")
    assert sum(map(len, found.values())) <= 4 / 3 * 600_000 + 1000
    # The latest of each name come first.
    shown = [
        step
        for name in ("name 0", "name 1")
        for each in document["images"][name]
        if each["path"] in found
        for step in [each["step"]]
    ]
    assert sorted(shown) == [3, 4, 5, 6, 7, 8]


def test_samples_keep_the_first_and_the_latest_evenly():
    generator = random.Random(0)
    for most in (2, 3, 5, 6):
        samples, step, steps = Samples(names=1, most=most), 0, []
        for _ in range(200):
            if generator.random() < 0.05:
                step = max(0, step - generator.randrange(9))
                samples.rewind(step)
                steps = [each for each in steps if each <= step]
            step += generator.randrange(3)
            samples.add("a", step, {})
            steps = [*steps, *([] if step in steps else [step])]
            kept = [each["step"] for each in samples.document()["a"]]
            assert kept == sorted(set(kept)) and len(kept) <= most
            assert (kept[-1], {*kept} <= {*steps}) == (step, True)
            assert kept[0] == steps[0]
    samples.add("b", 1, {})
    assert samples.left_out == {"b"}
