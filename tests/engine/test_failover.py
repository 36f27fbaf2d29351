"""Requests that outlive their engines, over engines that are made to die; no model runs here."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from dsde.engine.call import EngineDied, EnginesFull, EngineUnavailable, GenerateCall
from dsde.engine.continuation import Continuation
from dsde.engine.failover import Failover
from dsde.engine.retry import MAX_REFUSALS, RequestLost, Retries, RetryBudget

FIGURES = {"policy": "paper", "steps": 2}


def call(**parameters: Any) -> GenerateCall:
    wanted = {"max_tokens": 9, "output_kind": RequestOutputKind.DELTA, **parameters}
    return GenerateCall({"type": "token", "prompt_token_ids": [5, 6]}, SamplingParams(**wanted), "r")


def output(token_ids: list[int], finished: bool = False, index: int = 0, **fields: Any) -> RequestOutput:
    completion = CompletionOutput(index, "", token_ids, None, None, finish_reason="stop" if finished else None)
    return RequestOutput("r", None, None, None, [completion], finished, **fields)


class Engines:
    """One script an attempt: outputs to give and the error to end with. The last one repeats."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = list(scripts)
        self.calls: list[GenerateCall] = []
        self.delays: list[float] = []
        self.open = 0

    async def generate(self, sent: GenerateCall) -> AsyncGenerator[RequestOutput, None]:
        script = self.scripts[min(len(self.calls), len(self.scripts) - 1)]
        self.calls.append(sent)
        self.open += 1
        try:
            for step in script:
                if isinstance(step, Exception):
                    raise step
                yield step
        finally:
            self.open -= 1

    async def sleep(self, seconds: float) -> None:
        self.delays.append(seconds)

    def failover(self, budget: RetryBudget | None = None) -> Callable[..., AsyncGenerator[RequestOutput, None]]:
        return Failover(self.generate, budget or RetryBudget(100), self.sleep).generate


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for one in outputs for token in one.outputs[0].token_ids]


async def test_a_stream_goes_on_on_the_next_engine_behind_its_tokens() -> None:
    engines = Engines(
        [output([1, 2], num_cached_tokens=16), output([3], num_cached_tokens=16), EngineDied("died")],
        [
            output([4], num_cached_tokens=32),
            output([5], True, num_cached_tokens=32, kv_transfer_params={"dsde": FIGURES}),
        ],
    )
    first = call(presence_penalty=0.5, prompt_logprobs=1, min_tokens=4)
    outputs = [one async for one in engines.failover()(first)]
    assert tokens(outputs) == [1, 2, 3, 4, 5]
    asked, again = engines.calls
    assert (asked, asked.emitted) == (first, ())
    assert again.emitted == (1, 2, 3)
    assert (again.prompt, again.request_id) == (first.prompt, first.request_id)
    # The engine counts what the request brings, so lengths and penalties stay; the prompt's scores have been sent.
    assert again.sampling_params.prompt_logprobs is None
    assert first.sampling_params.prompt_logprobs == 1
    kept = ("max_tokens", "min_tokens", "presence_penalty", "temperature", "seed")
    for name in kept:
        assert getattr(again.sampling_params, name) == getattr(first.sampling_params, name), name
    # One answer: of its prompt the first engine found so much in its cache, and the figures are the last engine's.
    assert {one.num_cached_tokens for one in outputs} == {16}
    assert outputs[-1].kv_transfer_params == {"dsde": {**FIGURES, "resumed": {"times": 1, "tokens": 3}}}
    assert 0.05 <= engines.delays[0] <= 0.1
    assert engines.open == 0


async def test_an_undisturbed_answer_does_not_speak_of_it() -> None:
    engines = Engines([output([1], True, kv_transfer_params={"dsde": FIGURES})])
    (last,) = [one async for one in engines.failover()(call())]
    assert last.kv_transfer_params == {"dsde": FIGURES}
    assert engines.delays == []


@pytest.mark.parametrize(
    "parameters", [{}, {"n": 3, "temperature": 1.0}, {"output_kind": RequestOutputKind.FINAL_ONLY, "seed": 7}]
)
async def test_what_has_sent_nothing_starts_again_as_it_was(parameters: dict[str, Any]) -> None:
    engines = Engines([EngineDied("died")], [output([1, 2], True, kv_transfer_params={"dsde": FIGURES})])
    first = call(**parameters)
    outputs = [one async for one in engines.failover()(first)]
    assert tokens(outputs) == [1, 2]
    assert engines.calls == [first, first]
    assert outputs[-1].kv_transfer_params == {"dsde": FIGURES}


