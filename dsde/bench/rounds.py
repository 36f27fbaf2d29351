"""The measurement: contenders take turns, round by round, on the same prompts (A B C A B C ...).

A ratio is taken within a round, so both its sides ran within minutes of each other and a machine that changes its speed
changes both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dsde.bench import budget
from dsde.bench.cell import Cell, Result, Run, Scene, geometric_mean, results
from dsde.bench.contender import AUTOREGRESSIVE, SCHEDULE, Contender
from dsde.bench.engines import Engine, OnStep
from dsde.bench.progress import Progress
from dsde.bench.workload import Prompt, Question, questions

__all__ = ["Plan", "Rounds", "Watch"]

Watch = Callable[[Cell, str], OnStep | None]
"""(cell, contender) -> the observer of a run that begins."""

# Reads the round's prompts into the prefix cache, draft included, and meets every shape of the batch once.
_OPENER = Contender("static-1", "static", {"length": 1})
OPENING_TOKENS = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured. seconds: time for all of it, infinite where only rounds and tokens bound it.

    rounds: the most rounds of a scene. tokens: the most tokens per request in a run. cold: count a learning policy's
    first steps too, where otherwise it has one run of each cell before its runs count.
    """

    scenes: Sequence[Scene]
    contenders: Sequence[Contender]
    rounds: int
    tokens: int
    seconds: float = math.inf
    cold: bool = False


@dataclass(frozen=True, slots=True)
class _Turn:
    """One round of a scene. deadline: on the monotonic clock, of the whole benchmark. lesson: it does not count."""

    scene: Scene
    number: int
    prompts: Sequence[Prompt]
    tokens: int
    deadline: float
    lesson: bool = False


class _TimeIsUp(Exception):
    """No further run may begin."""


