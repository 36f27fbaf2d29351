"""Refuses, before anything heavy starts, models that are missing, differ in vocabulary, or do not fit in memory."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsde.config import DsdeConfig

__all__ = ["Footprint", "check_memory", "check_models", "footprint"]

_GIB = 2**30
# Measured on CPU with the embedded pair: Ray, Serve and the ingress; then a replica beside its weights and cache.
BASE_GIB = 2.5
REPLICA_GIB = 1.5
_FLOATS = ("F64", "F32", "F16", "BF16")
_KEPT_BYTES = {"I64": 8, "I32": 4, "I16": 2}
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def check_models(target: str, draft: str) -> None:
    """Both models can be found and share a vocabulary: draft tokens are the target's tokens, id by id.

    Raises ValueError naming model.target or model.draft, the value and what would do.
    """
    target_size = _config("model.target", target)["vocab_size"]
    draft_size = _config("model.draft", draft)["vocab_size"]
    if target_size != draft_size:
        raise ValueError(
            f"model.draft = {draft!r} has {draft_size} tokens in its vocabulary, model.target = {target!r} has "
            f"{target_size}: choose a draft of the target's own family"
        )
    ours, theirs = _vocabulary(target), _vocabulary(draft)
    if ours is None or theirs is None:
        return
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if differing:
        token = differing[0]
        raise ValueError(
            f"model.draft = {draft!r} numbers {len(differing)} tokens otherwise than model.target = {target!r}, first "
            f"{token!r} ({theirs.get(token)} and {ours.get(token)}): choose a draft of the target's own family"
        )


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of the CPU application. GiB; tokens_held: prompt and answer tokens that one replica's KV cache holds."""

    weights_gib: float
    kv_cache_gib: float
    replica_gib: float
    total_gib: float
    tokens_held: int


def footprint(config: DsdeConfig, target: str, draft: str) -> Footprint:
    """Estimate from the checkpoints' tensor shapes; a model that is no local directory counts with 0 weights.

    replica = weights + KV cache + 1.5 GiB, total = 2.5 GiB + replicas * replica.
    """
    weights = sum(_weight_bytes(model, config.model.dtype) for model in (target, draft)) / _GIB
    cache = config.engine.kv_cache_gib or 0.0
    per_token = sum(_cache_bytes(_config("model", model), config.model.dtype) for model in (target, draft))
    replica = weights + cache + REPLICA_GIB
    return Footprint(
        weights_gib=weights,
        kv_cache_gib=cache,
        replica_gib=replica,
        total_gib=BASE_GIB + config.serving.replicas * replica,
        tokens_held=int(cache * _GIB / per_token),
    )


def check_memory(config: DsdeConfig, target: str, draft: str, available_gib: float | None = None) -> None:
    """The application fits into this CPU machine, and one request of full length into a replica's KV cache.

    A GPU engine sizes itself by the share of GPU memory it is given, and vLLM says so when that is too little.
    Raises RuntimeError with the numbers and the settings to change.
    """
    if config.serving.device != "cpu":
        return
    need = footprint(config, target, draft)
    if available_gib is None:
        import psutil

        available_gib = psutil.virtual_memory().available / _GIB
    if need.total_gib > available_gib:
        fitting = max(0, math.floor((available_gib - BASE_GIB) / need.replica_gib))
        remedy = f"serving.replicas = {fitting} would fit" if fitting else "serve a smaller pair"
        raise RuntimeError(
            f"about {need.total_gib:.1f} GiB of memory are needed, {available_gib:.1f} GiB are available: {BASE_GIB} "
            f"for Ray and the ingress, and serving.replicas = {config.serving.replicas} of {need.replica_gib:.1f} each "
            f"(weights {need.weights_gib:.1f}, engine.kv_cache_gib = {need.kv_cache_gib:g}, {REPLICA_GIB} besides); "
            f"{remedy}"
        )
    longest = config.model.longest or int(_config("model.target", target).get("max_position_embeddings", 0))
    if need.kv_cache_gib and need.tokens_held < longest:
        raise RuntimeError(
            f"engine.kv_cache_gib = {need.kv_cache_gib:g} holds {need.tokens_held} tokens of this pair, one request "
            f"may have {longest}: set model.max_model_len to at most {need.tokens_held}, or engine.kv_cache_gib to "
            f"{math.ceil(10 * need.kv_cache_gib * longest / need.tokens_held) / 10} or more"
        )


def _directory(setting: str, model: str) -> Path | None:
    place = Path(model).expanduser()
    if place.is_dir():
        return place
    # A hub's name is `name` or `owner/name`; all else can only have been meant as a path.
    if model.startswith((".", "~", "/")) or model.count("/") > 1:
        raise ValueError(f"{setting} = {model!r} does not exist; accepted: a model directory, or a Hugging Face name")
    return None


def _config(setting: str, model: str) -> dict[str, Any]:
    place = _directory(setting, model)
    if place is None:
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{setting} = {model!r} is no directory here, and no model of that name could be read from the hub "
                f"({str(error).splitlines()[0]}); accepted: a model directory, or a Hugging Face name within reach"
            ) from error
        return dict(config.get_text_config().to_dict())
    file = place / "config.json"
    if not file.is_file():
        raise ValueError(f"{setting} = {model!r} has no config.json; accepted: a directory in Hugging Face layout")
    values: dict[str, Any] = json.loads(file.read_text())
    # A multimodal model keeps its language model's sizes one level down.
    values = values.get("text_config", values)
    if "vocab_size" not in values:
        raise ValueError(f"{setting} = {model!r}: its config.json names no vocab_size, so it is no language model")
    return values


def _vocabulary(model: str) -> dict[str, int] | None:
    """Token -> id, or None for a model without a tokenizer of its own, as a draft head is."""
    place = _directory("model", model)
    if place is not None and (place / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        vocabulary: dict[str, int] = Tokenizer.from_file(str(place / "tokenizer.json")).get_vocab()
        return vocabulary
    from transformers import AutoTokenizer

    try:
        return dict(AutoTokenizer.from_pretrained(model).get_vocab())
    except (OSError, ValueError):
        return None


def _weight_bytes(model: str, dtype: str) -> int:
    place = _directory("model", model)
    files = place.glob("*.safetensors") if place else ()
    return sum(_tensor_bytes(tensor, dtype) for file in files for tensor in _tensors(file))


def _tensors(file: Path) -> list[dict[str, Any]]:
    """The tensors' descriptions: 8 bytes of length, then JSON."""
    with file.open("rb") as stream:
        header: dict[str, dict[str, Any]] = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return [tensor for name, tensor in header.items() if name != "__metadata__"]


def _tensor_bytes(tensor: dict[str, Any], dtype: str) -> int:
    stored = str(tensor["dtype"])
    # vLLM's "auto" halves float32; integers and 8-bit floats are quantized weights, kept as they are.
    size = _DTYPE_BYTES.get(dtype, 2) if stored in _FLOATS else _KEPT_BYTES.get(stored, 1)
    return math.prod(tensor["shape"]) * size


def _cache_bytes(config: dict[str, Any], dtype: str) -> int:
    """K and V of one token in all layers."""
    heads = int(config["num_attention_heads"])
    head_size = int(config.get("head_dim") or config["hidden_size"] // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return 2 * int(config["num_hidden_layers"]) * kv_heads * head_size * _DTYPE_BYTES.get(dtype, 2)
