"""Trains unmodified models of transformers that are cut or divided over ranks; prints a digest of all results for each.

Argument: the number of stages ("1" leaves models whole), or "shard" to divide them, or "whole" to do the same without;
then optionally names of models.
"""

import hashlib
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch.utils.data import Subset, TensorDataset

import unisono

how, *chosen = sys.argv[1:]
is_averaged, stages = how.isdigit(), int(how) if how.isdigit() else 1
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
}  # fmt: skip


def llama():
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=True, attention_dropout=0.1)
    return transformers.LlamaForCausalLM(config)


def bert():
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**SMALL, max_position_embeddings=32, num_labels=3)
    )


def t5():
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def causal(model, batch):
    return model(input_ids=batch[0], attention_mask=batch[1], labels=batch[0])


def labelled(model, batch):
    return model(input_ids=batch[0], attention_mask=batch[1], labels=batch[2])


def logits(model, batch):
    return labelled(model, batch).logits


def mean(loss):
    """Only the loss of a model's output, for evaluation."""
    return lambda model, batch: loss(model, batch).loss


torch.manual_seed(1)
IDS = torch.randint(3, 60, (20, 9))
MASK = torch.ones(20, 9, dtype=torch.long)
MASK[::3, 6:] = 0
LABELS = torch.randint(0, 3, (20,))
# Each size of a share is another plan, so one model has a last batch that is smaller, and only in training.
TEXTS = TensorDataset(IDS[:16], MASK[:16], IDS[:16])
CLASSES = TensorDataset(IDS, MASK, LABELS)
PAIRS = TensorDataset(IDS[:16], MASK[:16], torch.randint(3, 60, (16, 5)))
CASES = {
    "llama": (llama, causal, TEXTS, {2: ["model.layers.2"], 3: ["model.layers.1", "model.layers.2"]}),
    "bert": (bert, labelled, CLASSES, {2: ["bert.encoder.layer.2"], 3: ["bert.encoder.layer.1", "bert.pooler"]}),
    "t5": (t5, labelled, PAIRS, {2: ["decoder.block.1"], 3: ["decoder.block.0", "decoder.block.1"]}),
}


def train(name):
    make, loss, data, starts = CASES[name]
    torch.manual_seed(0)
    model = make().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parallel = unisono.parallel.Pipeline(stages=starts[stages]) if stages > 1 else None
    trainer = unisono.Trainer(
        model,
        optimizer,
        virtual_ranks=4,
        clip_grad_norm=1.0,
        ema_decay=0.9 if is_averaged else None,
        progress=False,
        parallel=unisono.parallel.Shard() if how == "shard" else parallel,
    )
    found = []
    for batch in trainer.batches(data, batch_size=8):
        result = trainer.step(loss, batch)
        found.append((float(result), result.grad_norm))
    some = Subset(data, range(8))
    found.append(trainer.evaluate(mean(loss), some, batch_size=8, ema=is_averaged))
    if name != "t5":  # a function of its own is another plan, and to make one takes longest
        outputs = trainer.predict(logits, some, batch_size=8, to="all")
        found.append(hashlib.sha256(outputs.contiguous().numpy().tobytes()).hexdigest())
    found.append(trainer.digest())
    print(f"{name}: {hashlib.sha256(repr(found).encode()).hexdigest()}")


for name in chosen or CASES:
    train(name)
