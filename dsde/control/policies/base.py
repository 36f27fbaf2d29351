"""What a policy is, and how its settings are read.

A rule over the history implements propose() and no more. A policy that learns overrides the hooks, whose defaults here
do nothing; a state of its own is kept per slot, and starts afresh whenever a slot starts to follow the policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, NamedTuple

from dsde.control.acceptance import Acceptance
from dsde.control.arrays import Floats, Ints
from dsde.control.cost import StepCost
from dsde.control.history import Newest, Recent
from dsde.control.records import DraftStop

__all__ = [
    "Batch",
    "Policy",
    "Proposal",
    "Registration",
    "Signals",
    "Step",
    "build",
    "check_flag",
    "check_number",
    "choices",
]


class Signals(NamedTuple):
    """Stability signals of B requests: scale_factor [B] and wvir [B], both float64."""

    scale_factor: Floats
    wvir: Floats

    @property
    def penalty(self) -> Floats:
        """SF * WVIR, [B]; a request is stable while it is at most 1."""
        return self.scale_factor * self.wvir


class Proposal(NamedTuple):
    """Speculation lengths of B requests, [B] int64 in draft tokens.

    lengths: each request's own prediction, 0 <= length <= its limit. caps: SL_cap; the request runs min(length, cap).
    stop: rule that may end the drafting earlier.
    """

    lengths: Ints
    caps: Ints
    stop: DraftStop | None = None


class Batch(NamedTuple):
    """The B requests of one policy that are about to draft, or have just drafted, and what the controller has learnt.

    rows: request id -> row, in order. slots: [B] int64. limits: [B] int64, the longest each may ever have. usable:
    [B] int64, the most that it can use now, limit included. size: requests of the whole batch, of other policies too.
    trims: whether trim() will follow the drafting. recall: the history of slots [B].
    """

    rows: Mapping[str, int]
    slots: Ints
    limits: Ints
    usable: Ints
    size: int
    trims: bool
    recall: Callable[[Ints], Recent]
    acceptance: Acceptance
    cost: StepCost

    @property
    def recent(self) -> Recent:
        """The requests' history; it has to be brought up to date, so it is read only by those who want it."""
        return self.recall(self.slots)


class Step(NamedTuple):
    """One verification step, of the R requests of one policy. slots, drafted, accepted: [R] int64.

    size: requests that decoded in the step, of other policies too. verify_ms, draft_ms: times of the step's two halves
    for the whole batch, draft_ms 0 where nothing was drafted after it. plain_ms: expected time of a step in which the
    same requests decode without speculation, on a machine as slow as it was in this step.
    """

    slots: Ints
    drafted: Ints
    accepted: Ints
    size: int
    verify_ms: float
    draft_ms: float
    plain_ms: float


class Policy(ABC):
    """A rule that sets speculation lengths.

    name: under which it is registered. settings: frozen; two policies with equal name and settings decide alike.
    warmup_tokens: verified draft tokens after which a request's calibration is over. reads_confidence: whether it wants
    the drafter's confidence measured. learns: whether it learns from requests for those that come after them.
    """

    name: str
    settings: Any
    warmup_tokens: int
    reads_confidence = False
    learns = False

    @abstractmethod
    def signals(self, recent: Newest) -> Signals:
        """How stable each request is by this policy's windows and decay."""

    @abstractmethod
    def propose(self, recent: Recent, limits: Ints) -> Proposal:
        """The batch's next lengths from its history; limits: [B] int64, the longest each request may ever have."""

    def plan(self, batch: Batch) -> Proposal:
        """The batch's next lengths, before drafting."""
        return self.propose(batch.recent, batch.limits)

    def attach(self, capacity: int) -> None:  # noqa: B027
        """Make room for the state of `capacity` slots; the controller calls it once, before all else."""

    def start(self, slots: Ints) -> None:  # noqa: B027
        """Slots [B] follow this policy from now on, and what it knew of them is void."""

    def observe(self, step: Step) -> None:  # noqa: B027
        """Learn from one verification step."""

    def trim(self, batch: Batch, lengths: Ints) -> Ints:
        """Final lengths [B] of the drafts just drawn, at most `lengths` [B] int64.

        Whether slot j is verified may depend on the draft distributions up to j and on the tokens before j, never on
        the token drawn at j: that would change the output's distribution.
        """
        return lengths


@dataclass(frozen=True, slots=True)
class Registration:
    """How a policy is made: rule(settings, max_length), and the dataclass of its settings."""

    rule: Callable[[Any, int], Policy]
    settings: type


def build(registration: Registration, name: str, settings: Mapping[str, Any], max_length: int) -> Policy:
    """The registered policy with `settings`; ValueError for a setting it does not have or a value it does not take."""
    known = [field.name for field in fields(registration.settings)]
    needed = [f.name for f in fields(registration.settings) if f.default is MISSING and f.name not in settings]
    for setting, value in settings.items():
        if setting not in known:
            accepted = f"choose {choices(known)}" if known else "it takes none"
            raise ValueError(
                f"speculation.settings.{setting} {value!r} is not a setting of policy {name!r}: {accepted}"
            )
    if needed:
        raise ValueError(f"speculation.settings.{needed[0]} is missing: policy {name!r} needs it")
    return registration.rule(registration.settings(**settings), max_length)


def check_number(
    field: str, value: object, low: float, high: float, *, integer: bool = False, open_low: bool = False
) -> None:
    """ValueError unless `value` is a number (an integer) from low to high; open_low leaves low itself out."""
    kinds = (int,) if integer else (int, float)
    inside = isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high
    if not inside or (open_low and value == low):
        noun = "an integer" if integer else "a number"
        bounds = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise ValueError(f"speculation.settings.{field} {value!r} is not accepted: give {noun} {bounds}")


def check_flag(field: str, value: object) -> None:
    """ValueError unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"speculation.settings.{field} {value!r} is not accepted: give true or false")


def choices(names: Iterable[str]) -> str:
    """The names as a sentence reads them: "a, b or c"."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last
