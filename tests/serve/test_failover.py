"""Streams whose engine is killed under them go on on the other replica, over HTTP and gRPC, as if nothing had been."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from ray.serve.handle import DeploymentHandle

from tests.serve.conftest import ANSWER_TIMEOUT_S, Served
from tests.serve.figures import check_figures
from tests.serve.fleet import loads, processes, published, seconds_until, unfinished
from tests.serve.streams import TOKENS, WAYS, Stream, over_grpc

REPLACED_TIMEOUT_S = 240
# Whoever continues one of these is sure of every next token: bfloat16 may flip a tie between two ways to compute it.
PROMPTS = (
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22",
    "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z A B C D E F G",
    "red, green, blue, red, green, blue, red, green, blue, red, green, blue,",
    "東京、大阪、京都、東京、大阪、京都、東京、大阪、京都、東京、大阪、京都、東京、",
)


def streams(**options: Any) -> list[Stream]:
    return [Stream(prompt, options) for prompt in PROMPTS for _ in WAYS]


def run(served: Served, wanted: list[Stream], disturb: Callable[[], None] | None = None) -> None:
    with ThreadPoolExecutor(len(wanted)) as pool:
        running = [pool.submit(WAYS[number % 2], served, stream) for number, stream in enumerate(wanted)]
        if disturb is not None:
            disturb()
        for one in running:
            one.result(REPLACED_TIMEOUT_S)


def engine_process(served: Served) -> psutil.Process:
    return processes(served, "EngineCore")[0]


def replica_process(served: Served) -> psutil.Process:
    replica = engine_process(served).parent()
    assert replica is not None
    return replica


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
@pytest.mark.parametrize("victim", [engine_process, replica_process])
def test_greedy_streams_outlive_a_kill_token_by_token(
    served: Served, engines: DeploymentHandle, victim: Callable[[Served], psutil.Process]
) -> None:
    expected, disturbed = streams(temperature=0), streams(temperature=0)
    run(served, expected)

    def kill() -> None:
        # Each is under way, and both engines have some.
        seconds_until(lambda: all(len(one.ids) >= 8 for one in disturbed), ANSWER_TIMEOUT_S)
        assert all(load["unfinished"] > 0 for load in loads(engines))
        victim(served).kill()

    run(served, disturbed, kill)
    for undisturbed, stream in zip(expected, disturbed, strict=True):
        assert stream.error is None
        assert stream.answer() == undisturbed.answer()
        assert stream.metrics is not None
        dsde = check_figures(stream.metrics, TOKENS)
        if stream.resumed:
            assert dsde["resumed"]["times"] == 1
            assert 8 <= dsde["resumed"]["tokens"] < TOKENS
    assert 0 < sum(one.resumed for one in disturbed) < len(disturbed)


@pytest.mark.usefixtures("whole_fleet")
def test_sampled_structured_and_whole_answers_outlive_a_kill(served: Served, web: httpx.Client) -> None:
    sampled = streams(temperature=1.0, seed=7)
    structured = [Stream("Digits:", {"temperature": 0, "regex": "[0-9]{90}", "ignore_eos": False}) for _ in range(2)]
    whole: list[dict[str, Any]] = []

    def ask() -> None:
        body = {"model": served.model, "prompt": PROMPTS[0], "max_tokens": TOKENS, "n": 2, "ignore_eos": True}
        whole.append(web.post("/v1/completions", json=body, timeout=REPLACED_TIMEOUT_S).json())

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()

    def kill() -> None:
        seconds_until(lambda: all(len(one.ids) >= 8 for one in sampled), ANSWER_TIMEOUT_S)
        engine_process(served).kill()

    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(over_grpc, served, one) for one in structured]
        run(served, sampled, kill)
        for one in answers:
            one.result(REPLACED_TIMEOUT_S)
    for thread in asking:
        thread.join(REPLACED_TIMEOUT_S)
    assert any(one.resumed for one in sampled)
    for stream in sampled:
        assert (stream.error, len(stream.ids)) == (None, TOKENS)
        assert stream.metrics is not None
        check_figures(stream.metrics, TOKENS)
    for stream in structured:
        assert stream.text.isdigit()
        assert len(stream.text) == 90
    for answer in whole:
        assert answer["usage"]["completion_tokens"] == 2 * TOKENS
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
