from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dsde.config import DsdeConfig, EngineConfig, ModelConfig, ServingConfig
from dsde.models.check import check_memory, check_models, footprint

Maker = Callable[..., str]


@pytest.fixture
def model(tmp_path: Path) -> Maker:
    """Writes a model directory: a configuration, the header of one matrix, a tokenizer."""

    def make(name: str, words: tuple[str, ...] = ("sun", "moon"), vocab_size: int = 2, rows: int = 4) -> str:
        place = tmp_path / name
        place.mkdir()
        config = {"vocab_size": vocab_size, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
        config |= {"hidden_size": 256, "max_position_embeddings": 2048}
        (place / "config.json").write_text(json.dumps(config))
        # The header alone: a footprint follows from the shapes.
        header = json.dumps(
            {"weight": {"dtype": "BF16", "shape": [rows, 256], "data_offsets": [0, rows * 512]}}
        ).encode()
        (place / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token=words[0]))
        tokenizer.save(str(place / "tokenizer.json"))
        return str(place)

    return make


def config(**sections: object) -> DsdeConfig:
    return DsdeConfig(**{"speculation": {"policy": "autoregressive"}, **sections})


def test_equal_vocabularies_pass(model: Maker) -> None:
    check_models(model("target"), model("draft"))


def test_a_missing_path_is_named(model: Maker, tmp_path: Path) -> None:
    missing = str(tmp_path / "no" / "such" / "model")
    with pytest.raises(ValueError, match=f"^model.draft = '{missing}' does not exist; accepted: a model directory"):
        check_models(model("target"), missing)


def test_a_directory_without_a_configuration_is_no_model(model: Maker, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^model.target = .* has no config.json"):
        check_models(str(tmp_path), model("draft"))


def test_vocabularies_of_other_sizes_are_refused_with_both_sizes(model: Maker) -> None:
    with pytest.raises(ValueError, match=r"^model.draft = .*draft' has 3 tokens .* model.target = .* has 2:"):
        check_models(model("target"), model("draft", vocab_size=3))


def test_tokens_with_other_ids_are_refused_with_the_first(model: Maker) -> None:
    with pytest.raises(ValueError, match=r"numbers 2 tokens otherwise .* first 'moon' \(0 and 1\)"):
        check_models(model("target"), model("draft", words=("moon", "sun")))


def test_a_draft_head_without_a_tokenizer_passes(model: Maker) -> None:
    draft = model("draft")
    (Path(draft) / "tokenizer.json").unlink()
    check_models(model("target"), draft)


def test_the_footprint_follows_from_the_shapes(model: Maker) -> None:
    target, draft = model("target", rows=2**20), model("draft", rows=2**19)
    need = footprint(config(serving=ServingConfig(replicas=3), engine=EngineConfig(kv_cache_gib=2)), target, draft)
    # (2^20 + 2^19) rows * 256 columns * 2 bytes = 0.75 GiB; K and V: 2 models * 2 * 8 layers * 2 heads * 64 * 2 bytes.
    assert need.weights_gib == 0.75
    assert need.replica_gib == 0.75 + 2 + 1.5
    assert need.total_gib == 2.5 + 3 * 4.25
    assert need.tokens_held == 2 * 2**30 // 8192


def test_float32_doubles_the_weights(model: Maker) -> None:
    target, draft = model("target", rows=2**20), model("draft", rows=2**19)
    assert footprint(config(model=ModelConfig(dtype="float32")), target, draft).weights_gib == 1.5


def test_too_little_memory_is_refused_with_the_numbers(model: Maker) -> None:
    target, draft = model("target", rows=2**20), model("draft", rows=2**19)
    message = (
        r"about 9.0 GiB of memory are needed, 6.0 GiB are available: 2.5 for Ray and the ingress, and serving.replicas "
        r"= 2 of 3.2 each \(weights 0.8, engine.kv_cache_gib = 1, 1.5 besides\); serving.replicas = 1 would fit"
    )
    with pytest.raises(RuntimeError, match=message):
        check_memory(config(), target, draft, available_gib=6)
    with pytest.raises(RuntimeError, match="serve a smaller pair"):
        check_memory(config(), target, draft, available_gib=3)
    check_memory(config(), target, draft, available_gib=9.1)


def test_a_cache_shorter_than_one_request_is_refused(model: Maker) -> None:
    # 2048 tokens of 8192 bytes are 16 MiB; 8 MiB hold half.
    pair = {"target": str(model("target")), "draft": str(model("draft"))}
    small = config(engine=EngineConfig(kv_cache_gib=1 / 128), model=ModelConfig(**pair))
    with pytest.raises(
        RuntimeError, match=r"holds 1024 tokens .* may have 2048: set model.max_model_len to at most 1024"
    ):
        check_memory(small, **pair, available_gib=99)
    short = config(engine=EngineConfig(kv_cache_gib=1 / 128), model=ModelConfig(max_model_len=1000, **pair))
    check_memory(short, **pair, available_gib=99)


def test_a_gpu_is_left_to_size_itself(model: Maker) -> None:
    check_memory(config(serving=ServingConfig(device="gpu")), model("target"), model("draft"), available_gib=0)
