"""Policies on recorded traces with any step costs: one cell after the other, with what an oracle would reach."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from dsde.bench.cell import Scene
from dsde.bench.contender import AUTOREGRESSIVE, LENGTHS, SCHEDULE, Contender
from dsde.bench.progress import Progress
from dsde.bench.replay_options import ReplayOptions, only
from dsde.control.controller import Controller
from dsde.control.replay import Outcome, StepCosts, replay, replay_oracle
from dsde.control.trace import Trace

__all__ = ["ORACLES", "Replayed", "Replays", "halves"]

ORACLES = {"oracle: acceptances": "acceptances", "oracle: chances": "chances"}
"""Row of the table -> what that oracle knows."""
FIRST_GUESS = 3
"""Tokens per request and step that an oracle is taken to reach, until it has been tried."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """One policy or oracle in one cell: a trace, a cost model and a scene. Ratios are of tokens per second.

    static-opt: the best fixed length of the cell, in hindsight. oracle: knows which slots will be accepted; chances:
    knows how likely each is to be. The rest as in `dsde.control.replay.Outcome`; None for an oracle under a moving
    load, which is put together from one replay per batch size.
    """

    trace: str
    cost: str
    scene: Scene
    policy: str
    tokens_per_s: float
    ratio_to_autoregressive: float
    ratio_to_static_opt: float | None = None
    ratio_to_oracle: float | None = None
    ratio_to_oracle_chances: float | None = None
    is_static_opt: bool = False
    steps: int | None = None
    tokens: int | None = None
    mean_acceptance_length: float | None = None
    acceptance_rate: float | None = None
    wasted_draft_share: float | None = None
    off_share: float | None = None
    draft_steps: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """One entry of the JSON file's `cells`."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "scene"}
        scene = self.scene
        where = {"trace": own.pop("trace"), "cost": own.pop("cost"), "batch": scene.batch}
        return {**where, "temperature": scene.temperature, "workload": scene.workload, **own}


def halves(trace: Trace) -> tuple[Trace, Trace]:
    """(tuning half, reported half): every second request of each workload goes to the other half."""
    order = sorted(range(len(trace.requests)), key=lambda index: trace.requests[index].workload)
    return trace.only(sorted(order[::2])), trace.only(sorted(order[1::2]))


@dataclass(frozen=True, slots=True)
class _Cell:
    """tuning: requests that policies learn from before they are measured; None for a cold start."""

    trace: str
    cost: str
    costs: StepCosts
    scene: Scene
    tuning: Trace | None
    reported: Trace


