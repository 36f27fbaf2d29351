from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from dsde.bench import rounds as rounds_module
from dsde.bench.cell import Cell, Counts, Run, Scene
from dsde.bench.contender import Contender, contenders
from dsde.bench.progress import Progress
from dsde.bench.rounds import Plan, Rounds
from dsde.bench.workload import Prompt

SPEED = {"static-1": 12.0, "static-2": 13.0, "static-3": 10.0, "static-4": 9.0, "static-6": 8.0}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class FakeEngine:
    """Answers at the contender's SPEED, 10 tokens/s without one; a run takes as long as its decoding."""

    def __init__(self, name: str, log: list[Any], clock: Clock) -> None:
        self.name, self.log, self.clock = name, log, clock
        self.contender: Contender | None = None

    def choose(self, contender: Contender) -> None:
        self.contender = contender

    def run(
        self,
        prompts: Sequence[Any],
        load: Sequence[int],
        tokens: float,
        temperature: float,
        on_step: Any = None,
        **_: Any,
    ) -> Run:
        assert self.contender is not None
        total = tokens * sum(load)
        seconds = total / (10.0 if self.name == "plain" else SPEED.get(self.contender.label, 10.0))
        self.clock.now += seconds
        if tokens != rounds_module.OPENING_TOKENS:
            settings = dict(self.contender.settings)
            self.log.append((self.name, self.contender.label, settings, tuple(p.token_ids[0] for p in prompts), tokens))
        return Run(total, seconds, seconds, Counts())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rounds_module.time, "monotonic", clock.monotonic)
    return clock


def bench(clock: Clock, names: list[str], batches: Sequence[int] = (2,), **plan: Any) -> tuple[Rounds, list[Any]]:
    log: list[Any] = []
    scenes = [Scene((batch,), 0.0, "code") for batch in batches]
    texts: dict[str, int] = {}
    rounds = Rounds(
        Plan(scenes, contenders(names), **{"rounds": 2, "tokens": 20, **plan}),
        FakeEngine("plain", log, clock),  # type: ignore[arg-type]
        {draft: FakeEngine(draft, log, clock) for draft in ("high", "low")},  # type: ignore[misc]
        Progress(Console(file=io.StringIO())),
        encode=lambda asked: [
            Prompt(one.workload, [texts.setdefault(one.chat[-1]["content"], len(texts))]) for one in asked
        ],
    )
    rounds.measure()
    return rounds, log


def test_contenders_take_turns_on_the_same_prompts(clock: Clock) -> None:
    rounds, log = bench(clock, ["static-1", "paper"])
    turn = [
        ("plain", "autoregressive"),
        ("high", "static-1"),
        ("high", "paper"),
        ("low", "static-1"),
        ("low", "paper"),
    ]
    assert [entry[:2] for entry in log] == turn * 2
    assert [entry[3] for entry in log] == [(0, 1, 2, 3)] * 5 + [(4, 5, 6, 7)] * 5
    assert {entry[4] for entry in log} == {20}
    by_policy = {(one.cell.draft, one.policy): one for one in rounds.results}
    assert by_policy["low", "static-1"].ratio_to_autoregressive == pytest.approx(1.2)
    assert by_policy["low", "paper"].ratio_to_static_opt == pytest.approx(10 / 12)
    assert by_policy["high", "autoregressive"].rounds == 2


def test_a_policy_that_learns_has_a_lesson_on_other_prompts_before_it_counts(clock: Clock) -> None:
    rounds, log = bench(clock, ["static-1", "goodput"])
    order = ["autoregressive", *["static-1", "goodput", "goodput"] * 2, "autoregressive", *["static-1", "goodput"] * 2]
    assert [entry[1] for entry in log] == order
    lessons = [entry[3] for entry in log if entry[1] == "goodput"][0::2][:2]
    assert set(lessons) == {lessons[0]}
    assert not {text for entry in log if entry[3] not in lessons for text in entry[3]} & set(lessons[0])
    assert {one.rounds for one in rounds.results} == {2}
    _, log = bench(clock, ["static-1", "goodput"], cold=True)
    assert [entry[1] for entry in log] == ["autoregressive", *["static-1", "goodput"] * 2] * 2


