"""The benchmark on real engines: the tiny pair, so the figures mean nothing, but everything behind them runs."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import VOCABULARY

pytestmark = pytest.mark.slow

TOKENS = 16
BATCHES = (1, 3)


@pytest.fixture(scope="module")
def engines(tiny_pair: tuple[str, str]) -> Iterator[tuple[Any, Any]]:
    """(the target alone, the target with its draft)."""
    from dsde.bench.engines import Engine, engine_config
    from dsde.config import DsdeConfig

    base = DsdeConfig.model_validate({"model": {"dtype": "float32", "max_model_len": 256}})
    config = engine_config(base, *tiny_pair, batch=max(BATCHES), written=400)
    further = {"skip_tokenizer_init": True}
    started = [Engine(config, plain=True, further=further), Engine(config, further=further)]
    yield started[0], started[1]
    for engine in started:
        engine.shutdown()


def prompts(count: int) -> list[Any]:
    from dsde.bench.workload import Prompt

    return [Prompt("made-up", [0, *(2 + (i + j) % (VOCABULARY - 2) for j in range(3 + i))]) for i in range(count)]


def test_a_run_writes_exactly_its_tokens(engines: tuple[Any, Any]) -> None:
    from dsde.bench.contender import contenders

    _, drafted = engines
    fixed = contenders(["static-3"])[1]
    seen: list[int] = []
    for engine in engines:
        engine.choose(fixed)
        run = engine.run(prompts(3), (1, 3, 2), TOKENS, 0.0, lambda observation, plan: seen.append(len(plan.lengths)))
        assert run.tokens == (1 + 3 + 2) * TOKENS
        assert run.seconds > 0
        # The latency is one request's: it lived through three loads, and waited for nobody but itself at load 1.
        assert run.seconds / 3 < run.latency_s < 3 * run.seconds
    assert run.counts.steps == len(seen)
    assert set(seen) == {1, 2, 3}
    # Every step drafts three tokens for everyone and verifies those of the step before.
    assert run.counts.draft_steps == 3 * run.counts.steps
    assert run.counts.verified == 3 * run.counts.drafting
    assert 0 < run.counts.accepted < run.counts.verified
    assert drafted._scheduler.controller.live == 0
    assert not drafted._engine.has_unfinished_requests()


def test_a_request_that_reaches_the_models_length_is_replaced(engines: tuple[Any, Any]) -> None:
    plain, _ = engines
    run = plain.run(prompts(1), (1,), 400, 0.0)
    assert run.tokens == 400


def test_rounds_measure_every_contender(engines: tuple[Any, Any], tmp_path: Path) -> None:
    from rich.console import Console

    from dsde.bench.cell import Scene
    from dsde.bench.contender import contenders
    from dsde.bench.plot import draw
    from dsde.bench.progress import Progress
    from dsde.bench.record import Recorder
    from dsde.bench.report import write_json
    from dsde.bench.rounds import Plan, Rounds
    from dsde.bench.trail import Trails, acceptance
    from dsde.control.policies import policy_names

    plain, drafted = engines
    policies = [name for name in policy_names() if name not in ("static", "autoregressive")]
    everybody = contenders(["static-0", "static-1", "static-3", *policies])
    scenes = [Scene((batch,), temperature, "mix") for batch in BATCHES for temperature in (0.0, 1.0)]
    output, trails, recorder = io.StringIO(), Trails(), Recorder(length=3)
    rounds = Rounds(
        Plan(scenes, everybody, rounds=2, tokens=TOKENS),
        plain,
        {"high": drafted},
        Progress(Console(file=output, width=200)),
        trails.watch,
        {4: trails.observe, 3: recorder.observe},
        encode=lambda questions: prompts(len(questions)),
    )
    rounds.measure()

    results = {(one.cell.scene, one.policy): one for one in rounds.results}
    assert len(results) == len(scenes) * len(everybody)
    for scene in scenes:
        own = {policy: result for (where, policy), result in results.items() if where == scene}
        assert {result.rounds for result in own.values()} == {2}
        assert own["autoregressive"].ratio_to_autoregressive == pytest.approx(1.0)
        assert (own["autoregressive"].draft_steps, own["static-0"].draft_steps) == (0, 0)
        assert own["static-0"].mean_acceptance_length == 1.0
        assert own["static-0"].wasted_draft_share is None
        [best] = [label for cell, label in rounds.best.items() if cell.scene == scene]
        assert own[best].ratio_to_static_opt == pytest.approx(1.0)
        assert 1.0 < own["static-3"].mean_acceptance_length < 4.0
        assert 0.0 < own["static-3"].wasted_draft_share < 1.0
    lines = output.getvalue().splitlines()
    lessons = len(scenes)  # one for each, of the one contender that learns
    assert len(lines) == len(scenes) * (len(everybody) + 2) * 2 + lessons
    assert lines[-1].endswith(f"({len(lines)} of {len(lines)}, about 0 s left)")

    write_json(tmp_path / "bench.json", rounds.results, {"cores": 1})
    written = json.loads((tmp_path / "bench.json").read_text())
    assert set(written) == {"cells", "machine"}
    assert set(written["cells"][0]) == {
        *("batch", "temperature", "draft", "workload", "policy", "tokens_per_s", "mean_latency_s"),
        *("ratio_to_autoregressive", "ratio_to_static_opt", "mean_acceptance_length", "acceptance_rate"),
        *("wasted_draft_share", "draft_steps", "rounds"),
    }
    for values, shares in acceptance(trails.observed()["high", 0.0]).values():
        assert len(values) > 0
        assert 0 <= shares.min() < shares.max() <= 1
    trace = recorder.trace({})
    assert len(trace.requests) == sum(scene.requests for scene in scenes) * 2
    assert {len(one.top_prob) for request in trace.requests for one in request.rounds} == {3}
    files = draw(tmp_path / "pictures", rounds.results, trails)
    assert {file.name for file in files} >= {
        "batch-high-T0.png",
        "acceptance-high-T1.svg",
        "lengths-high-T0-mix-b3.png",
    }
    assert min(file.stat().st_size for file in files) > 5000


def test_each_contender_keeps_a_controller_of_its_own(engines: tuple[Any, Any]) -> None:
    from dsde.bench.contender import contenders

    _, drafted = engines
    one, other = contenders(["paper", "reference"])[1:]
    drafted.choose(one)
    first = drafted._scheduler.controller
    drafted.choose(other)
    assert drafted._scheduler.controller is not first
    drafted.choose(one)
    assert drafted._scheduler.controller is first
    assert first.policy.name == "paper"
