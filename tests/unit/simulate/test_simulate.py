"""The simulator: a model that can be checked by hand, determinism by seed, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsde.cli import main
from dsde.control.replay import StepCosts
from dsde.control.trace import synthesize
from dsde.routing.request import Request
from dsde.simulate.policies import POLICIES
from dsde.simulate.replica import Engine, Lengths, Replica
from dsde.simulate.run import Scenario, Setting, simulate
from dsde.simulate.workload import MIXES, Arrival, Group, arrivals, groups

NEVER = Group("never", ((0,),), (0.0,) * 8)
ALWAYS = Group("always", ((8,),), (1.0,) * 8)
COSTS = StepCosts(20.0, 0.1, 1.0)


def replica(slots: int = 32, step_tokens: int = 2048) -> Replica:
    engine = Engine(slots=slots, step_tokens=step_tokens)
    return Replica(engine, COSTS, Lengths([NEVER, ALWAYS], COSTS, engine.longest), classes=2)


def arrival(number: int, output: int, group: int = 0, prompt: int = 10, blocks: tuple[int, ...] = ()) -> Arrival:
    path = (NEVER, ALWAYS)[group].paths[0]
    return Arrival(number, 0.0, Request(("all",), prompt, 100, blocks), output, group, path, 0)


def steps(one: Replica) -> list[float]:
    times = []
    while one.busy:
        times.append(one.begin())
        one.end()
    return times


def test_a_lone_request_reads_its_prompt_and_then_decodes() -> None:
    one = replica()
    one.waiting.append(arrival(0, output=4))
    # The prompt's step emits the first token.
    assert steps(one) == pytest.approx([21.0, 20.1, 20.1, 20.1])


def test_drafts_that_are_always_accepted_save_steps() -> None:
    one = replica()
    one.waiting.append(arrival(0, output=10, group=1))
    # Eight drafts and the bonus token in one step: 20 + 0.1 * 9 + 8 draft steps.
    assert steps(one) == pytest.approx([21.0, 28.9])


def test_a_mixed_batch_drafts_in_lock_step_and_counts_who_waits() -> None:
    one = replica()
    one.waiting.extend([arrival(0, output=10, group=1), arrival(1, output=2)])
    assert steps(one) == pytest.approx([22.0, 20 + 0.1 * 10 + 8])
    assert one.counted.waited == pytest.approx(8.0)


def test_a_full_batch_makes_wait_and_long_prompts_are_read_in_parts() -> None:
    one = replica(slots=1, step_tokens=100)
    one.waiting.extend([arrival(0, output=2, prompt=150), arrival(1, output=1)])
    assert steps(one) == pytest.approx([30.0, 25.0, 20.1, 21.0])


def test_a_cached_prefix_is_not_read_again() -> None:
    one = replica()
    one.waiting.append(arrival(0, output=1, prompt=100, blocks=(5,)))
    one.begin()
    one.end()
    one.waiting.append(arrival(1, output=1, prompt=100, blocks=(5,)))
    assert one.begin() == pytest.approx(20 + 0.1 * 36)


def test_publications_tell_what_is_there() -> None:
    one = replica(slots=2)
    one.waiting.extend([arrival(n, output=50) for n in range(5)])
    one.begin()
    one.end()
    stats = one.stats()
    assert (stats.running, stats.waiting, stats.slots, stats.verify_ms) == (2, 3, 2, (20.0, 0.1))


@pytest.mark.parametrize("mix", list(MIXES))
def test_mixes_are_drawn_from_the_seed(mix: str) -> None:
    recorded = groups(synthesize(requests=4, rounds=8, acceptance=0.6))
    one, same, other = (arrivals(MIXES[mix], recorded, 60, seed) for seed in (1, 1, 2))
    assert [(a.time, a.request, a.output) for a in one] == [(a.time, a.request, a.output) for a in same]
    assert [a.time for a in one] != [a.time for a in other]
    assert all(1 <= a.output <= a.request.max_tokens for a in one)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_run_is_the_same_again_and_serves_everybody(policy: str) -> None:
    recorded = groups(synthesize(requests=4, rounds=8, acceptance=0.7))
    scenario = Scenario(Setting(3, 0.7, "mixed", 200, 5, COSTS), recorded)
    first, again = simulate(policy, scenario), simulate(policy, scenario)
    assert first == again
    assert 0.0 < first.p50_ms <= first.p99_ms
    assert first.tokens_per_s > 0.0
    other = Scenario(Setting(3, 0.7, "mixed", 200, 6, COSTS), recorded)
    assert simulate(policy, other) != first


def test_requests_of_like_length_are_kept_together() -> None:
    recorded = [ALWAYS, NEVER]
    scenario = Scenario(Setting(4, 0.7, "stragglers", 400, 0, COSTS), recorded)
    ours, theirs = simulate("stability_aware", scenario), simulate("two_random_choices", scenario)
    assert ours.straggler_share < 0.5 * theirs.straggler_share
    assert ours.p99_ms < theirs.p99_ms


def test_the_command_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, drawn, trace = tmp_path / "out.json", tmp_path / "out.png", tmp_path / "t.jsonl.gz"
    synthesize(requests=4, rounds=8, acceptance=0.7).write(trace)
    options = ["--requests", "150", "--replicas", "2", "--runs", "2", "--seed", "3", "--trace", str(trace)]
    assert main(["simulate", *options, "--json", str(made), "--plot", str(drawn)]) == 0
    out = capsys.readouterr().out
    written: dict[str, Any] = json.loads(made.read_text())
    assert list(written["policies"]) == list(POLICIES)
    for name, figures in written["policies"].items():
        assert name in out
        assert {"p50_ms", "p99_ms", "tokens_per_s", "straggler_share"} <= set(figures)
        assert len(figures["p99_ms_by_seed"]) == 2
        assert sum(figures["p99_ms_by_seed"]) / 2 == pytest.approx(figures["p99_ms"], rel=1e-3)
        assert 0.0 <= figures["straggler_share"] <= 1.0
    simulated = written["simulated"]
    assert (simulated["replicas"], simulated["mix"], simulated["seeds"]) == (2, "mixed", [3, 4])
    assert drawn.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--mix", "odd"], "--mix odd: accepted: mixed, uniform"),
        (["--replicas", "0"], "--replicas 0: accepted: a whole number from 1 to 256"),
        (["--load", "often"], "--load often: accepted: a number above 0"),
        (["--policies", "best"], "--policies best: accepted: stability_aware, two_random_choices"),
        (["--machine", "abacus"], "--machine abacus: accepted: cpu"),
        (["--trace", "nowhere"], "--trace nowhere: there is no such file"),
    ],
)
def test_a_bad_option_is_one_line(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *options]) == 2
    assert said in capsys.readouterr().err