def test_the_schedule_holds_what_was_best_so_far(clock: Clock) -> None:
    _, log = bench(clock, ["batch_schedule", "static-1", "static-2"], batches=(1, 4), rounds=1)
    tables = [entry[2]["table"] for entry in log if entry[1] == "batch_schedule" and entry[0] == "high"]
    assert tables == [{1: 2}, {1: 2, 4: 2}]


def test_a_schedule_of_slow_lengths_rests(clock: Clock) -> None:
    _, log = bench(clock, ["batch_schedule", "static-4"], rounds=1)
    assert [entry[2]["table"] for entry in log if entry[1] == "batch_schedule"] == [{2: 0}] * 2


def test_with_a_time_limit_hopeless_lengths_sit_out(clock: Clock) -> None:
    # 2 tokens x 10 at 10 tokens/s: a run takes 4 s or so, and there is time for more than two rounds.
    _, log = bench(clock, ["static-1", "static-2", "static-3", "static-4", "static-6"], seconds=1000.0)
    high = [entry[1] for entry in log if entry[0] == "high"]
    # 10 and 9 are 15 % behind 13 twice in a row: 6 is never tried, and round 2 has only what is left.
    assert high == ["static-1", "static-2", "static-3", "static-4", "static-1", "static-2"]


def test_without_a_time_limit_everybody_takes_part(clock: Clock) -> None:
    _, log = bench(clock, ["static-1", "static-2", "static-3", "static-4", "static-6"])
    assert len([entry for entry in log if entry[0] == "high"]) == 10


def test_tokens_and_rounds_fit_into_the_time(clock: Clock) -> None:
    # A token for both requests takes 0.2 s, a round has 5 runs: 100 s hold 20 tokens five times over.
    rounds, log = bench(clock, ["static-1", "paper"], seconds=100.0, rounds=50)
    assert {entry[4] for entry in log} == {20}
    assert 80.0 < clock.now <= 100.0
    assert not rounds.unfinished
    # In 14 s there is one round of shorter runs: 12.4 s after 1.6 s of opening, 2.48 s a run.
    clock.now = 0.0
    rounds, log = bench(clock, ["static-1", "paper"], seconds=14.0, rounds=50)
    assert len(log) == 5
    assert {entry[4] for entry in log} == {12}
    assert clock.now <= 14.0


def test_no_run_begins_after_the_time(clock: Clock) -> None:
    rounds, log = bench(clock, ["static-1", "paper"], seconds=5.5)
    assert rounds.unfinished
    assert 0 < len(log) < 5
    assert {one.policy for one in rounds.results} == {"autoregressive", "static-1"}


def test_observers_get_a_run_of_their_own(clock: Clock) -> None:
    log: list[Any] = []
    asked: list[tuple[Cell, str]] = []
    scene = Scene((1,), 0.0, "mix")
    rounds = Rounds(
        Plan([scene], contenders(["static-1"]), rounds=1, tokens=5),
        FakeEngine("plain", log, clock),  # type: ignore[arg-type]
        {"high": FakeEngine("high", log, clock)},  # type: ignore[dict-item]
        Progress(Console(file=io.StringIO())),
        observers={4: lambda cell, label: asked.append((cell, label))},
        encode=lambda questions: [Prompt("mix", [0])] * len(questions),
    )
    rounds.measure()
    assert [entry[1] for entry in log] == ["autoregressive", "static-1", "static-4, observed"]
    assert log[-1][2] == {"length": 4}
    assert asked == [(Cell(scene, "high"), "static-4, observed")]
    assert [one.policy for one in rounds.results] == ["autoregressive", "static-1"]