def test_a_seed_s_numbers_are_not_drawn_twice() -> None:
    seeds = []
    for count in (1, 2, 2):
        answer = Continuation(call(seed=7, temperature=1.0))
        answer.take(output(list(range(count))))
        seeds.append(answer.next_call().sampling_params.seed)
    assert 7 not in seeds
    assert seeds[0] != seeds[1] == seeds[2]
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("parameters", [{"n": 2, "temperature": 1.0}, {"output_kind": RequestOutputKind.CUMULATIVE}])
async def test_several_answers_under_way_end_in_an_error(parameters: dict[str, Any]) -> None:
    engines = Engines([output([1], index=0), EngineDied("died")])
    stream = engines.failover()(call(**parameters))
    assert tokens([await anext(stream)]) == [1]
    with pytest.raises(EngineUnavailable, match="amid several answers; send it again"):
        await anext(stream)
    assert len(engines.calls) == 1


async def test_a_request_that_two_engines_died_with_is_stopped() -> None:
    engines = Engines([output([1]), EngineDied("died")])
    stream = engines.failover()(call())
    assert tokens([await anext(stream), await anext(stream)]) == [1, 1]
    with pytest.raises(RequestLost, match="2 engines died while they had this request; it is not tried again"):
        await anext(stream)
    assert [one.emitted for one in engines.calls] == [(), (1,)]
    assert engines.open == 0


async def test_a_dead_replica_is_named_to_the_router_and_refusals_are_no_continuation() -> None:
    figures = {"kv_transfer_params": {"dsde": FIGURES}}
    engines = Engines(
        [output([1]), EngineDied("died", "a")], [EngineUnavailable("dead", "b")], [output([2], True, **figures)]
    )
    outputs = [one async for one in engines.failover()(call())]
    assert [one.avoid for one in engines.calls] == [(), ("a",), ("a", "b")]
    assert outputs[-1].kv_transfer_params == {"dsde": {**FIGURES, "resumed": {"times": 1, "tokens": 1}}}


async def test_an_engine_that_was_dead_before_is_no_death_and_delays_grow() -> None:
    engines = Engines(*[[EngineUnavailable("dead")]] * 6, [EngineDied("died")], [output([1], True)])
    assert tokens([one async for one in engines.failover()(call())]) == [1]
    assert len(engines.delays) == 7
    for delay, longest in zip(engines.delays, (0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0), strict=True):
        assert longest / 2 <= delay <= longest


async def test_an_answer_that_breaks_off_is_no_answer() -> None:
    engines = Engines([output([1])], [output([2], True)])
    assert tokens([one async for one in engines.failover()(call())]) == [1, 2]
    assert engines.calls[1].emitted == (1,)


async def test_refusals_are_bounded() -> None:
    engines = Engines([EngineUnavailable("nobody")])
    with pytest.raises(EngineUnavailable, match="nobody"):
        await anext(engines.failover()(call()))
    assert len(engines.calls) == MAX_REFUSALS + 1


async def test_a_full_queue_is_told_at_once_but_not_to_who_lost_an_engine() -> None:
    engines = Engines([EnginesFull("full")])
    with pytest.raises(EnginesFull):
        await anext(engines.failover()(call()))
    assert engines.delays == []
    engines = Engines([output([1]), EngineDied("died")], [EnginesFull("full")], [output([2], True)])
    assert tokens([one async for one in engines.failover()(call())]) == [1, 2]


async def test_other_errors_pass() -> None:
    engines = Engines([output([1]), KeyError("a defect")])
    stream = engines.failover()(call())
    await anext(stream)
    with pytest.raises(KeyError):
        await anext(stream)
    assert (len(engines.calls), engines.open) == (1, 0)


async def test_closing_the_stream_closes_the_engine_s() -> None:
    engines = Engines([output([1]), output([2])])
    stream = engines.failover()(call())
    await anext(stream)
    assert engines.open == 1
    await stream.aclose()
    assert engines.open == 0


def test_the_budget_is_shared_and_comes_back_with_answers_and_time() -> None:
    now = [0.0]
    budget = RetryBudget(2, clock=lambda: now[0])
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    for _ in range(5):
        budget.answered()
    assert [budget.spend() for _ in range(2)] == [True, False]
    now[0] = 1.5
    assert [budget.spend() for _ in range(2)] == [True, False]
    now[0] = 1000.0
    assert [budget.spend() for _ in range(3)] == [True, True, False]


def test_without_budget_the_client_is_told() -> None:
    budget = RetryBudget(1)
    assert Retries(budget, draw=lambda: 1.0).delay_s(EngineDied("it died; send it again")) == 0.1
    with pytest.raises(EngineUnavailable, match="it died; send it again; too many requests are being tried again"):
        Retries(budget).delay_s(EngineDied("it died; send it again"))
