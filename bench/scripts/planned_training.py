"""Trains a model of the examples in one layout, and tells each rank's peak memory and its time of a step.

Its build functions are those that `unisono plan` gets: `unisono plan bench/scripts/planned_training.py:resnet50 ...`.
ARGUMENT is what plan says to give to the Trainer, such as "parallel=unisono.parallel.Shard(zero=1)".
Usage: unisono run -n RANKS planned_training.py MODEL BATCH VIRTUAL_RANKS STEPS [ARGUMENT]
"""

from __future__ import annotations

import ast
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unisono.parallel

_EXAMPLES = Path(__file__).parents[2] / "examples"
_LENGTH = 128


def _classes(example: str) -> dict[str, Any]:
    """Return the models of an example, which is a script: its classes without the rest."""
    tree = ast.parse((_EXAMPLES / example).read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    namespace: dict[str, Any] = {"nn": nn, "F": F, "torch": torch, "LENGTH": _LENGTH}
    exec(compile(tree, example, "exec"), namespace)
    return namespace


def _of_tokens(model: nn.Module, batch: tuple[Tensor, Tensor]) -> unisono.Sum:
    scores = model(batch[0])
    scores = getattr(scores, "logits", scores)
    return unisono.Sum(F.cross_entropy(scores.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel())


def _of_images(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def _with_tokens(model: nn.Module) -> Any:
    data = [(torch.zeros(_LENGTH, dtype=torch.long), torch.zeros(_LENGTH, dtype=torch.long))] * 4096
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), _of_tokens, data


def digits() -> Any:
    """Return the model of digits.py, which is not a class, with what trains it."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.25), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
    )
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3), _of_images, [(torch.randn(1, 8, 8), 1)] * 4096


def language_model() -> Any:
    """Return the model of language_model.py with what trains it."""
    return _with_tokens(_classes("language_model.py")["LanguageModel"]())


def wide_language_model() -> Any:
    """Return the same, 512 wide, with six layers."""
    return _with_tokens(_classes("language_model.py")["LanguageModel"](512, 8, 6))


def resnet50() -> Any:
    """Return the model of resnet50_pipeline.py as in the paper, for images of 128 pixels."""
    model = _classes("resnet50_pipeline.py")["ResNet50"](64, 8)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), _of_images, [(torch.randn(3, 128, 128), 1)] * 4096


def llama() -> Any:
    """Return the model of llama_pipeline.py, 512 wide, with eight layers."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  the others do not need it

    return _with_tokens(
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256,
                hidden_size=512,
                intermediate_size=1536,
                num_hidden_layers=8,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=_LENGTH,
                tie_word_embeddings=True,
                attention_dropout=0.1,
                use_cache=False,
            )
        )
    )


def _status(field: str, file: str = "status") -> int:
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def main(name: str, batch: str, virtual_ranks: str, steps: str, argument: str = "") -> None:
    """Train, and print a line for each rank."""
    torch.manual_seed(0)
    model, optimizer, loss_fn, data = globals()[name]()
    start = _status("VmRSS") - sum(p.nbytes for p in model.parameters())
    given: dict[str, Any] = eval(f"dict({argument})", {"unisono": unisono})
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=int(virtual_ranks), progress=False, **given)
    times_s: list[float] = []
    for _ in trainer.epochs(int(steps), max_steps=int(steps)):
        for micro_batches in trainer.batches(data, batch_size=int(batch)):
            since_s = time.perf_counter()
            trainer.step(loss_fn, micro_batches)
            times_s.append(time.perf_counter() - since_s)
            if len(times_s) == int(steps):  # before the parts of ranks come together at the end of the loop
                # Each rank counts its part of the pages that several have.
                shared = _status("Pss_Shmem", "smaps_rollup")
                own = _status("VmHWM") - _status("RssShmem") + shared
    print(
        json.dumps(
            {"own_nbytes": own, "base_nbytes": start, "shared_nbytes": shared, "step_s": statistics.median(times_s[2:])}
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
