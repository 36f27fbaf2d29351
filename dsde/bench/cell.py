"""What is measured: a cell of the benchmark, one run in it, and what the runs of all its rounds come to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["Cell", "Counts", "Result", "Run", "Scene", "geometric_mean", "results"]

FEWEST_REQUESTS = 4
"""Requests of one run; a smaller batch decodes several times."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A cell without its draft: one run of the engine without a drafter serves the cells of all drafts.

    load: requests that decode together, one number, or several in turn for a run whose load moves.
    """

    load: tuple[int, ...]
    temperature: float
    workload: str

    @property
    def waves(self) -> int:
        """How often a run starts afresh with other requests, so that it says more than what a few of them are like."""
        return -(-FEWEST_REQUESTS // max(self.load))

    @property
    def requests(self) -> int:
        """Prompts of one run."""
        return self.waves * max(self.load)

    @property
    def batch(self) -> int | str:
        """The batch size; for a moving load all of them, as in 1-4-16."""
        return self.load[0] if len(self.load) == 1 else "-".join(map(str, self.load))


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: a scene and the draft, named by its quality."""

    scene: Scene
    draft: str


@dataclass(slots=True)
class Counts:
    """What the controller's observations sum to. Tokens, unless said otherwise.

    steps: engine steps. drafting: verifications of one request's drafts. verified, accepted: draft tokens.
    slots: draft tokens that were computed, D for each request of a batch whose longest length is D.
    draft_steps: forward passes of the draft model.
    """

    steps: int = 0
    drafting: int = 0
    verified: int = 0
    accepted: int = 0
    slots: int = 0
    draft_steps: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Counts)))


@dataclass(frozen=True, slots=True)
class Run:
    """One contender's run in one round.

    tokens: generated in the measured time. seconds: of decoding, with the batch full. latency_s: mean over the requests
    of the time in which one gets its share of the tokens, at its own rate.
    """

    tokens: float
    seconds: float
    latency_s: float
    counts: Counts

    @property
    def tokens_per_s(self) -> float:
        """Decode throughput of the whole batch."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Result:
    """One contender in one cell, over its rounds. Ratios and rates are geometric means over rounds, None without any.

    mean_acceptance_length: tokens of a verification with drafts, bonus token included; 1 without drafts.
    acceptance_rate: accepted of the verified draft tokens. wasted_draft_share: share of the computed draft tokens that
    were not accepted. draft_steps: forward passes of the draft model, all rounds together.
    """

    cell: Cell
    policy: str
    tokens_per_s: float
    mean_latency_s: float
    ratio_to_autoregressive: float | None
    ratio_to_static_opt: float | None
    mean_acceptance_length: float
    acceptance_rate: float | None
    wasted_draft_share: float | None
    draft_steps: int
    rounds: int

    def to_dict(self) -> dict[str, Any]:
        """One entry of the JSON file's `cells`."""
        scene = self.cell.scene
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "cell"}
        where = {"batch": scene.batch, "temperature": scene.temperature, "draft": self.cell.draft}
        return {**where, "workload": scene.workload, **own}


def geometric_mean(values: Iterable[float]) -> float | None:
    """exp of the mean logarithm; None for no values."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None


def results(
    cell: Cell, runs: Mapping[str, Sequence[Run | None]], baseline: str, fixed: Iterable[str]
) -> tuple[list[Result], str | None]:
    """(results, static-opt) of a cell. runs: contender -> its run in each round, None where it did not take part.

    baseline: the contender that ratio_to_autoregressive is against. fixed: the fixed lengths among the contenders.
    static-opt is the one with the best ratio to the baseline over all rounds, so it is picked in hindsight; None
    without a fixed length.
    """
    best = static_opt(runs, baseline, fixed)
    found = []
    for policy, own in runs.items():
        took_part = [run for run in own if run is not None]
        if not took_part:
            continue
        counts = sum((run.counts for run in took_part), Counts())
        drafted = counts.drafting > 0
        found.append(
            Result(
                cell=cell,
                policy=policy,
                tokens_per_s=geometric_mean(run.tokens_per_s for run in took_part) or 0.0,
                mean_latency_s=geometric_mean(run.latency_s for run in took_part) or 0.0,
                ratio_to_autoregressive=_ratio(own, runs[baseline]),
                ratio_to_static_opt=None if best is None else _ratio(own, runs[best]),
                mean_acceptance_length=1.0 + counts.accepted / counts.drafting if drafted else 1.0,
                acceptance_rate=counts.accepted / counts.verified if counts.verified else None,
                # The first verification's drafts were computed before the clock started, hence the floor.
                wasted_draft_share=max(0.0, 1.0 - counts.accepted / counts.slots) if counts.slots else None,
                draft_steps=counts.draft_steps,
                rounds=len(took_part),
            )
        )
    return found, best


def static_opt(runs: Mapping[str, Sequence[Run | None]], baseline: str, fixed: Iterable[str]) -> str | None:
    """The fixed length with the best ratio to the baseline; one that sat out rounds is compared too."""
    ratios = {name: _ratio(runs[name], runs[baseline]) for name in fixed if name in runs}
    measured = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    return max(measured, key=measured.__getitem__) if measured else None


def _ratio(runs: Sequence[Run | None], others: Sequence[Run | None]) -> float | None:
    """Geometric mean of the throughput ratios, round by round: both sides of one ratio ran minutes apart at most."""
    pairs = zip(runs, others, strict=False)
    return geometric_mean(one.tokens_per_s / other.tokens_per_s for one, other in pairs if one and other)