class Replays:
    """Replays the options' contenders; what it has at any time can be read, also after an interruption."""

    def __init__(self, chosen: ReplayOptions, progress: Progress) -> None:
        self._chosen, self._progress = chosen, progress
        self._fixed = [one for one in chosen.contenders if one.length is not None]
        self._profiles: dict[tuple[str, str, Scene], int] = {}
        self._started = time.monotonic()
        self._done = 0
        self._per_cell = len(chosen.contenders) + (len(ORACLES) if chosen.oracle else 0)
        self._total = self._per_cell * len(chosen.traces) * len(chosen.costs) * len(chosen.scenes)
        self.results: list[Replayed] = []

    def run(self) -> None:
        """Replay every cell."""
        for cell in self._cells():
            self.results += self._cell(cell)

    def _cells(self) -> Iterator[_Cell]:
        for name, trace in self._chosen.traces.items():
            for cost, costs in self._chosen.costs.items():
                for scene in self._chosen.scenes:
                    requests = only(trace, scene)
                    tuning, reported = halves(requests) if self._chosen.held_out else (None, requests)
                    yield _Cell(name, cost, costs, scene, tuning, reported)

    def _cell(self, cell: _Cell) -> list[Replayed]:
        found: dict[str, Outcome] = {}
        for contender in self._chosen.contenders:
            found[contender.label] = outcome = self._replay(cell, self._ready(cell, contender))
            self._say(cell, contender.label, outcome.tokens_per_s)
        fixed = [one.label for one in self._fixed]
        best = max(fixed, key=lambda label: found[label].tokens_per_s, default=None)
        rows = [_row(cell, label, outcome) for label, outcome in found.items()]
        if self._chosen.oracle:
            rows += self._oracles(cell)
        speed = {row.policy: row.tokens_per_s for row in rows}
        ceilings = [speed.get(row) for row in ORACLES]
        return [
            replace(
                row,
                ratio_to_autoregressive=row.tokens_per_s / speed[AUTOREGRESSIVE],
                ratio_to_static_opt=None if best is None else row.tokens_per_s / speed[best],
                ratio_to_oracle=_ratio(row.tokens_per_s, ceilings[0]),
                ratio_to_oracle_chances=_ratio(row.tokens_per_s, ceilings[1]),
                is_static_opt=row.policy == best,
            )
            for row in rows
        ]

    def _replay(self, cell: _Cell, contender: Contender) -> Outcome:
        chosen, trace = self._chosen, cell.reported
        policy = contender.policy or AUTOREGRESSIVE
        controller = Controller(
            policy,
            contender.settings,
            capacity=max(cell.scene.load),
            max_length=chosen.length,
            trims=chosen.trims,
        )
        common: dict[str, Any] = {"trims": chosen.trims, "controller": controller}
        if policy not in (AUTOREGRESSIVE, "static"):
            if cell.tuning is not None:
                replay(policy, cell.tuning, cell.costs, self._load(cell, cell.tuning), seed=chosen.seed + 1, **common)
            elif chosen.warmup:
                size = cell.scene.load[0]
                replay(policy, trace, cell.costs, size, steps=chosen.warmup, seed=chosen.seed + 1, **common)
        return replay(policy, trace, cell.costs, self._load(cell, trace), seed=chosen.seed, **common)

    def _load(self, cell: _Cell, trace: Trace) -> list[tuple[int, int]]:
        return [(size, self._chosen.work.of(size, trace)) for size in cell.scene.load]

    def _ready(self, cell: _Cell, contender: Contender) -> Contender:
        """The contender; a schedule without a table gets what is best at each batch size of the tuning half."""
        if contender.policy != SCHEDULE or contender.settings:
            return contender
        table = {size: self._profile(cell, size) for size in dict.fromkeys(cell.scene.load)}
        return replace(contender, settings={"table": table})

    def _profile(self, cell: _Cell, size: int) -> int:
        """The best fixed length at one batch size, 0 where nothing beats plain decoding."""
        scene = Scene((size,), cell.scene.temperature, cell.scene.workload)
        key = cell.trace, cell.cost, scene
        if key not in self._profiles:
            profiled = replace(cell, scene=scene, tuning=None, reported=cell.tuning or cell.reported)
            lengths = [0, *(one.length for one in self._fixed if one.length)]
            if len(lengths) == 1:
                lengths += [length for length in LENGTHS if length <= self._chosen.length]
            speeds = {
                length: self._replay(profiled, Contender(f"static-{length}", "static", {"length": length})).tokens_per_s
                for length in lengths
            }
            self._profiles[key] = max(speeds, key=speeds.__getitem__)
        return self._profiles[key]

    def _oracles(self, cell: _Cell) -> list[Replayed]:
        load = self._load(cell, cell.reported)
        rows: list[Replayed] = []
        for label, knows in ORACLES.items():
            if rows and cell.scene.temperature == 0.0:
                # A greedy slot's chance is one or nought: both oracles know the same.
                rows.append(replace(rows[0], policy=label))
            else:
                stages = [(tokens, self._oracle(cell, knows, size, tokens)) for size, tokens in load]
                speed = sum(tokens for tokens, _ in stages) / sum(tokens / one.tokens_per_s for tokens, one in stages)
                if len(stages) == 1:
                    rows.append(_row(cell, label, stages[0][1]))
                else:
                    rows.append(Replayed(cell.trace, cell.cost, cell.scene, label, speed, 1.0))
            self._say(cell, label, rows[-1].tokens_per_s)
        return rows

    def _oracle(self, cell: _Cell, knows: str, size: int, tokens: int) -> Outcome:
        """The oracle over about as many tokens as the policies decode: a short replay says how many steps these are."""
        common = {"seed": self._chosen.seed}
        steps = max(1, tokens // (FIRST_GUESS * size))
        tried = replay_oracle(knows, cell.reported, cell.costs, size, steps=steps, passes=2, **common)
        steps = max(1, round(tokens / (size * tried.mean_acceptance_length)))
        return replay_oracle(knows, cell.reported, cell.costs, size, steps=steps, **common)

    def _say(self, cell: _Cell, who: str, speed: float) -> None:
        self._done += 1
        left = (time.monotonic() - self._started) / self._done * (self._total - self._done)
        scene = cell.scene
        where = f"{cell.trace}, {cell.cost} costs, batch {scene.batch}, T={scene.temperature:g}, {scene.workload}"
        self._progress.ran(f"{where}: {who}", f"{speed:.1f} tokens/s", self._done, self._total, left)


def _row(cell: _Cell, label: str, outcome: Outcome) -> Replayed:
    figures: Mapping[str, Any] = {
        name: getattr(outcome, name)
        for name in (
            *("tokens_per_s", "steps", "tokens", "mean_acceptance_length", "acceptance_rate"),
            *("wasted_draft_share", "off_share", "draft_steps"),
        )
    }
    return Replayed(cell.trace, cell.cost, cell.scene, label, ratio_to_autoregressive=1.0, **figures)


def _ratio(speed: float, other: float | None) -> float | None:
    return None if other is None else speed / other