class Rounds:
    """Measures a plan on loaded engines; what it has at any time can be read, also after an interruption.

    plain: the engine without a drafter. drafted: draft -> engine. watch: observes the measured runs. observers: fixed
    length -> who observes one more run of it after each round, with the drafter's confidence, its speed left out.
    encode: questions -> prompts; by default the model's own chat template.
    """

    def __init__(
        self,
        plan: Plan,
        plain: Engine,
        drafted: Mapping[str, Engine],
        progress: Progress,
        watch: Watch | None = None,
        observers: Mapping[int, Watch] | None = None,
        encode: Callable[[Sequence[Question]], list[Prompt]] | None = None,
    ) -> None:
        self._plan = plan
        self._plain = plain
        self._drafted = drafted
        self._progress = progress
        self._watch = watch or (lambda cell, label: None)
        self._observers = observers or {}
        self._encode = encode or plain.encode
        self._others = [one for one in plan.contenders if one.label != AUTOREGRESSIVE]
        self._lengths = [one.length for one in self._others if one.length is not None]
        self._runs: dict[Cell, dict[str, list[Run | None]]] = {}
        self._spent: dict[Scene, list[float]] = {}
        self._unfinished = False

    @property
    def unfinished(self) -> bool:
        """Whether time was up before every cell had a whole round."""
        return self._unfinished

    @property
    def results(self) -> list[Result]:
        """Every contender in every cell measured so far."""
        fixed = self._fixed_labels()
        return [one for cell, runs in self._runs.items() for one in results(cell, runs, AUTOREGRESSIVE, fixed)[0]]

    @property
    def best(self) -> dict[Cell, str]:
        """static-opt of each cell."""
        fixed = self._fixed_labels()
        found = {cell: results(cell, runs, AUTOREGRESSIVE, fixed)[1] for cell, runs in self._runs.items()}
        return {cell: label for cell, label in found.items() if label is not None}

    def measure(self) -> None:
        """Run the plan, scene by scene; no run begins after the plan's time."""
        deadline = time.monotonic() + self._plan.seconds
        try:
            for index, scene in enumerate(self._plan.scenes):
                left = deadline - time.monotonic()
                share = left if math.isinf(left) else budget.shares(max(0.0, left), self._plan.scenes[index:])[0]
                self._scene(scene, time.monotonic() + share, share, deadline)
        except _TimeIsUp:
            self._unfinished = True

    def _scene(self, scene: Scene, ends: float, share: float, deadline: float) -> None:
        tokens = 0
        for number in range(self._plan.rounds):
            started = time.monotonic()
            prompts = self._encode(questions(scene.workload, number * scene.requests, scene.requests))
            setup_s, token_s = self._open(scene, prompts)
            if not tokens:
                left = share - (time.monotonic() - started)
                per_token = token_s * len(scene.load)
                runs = self._runs_per_round + self.lessons
                tokens = budget.tokens_that_fit(left, runs, setup_s, per_token, self._plan.tokens)
            self._round(_Turn(scene, number, prompts, tokens, deadline))
            took = time.monotonic() - started
            if time.monotonic() + took > ends:
                break

    def _open(self, scene: Scene, prompts: Sequence[Prompt]) -> tuple[float, float]:
        """Prepare all engines for the round; (seconds of a run outside its decoding, seconds per token), estimated."""
        setup = token = 0.0
        for engine in (self._plain, *self._drafted.values()):
            engine.choose(_OPENER)
            started = time.monotonic()
            run = engine.run(prompts, (max(scene.load),), OPENING_TOKENS, scene.temperature, waves=scene.waves)
            setup = max(setup, time.monotonic() - started - run.seconds)
            token = max(token, run.seconds / OPENING_TOKENS)
        # From now on the prefix cache holds about half of each prompt.
        return setup / 2, token

    def _round(self, turn: _Turn) -> None:
        baseline = next(one for one in self._plan.contenders if one.label == AUTOREGRESSIVE)
        run = self._run(self._plain, baseline, None, turn)
        for draft, engine in self._drafted.items():
            cell = Cell(turn.scene, draft)
            runs = self._runs.setdefault(cell, {one.label: [] for one in self._plan.contenders})
            runs[AUTOREGRESSIVE].append(run)
            for contender in self._others:
                ready = self._ready(contender, cell)
                if ready is not None and ready.learns and turn.number == 0 and not self._plan.cold:
                    self._run(engine, ready, cell, self._lesson(turn))
                runs[contender.label].append(None if ready is None else self._run(engine, ready, cell, turn))
            for length, observer in self._observers.items():
                observed = Contender(f"static-{length}, observed", "static", {"length": length})
                self._run(engine, observed, cell, turn, observer)

    def _lesson(self, turn: _Turn) -> _Turn:
        """The turn on prompts that no round measures, unless they all are."""
        count = turn.scene.requests
        prompts = self._encode(questions(turn.scene.workload, self._plan.rounds * count, count))
        return replace(turn, prompts=prompts, lesson=True)

    def _run(
        self, engine: Engine, contender: Contender, cell: Cell | None, turn: _Turn, observer: Watch | None = None
    ) -> Run:
        """One run; with an observer of its own it is one that is looked at and not measured."""
        if time.monotonic() > turn.deadline:
            raise _TimeIsUp
        scene = turn.scene
        engine.choose(contender)
        watch = observer or self._watch
        on_step = None if cell is None or turn.lesson else watch(cell, contender.label)
        started = time.monotonic()
        run = engine.run(
            turn.prompts,
            scene.load,
            turn.tokens,
            scene.temperature,
            on_step,
            waves=scene.waves,
            confidence=observer is not None,
        )
        self._spent.setdefault(scene, []).append(time.monotonic() - started)
        where = f"batch {scene.batch}, T={scene.temperature:g}, {scene.workload}"
        what = f"{where}, round {turn.number + 1}, {turn.tokens} tokens"
        who = contender.label if cell is None else f"{cell.draft} draft, {contender.label}"
        who += ", learning" if turn.lesson else ""
        done, total, left = self._ahead(turn)
        self._progress.ran(f"{what}: {who}", f"{run.tokens_per_s:.1f} tokens/s", done, total, left)
        return run

    def _ready(self, contender: Contender, cell: Cell) -> Contender | None:
        """The contender with what it needs to know, None where it sits this round out."""
        if contender.policy == SCHEDULE and not contender.settings:
            table = self._profile(cell)
            return replace(contender, settings={"table": table}) if table else None
        if contender.length is not None and not math.isinf(self._plan.seconds):
            ratios = {length: ratio for length, ratio in self._ratios(cell).items() if length > 0}
            if contender.length in budget.hopeless(ratios, self._lengths):
                return None
        return contender

    def _ratios(self, cell: Cell) -> dict[int, float]:
        """Fixed length -> throughput ratio to no speculation so far, in the rounds it ran; 1.0 for length 0."""
        runs = self._runs[cell]
        found = {0: 1.0}
        for contender in self._others:
            if contender.length is not None:
                pairs = zip(runs[contender.label], runs[AUTOREGRESSIVE], strict=False)
                ratio = geometric_mean(own.tokens_per_s / base.tokens_per_s for own, base in pairs if own and base)
                if ratio is not None:
                    found[contender.length] = ratio
        return found

    def _profile(self, cell: Cell) -> dict[int, int]:
        """Batch size -> the fixed length that was best so far, in cells like `cell` of any batch size."""
        profiled: dict[int, int] = {}
        for other in self._runs:
            alike = (other.draft, other.scene.temperature, other.scene.workload)
            if len(other.scene.load) == 1 and alike == (cell.draft, cell.scene.temperature, cell.scene.workload):
                ratios = self._ratios(other)
                if len(ratios) > 1:
                    profiled[other.scene.load[0]] = max(ratios, key=ratios.__getitem__)
        return profiled

    def _fixed_labels(self) -> list[str]:
        return [one.label for one in self._others if one.length is not None]

    @property
    def _runs_per_round(self) -> int:
        return 1 + len(self._drafted) * (len(self._others) + len(self._observers))

    @property
    def lessons(self) -> int:
        """Runs of each scene that teach those who learn and do not count."""
        return 0 if self._plan.cold else len(self._drafted) * sum(one.learns for one in self._others)

    def _ahead(self, turn: _Turn) -> tuple[int, int, float]:
        """(runs done, runs in all, seconds left) as far as one can tell now."""
        own = self._spent[turn.scene]
        timed = not math.isinf(turn.deadline)
        rounds = turn.number + 1 if timed else self._plan.rounds
        done = sum(map(len, self._spent.values()))
        here = max(0, rounds * self._runs_per_round + self.lessons - len(own))
        later = self._plan.scenes[list(self._plan.scenes).index(turn.scene) + 1 :]
        there = self._runs_per_round * (1 if timed else self._plan.rounds) + self.lessons
        weights = sum(budget.weight(scene) for scene in later) / budget.weight(turn.scene)
        left = sum(own) / len(own) * (here + weights * there)
        if timed:
            left = min(left, max(0.0, turn.deadline - time.monotonic()))
        return done, done + here + len(later) * there, left
