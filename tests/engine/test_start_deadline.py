"""An engine whose process hangs while it starts, or before its first request, is given up."""

from __future__ import annotations

import asyncio
import threading
import time

import psutil
import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from dsde.config import DsdeConfig, from_values
from dsde.engine.call import EngineDied, GenerateCall
from dsde.engine.local import EngineStartError, LocalEngine

pytestmark = pytest.mark.slow

BOUND_S = 60.0


def stop_first_child(seen: list[psutil.Process]) -> None:
    """It lives on, and never says that it is ready."""
    before = set(psutil.Process().children())
    deadline = time.monotonic() + BOUND_S
    while not seen and time.monotonic() < deadline:
        seen += [
            one for one in psutil.Process().children() if one not in before and "spawn_main" in "".join(one.cmdline())
        ]
        time.sleep(0.05)
    for one in seen:
        one.suspend()


def configuration(pair: tuple[str, str], **engine: float) -> DsdeConfig:
    target, draft = pair
    return from_values(
        {
            "model": {"target": target, "draft": draft, "dtype": "float32", "max_model_len": 256},
            "engine": {"kv_cache_gib": 0.1, "extra": {"skip_tokenizer_init": True}, **engine},
        }
    )


def call() -> GenerateCall:
    params = SamplingParams(max_tokens=8, output_kind=RequestOutputKind.DELTA, detokenize=False)
    return GenerateCall({"type": "token", "prompt_token_ids": [0, 5, 7]}, params, "r")


def test_a_start_that_hangs_is_given_up(tiny_pair: tuple[str, str]) -> None:
    config = configuration(tiny_pair, start_timeout_s=10)
    seen: list[psutil.Process] = []
    threading.Thread(target=stop_first_child, args=(seen,)).start()
    start = time.monotonic()
    with pytest.raises(EngineStartError, match=r"engine\.start_timeout_s = 10: not ready in that time"):
        LocalEngine.start(config, "hangs")
    assert time.monotonic() - start < BOUND_S
    assert seen
    assert not any(one.is_running() for one in seen)


async def test_an_engine_that_hangs_before_its_first_request_is_ended(tiny_pair: tuple[str, str]) -> None:
    engine = LocalEngine.start(configuration(tiny_pair, step_timeout_s=5), "stuck")
    (core,) = [one for one in psutil.Process().children() if "EngineCore" in "".join(one.cmdline())]
    core.suspend()
    with pytest.raises(EngineStartError, match=r"said nothing for 0\.5 s"):
        await engine.ready(0.5)
    core.resume()
    await engine.ready(BOUND_S)
    core.suspend()
    answer = asyncio.ensure_future(anext(engine.generate(call())))
    assert await ended(engine)
    with pytest.raises(EngineDied):
        await asyncio.wait_for(answer, BOUND_S)
    engine.shutdown()


async def ended(engine: LocalEngine) -> bool:
    """Whether its health says so in time, asked as often as Serve does."""
    start = time.monotonic()
    for _ in range(int(BOUND_S / 0.2)):
        try:
            await engine.check_health()
        except EngineDeadError:
            return time.monotonic() - start >= 5.0
        await asyncio.sleep(0.2)
    return False
