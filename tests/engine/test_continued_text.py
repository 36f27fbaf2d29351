"""The text of a continued request, its stop strings, log-probabilities and grammar: an engine with a real tokenizer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from dsde.engine.call import GenerateCall

pytestmark = pytest.mark.slow

Run = Callable[[Awaitable[Any]], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete
    loop.close()


@pytest.fixture(scope="module")
def engine(run: Run) -> Iterator[Any]:
    from dsde.config import DsdeConfig
    from dsde.engine.local import LocalEngine

    config = DsdeConfig.model_validate(
        {
            "model": {"pair": "embedded", "dtype": "float32", "max_model_len": 512},
            "speculation": {"policy": "static", "settings": {"length": 2}, "max_length": 2},
            "engine": {"kv_cache_gib": 0.5},
        }
    )

    async def start() -> LocalEngine:
        return LocalEngine.start(config, "r")

    started = run(start())
    yield started
    started.shutdown()


async def stream(engine: Any, call: GenerateCall) -> list[Any]:
    return [output.outputs[0] async for output in engine.generate(call)]


def call(engine: Any, prompt: str, **parameters: Any) -> GenerateCall:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    ids = tokenizer(engine).encode(prompt)
    wanted = {"temperature": 0, "max_tokens": 40, "output_kind": RequestOutputKind.DELTA, **parameters}
    return GenerateCall({"type": "token", "prompt_token_ids": ids}, SamplingParams(**wanted), "cmpl-r")


def tokenizer(engine: Any) -> Any:
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(engine.vllm_config.model_config)


def cut_everywhere(engine: Any, run: Run, whole: GenerateCall) -> list[Any]:
    """The whole answer's outputs, after a check that the answer cut behind each of them joins to the same."""
    outputs = run(stream(engine, whole))
    assert len(outputs) > 5
    cuts = range(1, len(outputs))
    calls = [replace(whole, emitted=tuple(token for one in outputs[:cut] for token in one.token_ids)) for cut in cuts]

    async def rests() -> list[list[Any]]:
        return list(await asyncio.gather(*(stream(engine, one) for one in calls)))

    for cut, rest in zip(cuts, run(rests()), strict=True):
        joined = [*outputs[:cut], *rest]
        assert told(joined) == told(outputs), cut
        if whole.sampling_params.logprobs is not None:
            assert decoded(joined) == decoded(outputs), cut
    return outputs


def told(outputs: list[Any]) -> tuple[Any, ...]:
    text = "".join(one.text for one in outputs)
    return (
        text,
        [token for one in outputs for token in one.token_ids],
        outputs[-1].finish_reason,
        outputs[-1].stop_reason,
    )


def decoded(outputs: list[Any]) -> list[tuple[int, str]]:
    places = [place for one in outputs for place in one.logprobs]
    return [next((token, one.decoded_token) for token, one in place.items()) for place in places]


def test_characters_of_several_tokens_stay_whole(engine: Any, run: Run) -> None:
    outputs = cut_everywhere(engine, run, call(engine, "東京、大阪、京都、東京、大阪、京都、東京、", logprobs=1))
    text = "".join(one.text for one in outputs)
    assert "�" not in text
    # Otherwise no cut has fallen into a character.
    assert any(one.token_ids and not one.text for one in outputs)


def test_a_stop_string_is_found_across_the_cut(engine: Any, run: Run) -> None:
    prompt = "One, two, three, four, five, six, seven,"
    text = "".join(one.text for one in run(stream(engine, call(engine, prompt))))
    stop = text[30:40]
    outputs = cut_everywhere(engine, run, call(engine, prompt, stop=[stop]))
    assert "".join(one.text for one in outputs) == text[: text.index(stop)]
    assert outputs[-1].stop_reason == stop


def test_a_grammar_goes_on_where_it_was(engine: Any, run: Run) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    pattern = r"\d{2}-\d{2}-\d{4} [a-z]{5} [A-Z]{4}[!?]{3}"
    outputs = cut_everywhere(
        engine, run, call(engine, "The date is", structured_outputs=StructuredOutputsParams(regex=pattern))
    )
    assert re.fullmatch(pattern, "".join(one.text for one in outputs))


def test_tokens_that_a_grammar_forbids_end_in_an_error(engine: Any, run: Run) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    forbidden = call(engine, "The date is", structured_outputs=StructuredOutputsParams(regex=r"\d{8}"))
    words = tuple(tokenizer(engine).encode(" words"))
    (last,) = run(stream(engine, replace(forbidden, emitted=words)))
    assert last.finish_reason == "error"


def test_a_stuck_engine_is_ended_and_its_requests_with_it(engine: Any, run: Run) -> None:
    import psutil
    from vllm.v1.engine.exceptions import EngineDeadError

    from dsde.engine.call import EngineDied, EngineUnavailable
    from dsde.engine.deadline import StepDeadline

    async def watch() -> None:
        while True:
            await engine.check_health()
            await asyncio.sleep(0.1)

    async def stuck() -> None:
        engine._deadline = StepDeadline(2.0)
        outputs = engine.generate(call(engine, "One, two,", max_tokens=300, ignore_eos=True))
        await anext(outputs)
        await engine.check_health()
        (core,) = [one for one in psutil.Process().children(recursive=True) if "EngineCore" in "".join(one.cmdline())]
        core.suspend()
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(watch(), 30)
        with pytest.raises(EngineDied):
            async for _ in outputs:
                pass
        # What comes now has not been there when it died.
        with pytest.raises(EngineUnavailable) as again:
            await anext(engine.generate(call(engine, "One, two,")))
        assert not isinstance(again.value, EngineDied)
        core.wait(10)

    run(stuck())
