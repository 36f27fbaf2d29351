"""Engine arguments on both devices, without an engine: the GPU path is the CPU path with other values."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from dsde.config import DsdeConfig
from dsde.engine.plugin import engine_arguments, engine_environment, serve_command


def config(device: str, **sections: Any) -> DsdeConfig:
    model = {"target": "org/target", "draft": "org/draft"}
    return DsdeConfig.model_validate({"model": model, "serving": {"device": device}, **sections})


def test_a_gpu_engine_schedules_asynchronously_with_graphs() -> None:
    arguments = engine_arguments(config("gpu"))
    assert arguments["scheduler_cls"] == "dsde.engine.scheduler.DsdeAsyncScheduler"
    assert (arguments["async_scheduling"], arguments["enforce_eager"]) == (True, False)
    assert not {"kv_cache_memory_bytes", "distributed_executor_backend"} & arguments.keys()
    assert engine_environment(config("gpu")) == {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_NO_USAGE_STATS": "1"}


def test_a_cpu_engine_schedules_synchronously_on_its_share_of_the_cores() -> None:
    chosen = config("cpu", serving={"device": "cpu", "cpus_per_replica": 2}, engine={"kv_cache_gib": 0.5})
    arguments = engine_arguments(chosen)
    assert arguments["scheduler_cls"] == "dsde.engine.scheduler.DsdeScheduler"
    assert (arguments["async_scheduling"], arguments["enforce_eager"]) == (False, True)
    assert arguments["kv_cache_memory_bytes"] == 2**29
    environment = engine_environment(chosen)
    assert (environment["OMP_NUM_THREADS"], environment["VLLM_CPU_OMP_THREADS_BIND"]) == ("2", "nobind")


def test_both_devices_get_the_same_draft_policy_and_worker() -> None:
    wanted = {"policy": "static", "settings": {"length": 2}, "max_length": 6}
    cpu, gpu = (engine_arguments(config(device, speculation=wanted)) for device in ("cpu", "gpu"))
    for name in ("model", "speculative_config", "additional_config", "worker_cls", "max_num_seqs"):
        assert cpu[name] == gpu[name]
    assert gpu["additional_config"] == {"dsde": {"policy": "static", "settings": {"length": 2}}}
    assert gpu["speculative_config"]["num_speculative_tokens"] == 6


def test_extra_arguments_win() -> None:
    chosen = config("gpu", engine={"extra": {"gpu_memory_utilization": 0.5, "async_scheduling": False}})
    arguments = engine_arguments(chosen)
    assert (arguments["gpu_memory_utilization"], arguments["async_scheduling"]) == (0.5, False)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_command_line_says_what_the_arguments_say(device: str) -> None:
    words = shlex.split(serve_command(config(device)))
    start = words.index("vllm")
    assert words[start : start + 3] == ["vllm", "serve", "org/target"]
    assert all("=" in word for word in words[:start])
    arguments = engine_arguments(config(device))
    speculative = words[words.index("--speculative-config") + 1]
    assert json.loads(speculative) == arguments["speculative_config"]
    assert ("--no-async-scheduling" in words) == (device == "cpu")
    assert ("--async-scheduling" in words) == (device == "gpu")
