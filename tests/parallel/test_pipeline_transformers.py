"""Unmodified models of transformers cut over stages: results and gradients of one process, to the bit."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from stages_in_process import differences
from torch import Tensor, nn

from late_imports import LateModule

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = LateModule("transformers")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
}  # fmt: skip


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 60, shape)


def padded() -> Tensor:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 6:] = 0
    return mask


def llama(**settings) -> nn.Module:
    config = transformers.LlamaConfig(
        **SMALL, num_key_value_heads=2, tie_word_embeddings=True, attention_dropout=0.1, **settings
    )
    return transformers.LlamaForCausalLM(config).train()


def causal(model, input_ids, attention_mask):
    return model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)


def labelled(model, input_ids, attention_mask, labels):
    return model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


def loss_of(result) -> Tensor:
    return result.loss


@pytest.mark.parametrize(
    ("starts", "attention"),
    [
        (["model.layers.2"], "eager"),
        pytest.param(["model.layers.1", "model.layers.3"], "sdpa", marks=pytest.mark.soak),
        (["model.layers.0", "model.layers.2", "model.norm"], "sdpa"),
    ],
)
def test_llama_with_tied_embedding(starts, attention):
    model = llama(attn_implementation=attention)
    batches = [(tokens(2, 9), padded()) for _ in range(2)]
    assert differences(model, causal, batches, starts, loss_of) == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_llama_with_activation_checkpointing(reentrant):
    model = llama()
    for layer in model.model.layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = lambda function, *args: torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=reentrant
        )
    batches = [(tokens(2, 9), padded()) for _ in range(2)]
    assert differences(model, causal, batches, ["model.layers.1", "model.layers.3"], loss_of) == []


@pytest.mark.parametrize(
    "starts",
    [
        pytest.param(["bert.encoder.layer.2"], marks=pytest.mark.soak),
        pytest.param(["bert.encoder.layer.1", "bert.encoder.layer.3"], marks=pytest.mark.soak),
        ["bert.encoder.layer.1", "bert.encoder.layer.3", "bert.pooler"],
    ],
)
def test_bert(starts):
    config = transformers.BertConfig(**SMALL, max_position_embeddings=32, num_labels=3)
    model = transformers.BertForSequenceClassification(config).train()
    batches = [(tokens(2, 9), padded(), torch.tensor([0, 2])) for _ in range(2)]
    assert differences(model, labelled, batches, starts, loss_of) == []


@pytest.mark.parametrize(
    "starts",
    [
        pytest.param(["decoder.block.0"], marks=pytest.mark.soak),
        ["encoder.block.2", "decoder.block.1"],
        pytest.param(["decoder.block.0", "decoder.block.1", "decoder.block.2"], marks=pytest.mark.soak),
        ["decoder.block.1", "decoder.block.2", "lm_head"],
    ],
)
def test_t5_uses_the_encoder_in_every_decoder_block(starts):
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_decoder_layers=3, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).train()
    batches = [(tokens(2, 9), padded(), tokens(2, 5)) for _ in range(2)]
    assert differences(model, labelled, batches, starts, loss_of) == []
