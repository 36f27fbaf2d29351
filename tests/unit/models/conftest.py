"""A Llama of a few thousand parameters, and a models directory of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "sun", "moon", "star"]


@pytest.fixture
def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    )
    return LlamaForCausalLM(config).float().eval()


@pytest.fixture
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = WordLevel({word: n for n, word in enumerate(VOCABULARY)}, unk_token=VOCABULARY[0])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="<|im_end|>", unk_token=VOCABULARY[0])


@pytest.fixture
def models_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "models"
    monkeypatch.setenv("DSDE_MODELS_DIR", str(root))
    return root
