"""Engines for these tests run inside the test process, so that a test can look at the scheduler and the worker."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.asynchronous import asynchronous_scheduling

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

VOCABULARY = 12
EOS = 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)


def shut_down(engine: Any) -> None:
    """End an in-process engine now: its collection later would tear down the process group under the next one."""
    engine.llm_engine.engine_core.shutdown()
    gc.collect()


def switch_off_and_on(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let every other two steps draft nothing, whatever the policy says; the depths of all steps, as they come."""
    plan, depths = scheduler.controller.plan, []

    def switched(ids: Any, room: Any) -> Any:
        off = len(depths) % 4 >= 2
        made = plan(ids, [0] * len(room) if off else room)
        depths.append(made.depth)
        return made

    monkeypatch.setattr(scheduler.controller, "plan", switched)
    return depths


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(target, draft): random Llamas over twelve tokens; the draft is the target with noise, so it errs."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=EOS,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "target")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * parameter.std() * torch.randn_like(parameter)
    model.save_pretrained(folder / "draft")
    return str(folder / "target"), str(folder / "draft")


@pytest.fixture(scope="module", params=[False, True], ids=["synchronous", "asynchronous"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    """Whether the engine schedules asynchronously: what uses it runs in both ways."""
    return bool(request.param)


@pytest.fixture(scope="module")
def start_engine(tiny_pair: tuple[str, str]) -> Iterator[Callable[..., Any]]:
    """start(policy, settings, max_length=..., asynchronous=..., **engine arguments): the tiny pair, in float32.

    It returns a vllm.LLM.
    """
    engines: list[Any] = []

    def start(
        policy: str = "static",
        settings: dict[str, Any] | None = None,
        max_length: int = 4,
        asynchronous: bool = False,
        **extra: Any,
    ) -> Any:
        from vllm import LLM

        from dsde.config import DsdeConfig
        from dsde.engine.plugin import engine_arguments

        target, draft = tiny_pair
        config = DsdeConfig.model_validate(
            {
                "model": {"target": target, "draft": draft, "dtype": "float32", "max_model_len": 256},
                "speculation": {"policy": policy, "settings": settings or {}, "max_length": max_length},
                "engine": {"kv_cache_gib": 0.25, "max_num_seqs": 64},
            }
        )
        with asynchronous_scheduling() if asynchronous else nullcontext({}) as scheduling:
            arguments = {**engine_arguments(config), "skip_tokenizer_init": True, "disable_log_stats": True}
            engines.append(LLM(**{**arguments, **scheduling, **extra}))
        return engines[-1]

    yield start
    for engine in engines:
        shut_down(engine)


@pytest.fixture(scope="module")
def plain_engine(tiny_pair: tuple[str, str]) -> Iterator[Any]:
    """The target alone, without a drafter and without the plugin."""
    from vllm import LLM

    engine = LLM(
        model=tiny_pair[0],
        dtype="float32",
        max_model_len=256,
        max_num_seqs=64,
        enforce_eager=True,
        async_scheduling=False,
        kv_cache_memory_bytes=2**28,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    yield engine
    shut_down(engine)
