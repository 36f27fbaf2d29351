"""Streams whose engine is killed under them go on on the other replica, over HTTP and gRPC, as if nothing had been."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from ray.serve.handle import DeploymentHandle

from dsde.chaos.stream import Stream
from dsde.chaos.traffic import PROMPTS
from tests.serve.conftest import ANSWER_TIMEOUT_S, Served
from tests.serve.figures import check_figures
from tests.serve.fleet import loads, processes, published, seconds_until, unfinished
from tests.serve.streams import TOKENS, WAYS, answer, ask, over_grpc, over_http

REPLACED_TIMEOUT_S = 240


def streams(**options: Any) -> list[Stream]:
    return [ask(prompt, **options) for prompt in PROMPTS for _ in WAYS]


def run(served: Served, wanted: list[Stream], disturb: Callable[[], None] | None = None) -> None:
    with ThreadPoolExecutor(len(wanted)) as pool:
        running = [pool.submit(WAYS[number % 2], served, stream) for number, stream in enumerate(wanted)]
        if disturb is not None:
            disturb()
        for one in running:
            one.result(REPLACED_TIMEOUT_S)


def kill_engine(served: Served) -> None:
    processes(served, "EngineCore")[0].kill()


def kill_replica(served: Served) -> None:
    replica = processes(served, "EngineCore")[0].parent()
    assert replica is not None
    replica.kill()


def stop_engine(served: Served) -> None:
    """It lives on, and makes no step."""
    processes(served, "EngineCore")[0].suspend()


@pytest.fixture
def whole_fleet(served: Served, engines: DeploymentHandle) -> Iterator[None]:
    """Two replicas before the test; and after it none that the test's victims have left behind."""

    def complete() -> bool:
        stats = published(engines)
        return len(processes(served, "EngineCore")) == 2 and len(stats) == 2 and not any(s.draining for s in stats)

    seconds_until(complete, REPLACED_TIMEOUT_S)
    yield
    seconds_until(complete, REPLACED_TIMEOUT_S)
    seconds_until(lambda: unfinished(engines) == 0, 30)


@pytest.mark.usefixtures("whole_fleet")
@pytest.mark.parametrize("fault", [kill_engine, kill_replica, stop_engine])
def test_greedy_streams_outlive_a_fault_token_by_token(
    served: Served, engines: DeploymentHandle, fault: Callable[[Served], None]
) -> None:
    expected, disturbed = streams(temperature=0), streams(temperature=0)
    run(served, expected)

    def disturb() -> None:
        # Each is under way, and both engines have some.
        seconds_until(lambda: all(len(one.ids) >= 8 for one in disturbed), ANSWER_TIMEOUT_S)
        assert all(load["unfinished"] > 0 for load in loads(engines))
        fault(served)

    run(served, disturbed, disturb)
    for undisturbed, stream in zip(expected, disturbed, strict=True):
        assert stream.error is None
        assert answer(stream) == answer(undisturbed)
        assert stream.metrics is not None
        dsde = check_figures(stream.metrics, TOKENS)
        if stream.resumed:
            assert dsde["resumed"]["times"] == 1
            assert 8 <= dsde["resumed"]["tokens"] < TOKENS
    assert 0 < sum(one.resumed for one in disturbed) < len(disturbed)


@pytest.mark.usefixtures("whole_fleet")
def test_sampled_structured_and_whole_answers_outlive_a_kill(
    served: Served, engines: DeploymentHandle, web: httpx.Client
) -> None:
    sampled = streams(temperature=1.0, seed=7)
    structured = [ask("Digits:", temperature=0, regex="[0-9]{90}", ignore_eos=False) for _ in range(2)]
    # So many that both engines have some.
    several = [ask(prompt, temperature=1.0, n=2) for prompt in 2 * PROMPTS]
    whole: list[dict[str, Any]] = []

    def ask_whole() -> None:
        body = {"model": served.model, "prompt": PROMPTS[0], "max_tokens": TOKENS, "n": 2, "ignore_eos": True}
        whole.append(web.post("/v1/completions", json=body, timeout=REPLACED_TIMEOUT_S).json())

    asking = [threading.Thread(target=ask_whole) for _ in range(2)]
    for thread in asking:
        thread.start()

    def kill() -> None:
        seconds_until(lambda: all(len(one.ids) >= 8 for one in (*sampled, *several)), ANSWER_TIMEOUT_S)
        assert all(load["unfinished"] > 0 for load in loads(engines))
        kill_engine(served)

    with ThreadPoolExecutor(len(structured) + len(several)) as pool:
        asked = [pool.submit(over_grpc, served, one) for one in structured]
        asked += [pool.submit(over_http, served, one) for one in several]
        run(served, sampled, kill)
        for one in asked:
            one.result(REPLACED_TIMEOUT_S)
    for thread in asking:
        thread.join(REPLACED_TIMEOUT_S)
    assert any(one.resumed for one in sampled)
    for stream in sampled:
        assert (stream.error, len(stream.ids)) == (None, TOKENS)
        assert stream.metrics is not None
        check_figures(stream.metrics, TOKENS)
    # Nobody can say which of several answers a token would belong to: those end in an error that says so.
    assert any(one.error for one in several)
    for stream in several:
        assert (
            stream.ended or stream.error == "503: the engine of this request died amid several answers; send it again"
        )
        assert stream.error or len(stream.ids) == 2 * TOKENS
    for stream in structured:
        assert stream.text.isdigit()
        assert len(stream.text) == 90
    for one in whole:
        assert one["usage"]["completion_tokens"] == 2 * TOKENS
        assert [choice["finish_reason"] for choice in one["choices"]] == ["length"] * 2
