"""Resting the drafter and coming back: the drafts are the ones an engine that never rested would draw."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

PROMPT = [0, 5, 7, 3, 9, 2, 8, 4]
Drafts = dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="module")
def engine(start_engine: Any, asynchronous: bool) -> Any:
    return start_engine("static", {"length": 3}, asynchronous=asynchronous, block_size=32)


def core_of(engine: Any) -> Any:
    return engine.llm_engine.engine_core.engine_core


def runner_of(engine: Any) -> Any:
    return core_of(engine).model_executor.driver_worker.worker.model_runner


@contextmanager
def recording(engine: Any) -> Iterator[Drafts]:
    """Tokens of a request, the drafts that followed them: filled while the block runs."""
    from dsde.engine.transport import plan_of

    scheduler, runner = core_of(engine).scheduler, runner_of(engine)
    sample, update = runner.sample_tokens, scheduler.update_from_output
    # In asynchronous scheduling the next step has been drafted before the tokens of this one are known.
    drawn: deque[dict[str, list[int]]] = deque()
    drafts: Drafts = {}

    def draw(*args: Any, **kwargs: Any) -> Any:
        output = sample(*args, **kwargs)
        drawn.append(dict(zip(runner.input_batch.req_ids, runner._draft_token_ids.tolist(), strict=True)))
        return output

    def record(scheduled: Any, output: Any) -> Any:
        outputs = update(scheduled, output)
        if scheduled.num_scheduled_tokens:
            tokens = drawn.popleft()
            for request_id, length in plan_of(scheduled).lengths.items():
                request = scheduler.requests.get(request_id)
                if request is not None and length:
                    drafts[tuple(request.all_token_ids)] = tokens[request_id][:length]
        return outputs

    runner.sample_tokens, scheduler.update_from_output = draw, record
    try:
        yield drafts
    finally:
        runner.sample_tokens, scheduler.update_from_output = sample, update
        scheduler.controller.set_policy("static", {"length": 3})


@pytest.fixture
def recorded(engine: Any) -> Iterator[Drafts]:
    with recording(engine) as drafts:
        yield drafts


def generate(engine: Any, prompts: list[list[int]], tokens: int, at_step: Callable[[int], None] | None = None) -> None:
    """Run to the end; at_step(n) is called before engine step n."""
    from vllm import SamplingParams

    core = core_of(engine)
    schedule, steps = core.scheduler.schedule, iter(range(10_000))

    def counted(*args: Any, **kwargs: Any) -> Any:
        if at_step is not None:
            at_step(next(steps))
        return schedule(*args, **kwargs)

    core.scheduler.schedule = counted
    try:
        parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
        # In asynchronous scheduling one more step was launched before the last output was read.
        while core.batch_queue:
            core.step_with_batch_queue()
    finally:
        core.scheduler.schedule = schedule


def switch(engine: Any, lengths: dict[int, int]) -> Callable[[int], None]:
    """Before step n, make the length lengths[n]."""
    controller = core_of(engine).scheduler.controller
    return lambda step: controller.set_policy("static", {"length": lengths[step]}) if step in lengths else None


def common(one: Drafts, other: Drafts) -> list[tuple[int, ...]]:
    return [prefix for prefix in one if prefix in other]


def test_drafts_after_a_rest_are_those_without_one(engine: Any, recorded: Drafts) -> None:
    generate(engine, [PROMPT, PROMPT[:4]], 70)
    always = dict(recorded)
    recorded.clear()
    engine.reset_prefix_cache()
    generate(engine, [PROMPT, PROMPT[:4]], 70, switch(engine, {0: 0, 12: 3, 18: 0, 25: 3}))
    shared = common(recorded, always)
    # Plain steps advance by one token, so some prefixes after each rest are met in both runs.
    assert len(shared) >= 8
    assert {prefix: recorded[prefix][:2] for prefix in shared} == {prefix: always[prefix][:2] for prefix in shared}


def test_a_resting_engine_runs_no_draft_forward(engine: Any, recorded: Drafts) -> None:
    runner = runner_of(engine)
    forward, calls = runner.drafter.model.forward, []
    runner.drafter.model.forward = lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs)
    try:
        generate(engine, [PROMPT], 20, switch(engine, {0: 0}))
    finally:
        runner.drafter.model.forward = forward
    assert (calls, recorded) == ([], {})


def test_a_cached_prefix_that_the_draft_never_read_is_read_later(engine: Any, recorded: Drafts) -> None:
    long = [*PROMPT, *PROMPT, *PROMPT, *PROMPT, *PROMPT, *PROMPT, *PROMPT, *PROMPT, *PROMPT, 6]
    engine.reset_prefix_cache()
    generate(engine, [long], 40)
    fresh = dict(recorded)
    recorded.clear()
    engine.reset_prefix_cache()
    generate(engine, [long], 8, switch(engine, {0: 0}))
    assert recorded == {}
    generate(engine, [long], 40, switch(engine, {0: 3}))
    shared = common(recorded, fresh)
    assert len(shared) >= 10
    assert {prefix: recorded[prefix] for prefix in shared} == {prefix: fresh[prefix] for prefix in shared}


@pytest.fixture(scope="module")
def chunked(start_engine: Any, asynchronous: bool) -> Any:
    """An engine that reads a prompt 60 tokens at a time."""
    sizes = {"block_size": 32, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    return start_engine("static", {"length": 3}, asynchronous=asynchronous, **sizes)


def test_the_draft_reads_a_prompt_that_comes_in_chunks(engine: Any, chunked: Any, recorded: Drafts) -> None:
    long = (PROMPT * 20)[:150]
    generate(engine, [long], 30)
    with recording(chunked) as in_chunks:
        generate(chunked, [long], 30)
    shared = common(in_chunks, recorded)
    assert len(shared) >= 8
    assert {prefix: in_chunks[prefix] for prefix in shared} == {prefix: recorded[prefix] for prefix in shared}


def test_a_backlog_that_no_pass_can_read_ends_speculation_for_that_request(chunked: Any, asynchronous: bool) -> None:
    with recording(chunked) as drafts:
        generate(chunked, [PROMPT], 110, switch(chunked, {0: 0, 80: 3}))
        behind = dict(drafts)
        drafts.clear()
        generate(chunked, [PROMPT[:5]], 20)
    # The drafting that found it out is the only one, or the last but one where the next has been planned by then.
    assert len(behind) <= 1 + asynchronous
    assert len(drafts) > 3
