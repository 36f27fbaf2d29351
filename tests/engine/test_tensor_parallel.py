"""Two workers to an engine: the same tokens as with one, and the engine's death when one of them is killed."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import psutil
import pytest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from dsde.config import from_values
from dsde.engine.call import EngineDied, GenerateCall
from dsde.engine.local import LocalEngine

pytestmark = pytest.mark.slow

PROMPT = [0, 5, 7, 3, 9]
TOKENS = 200
NOTICED_S = 10.0


@pytest.fixture
def engine(tiny_pair: tuple[str, str]) -> Iterator[LocalEngine]:
    target, draft = tiny_pair
    config = from_values(
        {
            "model": {"target": target, "draft": draft, "dtype": "float32", "max_model_len": 256},
            "speculation": {"policy": "static", "settings": {"length": 3}, "max_length": 4},
            "engine": {
                "kv_cache_gib": 0.1,
                "extra": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "skip_tokenizer_init": True},
            },
        }
    )
    running = LocalEngine.start(config, "two workers")
    yield running
    running.shutdown()


def call() -> GenerateCall:
    params = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA, detokenize=False
    )
    return GenerateCall({"type": "token", "prompt_token_ids": PROMPT}, params, "r")


async def rest(answer: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    return [output async for output in answer]


async def test_a_killed_worker_ends_the_engine_and_what_it_had(
    engine: LocalEngine, start_engine: Callable[..., Any]
) -> None:
    outputs = await rest(engine.generate(call()))
    ids = [token for output in outputs for token in output.outputs[0].token_ids]
    figures = outputs[-1].kv_transfer_params["dsde"]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    (alone,) = start_engine().generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    assert ids == list(alone.outputs[0].token_ids)
    assert figures["steps"] > figures["steps_off"]
    assert figures["kld"]["mean"] > 0

    workers = [one for one in psutil.Process().children(recursive=True) if "VLLM::Worker" in "".join(one.cmdline())]
    assert len(workers) == 2
    answer = engine.generate(call())
    await anext(answer)
    workers[1].kill()
    killed_at = time.monotonic()
    with pytest.raises(EngineDied):
        await rest(answer)
    assert time.monotonic() - killed_at < NOTICED_S
    with pytest.raises(EngineDeadError):
        await engine.check_health()
