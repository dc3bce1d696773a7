"""Unusual parameters and buffers: one digest on any number of ranks, or refused in the same words on all."""

from __future__ import annotations

from pathlib import Path

import pytest

ODD = Path(__file__).parent / "programs" / "odd.py"

REFUSED = {
    "strided, fused": "is not dense in memory (its strides are [16, 2]), and AdamW has fused=True",
    "expanded": "is expanded: several of its elements lie in one place of memory",
    "lazily negated": "is a lazy negative of other memory",
    "other gradients": "has dtype torch.bfloat16 and grad_dtype torch.float32",
    "differentiable": "SGD has differentiable=True",
    "half and fp16": "whose gradient cannot be unscaled",
    "fused sgd of bf16": "then leaves most elements as they are",
    "adafactor of two types": "parameters of several types in one group: 'extra' is torch.float64",
    "assigned": "or weights were loaded with assign=True",
    "replaced": "belongs to no model given to Trainer",
    "none, filled in some": "'scale' was None before the step, and",
    "reshaped": "had shape [1] before the forward pass and has [3, 1] after it",
    "registered late": "buffer 'late' was registered in the forward pass",
    "set to none": "was set to None in the forward pass",
    "momentum in forward": "parameter 'extra' was written to in the forward pass",
    "momentum unseen": "parameter 'extra' was written to in the forward pass",
    "weights written in forward": "parameter 'main.weight' was written to in the forward pass",
    "weights for backward written": "parameter 'main.weight' was written to in the forward pass",
}


@pytest.fixture(scope="module")
def on_one_rank(rank_host, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("odd")
    (folder / "runs").mkdir()
    codes, _ = rank_host.run(1, ODD, folder / "runs", folder=folder, environment={"RANK": "0", "WORLD_SIZE": "1"})
    assert codes == [0], (folder / "err0").read_text()[-4000:]
    return came((folder / "out0").read_text().splitlines())


def test_what_is_refused_is_refused_with_a_reason_and_the_rest_is_trained(on_one_rank):
    for name, said in on_one_rank.items():
        if name in REFUSED:
            assert REFUSED[name] in said, name
        else:
            assert len(said) == 64, (name, said)
    assert REFUSED.keys() <= on_one_rank.keys()


@pytest.mark.parametrize(
    ("n", "args"),
    [
        (3, ["auto", "resumed"]),
        (2, ["collective"]),
        pytest.param(2, ["collective", "resumed"], marks=pytest.mark.soak),
        pytest.param(2, ["auto", "resumed"], marks=pytest.mark.soak),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_any_number_of_ranks_and_any_engine_do_the_same(fork_ranks, tmp_path, on_one_rank, n, args):
    runs = tmp_path / "runs"
    runs.mkdir()
    job = fork_ranks(n, ODD, runs, *args)
    for rank in range(n):
        assert came(job.lines(rank)) == on_one_rank


def came(lines: list[str]) -> dict[str, str]:
    return dict(line.split(" = ", 1) for line in lines if " = " in line)
