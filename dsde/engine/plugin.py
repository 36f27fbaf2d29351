"""vLLM engine arguments and environment from the configuration, through vLLM's public switches only."""

from __future__ import annotations

import json
import shlex
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsde.config import DsdeConfig

__all__ = ["cli_flags", "engine_arguments", "engine_environment", "model_paths", "serve_command"]


def model_paths(config: DsdeConfig) -> tuple[str, str]:
    """(target, draft) of the configuration, a name or a path each. Raises FileNotFoundError for an unprepared pair."""
    if config.model.target is not None and config.model.draft is not None:
        return config.model.target, config.model.draft
    from dsde.models.pairs import pair

    assert config.model.pair is not None
    chosen = pair(config.model.pair)
    return str(chosen.target), str(chosen.draft)


def engine_arguments(config: DsdeConfig) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM, vllm.AsyncEngineArgs and, as flags, of `vllm serve`. JSON-able.

    `engine.extra` is laid over the result, so every vLLM argument can be set.
    """
    target, draft = model_paths(config)
    on_cpu = config.serving.device == "cpu"
    length = config.speculation.max_length
    arguments: dict[str, Any] = {
        "model": target,
        "served_model_name": served_name(config),
        "dtype": config.model.dtype,
        "max_model_len": config.model.longest,
        "max_num_seqs": config.engine.max_num_seqs,
        "enforce_eager": _is_eager(config),
        "async_scheduling": not on_cpu,
        "scheduler_cls": f"dsde.engine.scheduler.{'DsdeScheduler' if on_cpu else 'DsdeAsyncScheduler'}",
        "worker_cls": "dsde.engine.worker.DsdeWorker",
        "speculative_config": {
            "method": "draft_model",
            "model": draft,
            "num_speculative_tokens": length,
            # Drafts drawn from q keep acceptance at temperature > 0; vLLM's default draws greedily.
            "draft_sample_method": "probabilistic",
            # Tells vLLM that the length varies from step to step; the controller replaces the value.
            "num_speculative_tokens_per_batch_size": [[1, config.engine.max_num_seqs, length]],
        },
        "per_request_spec_decode_metrics": "summary",
        "additional_config": {"dsde": {"policy": config.speculation.policy, "settings": config.speculation.settings}},
    }
    if on_cpu:
        # One process less than vLLM's default; it needs the environment below, and falls back to the default without.
        arguments["distributed_executor_backend"] = "uni"
        if config.engine.kv_cache_gib is not None:
            arguments["kv_cache_memory_bytes"] = int(config.engine.kv_cache_gib * 2**30)
    arguments = {name: value for name, value in arguments.items() if value is not None}
    return {**arguments, **config.engine.extra}


def _is_eager(config: DsdeConfig) -> bool:
    chosen = config.engine.enforce_eager
    return config.serving.device == "cpu" if chosen is None else chosen


def served_name(config: DsdeConfig) -> str:
    """The model's name in the API."""
    if config.model.served_name is not None:
        return config.model.served_name
    return str(config.model.target or config.model.pair)


def engine_environment(config: DsdeConfig) -> dict[str, str]:
    """Environment of a process that hosts an engine. Model Runner V2 does not offer the plugin's seams in vLLM 0.32."""
    environment = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_NO_USAGE_STATS": "1"}
    if config.serving.device == "cpu":
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if _is_eager(config):
            # Else the first request for log-probabilities waits for a compiler.
            environment["TORCH_COMPILE_DISABLE"] = "1"
        # Unbound threads let two one-core replicas share two cores; bound ones would all sit on the first.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        environment["OMP_NUM_THREADS"] = str(max(1, int(config.serving.cpus_per_replica)))
        openmp = Path(sysconfig.get_path("data")) / "lib" / "libiomp5.so"
        if openmp.exists():
            environment["LD_PRELOAD"] = str(openmp)
    return environment


def serve_command(config: DsdeConfig) -> str:
    """The `vllm serve` line that runs the same engine without Ray, environment included."""
    arguments = engine_arguments(config)
    words = [f"{name}={shlex.quote(value)}" for name, value in engine_environment(config).items()]
    words += ["vllm", "serve", shlex.quote(str(arguments.pop("model")))]
    return " ".join([*words, *map(shlex.quote, cli_flags(arguments))])


def cli_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Engine arguments as words of a `vllm serve` command."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else "--no-" + flag[2:])
        else:
            words += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words
