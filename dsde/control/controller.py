"""The controller: one plan per decoding iteration, from what the iterations before it measured.

It composes history, policies, figures and what was learnt of acceptance and costs, and holds no rule of its own. It
knows requests only by their ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from dsde.control.acceptance import Acceptance, Verification
from dsde.control.arrays import Bools, Floats, Ints
from dsde.control.cost import StepCost, StepTime
from dsde.control.figures import EMPTY, Figures
from dsde.control.history import History, Newest, Recent
from dsde.control.measured import Measured
from dsde.control.policies import Policy, build_policy
from dsde.control.policies.base import Batch, Proposal, Step
from dsde.control.records import RequestSpeculation, SpeculationPlan, StepObservation
from dsde.control.stop import combine

__all__ = ["Controller"]


@dataclass(slots=True, eq=False)
class _Request:
    """A live request. own: the policy it chose, None for the default. parked: its figures while it is preempted."""

    own: Policy | None
    limit: int
    slot: int | None = None
    parked: Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """The B requests of one policy in a batch, found at `part` of it. rows: request id -> row. slots, limits: [B]."""

    policy: Policy
    part: Ints | slice
    rows: dict[str, int]
    slots: Ints
    limits: Ints


@dataclass(frozen=True, slots=True, eq=False)
class _Seats:
    """Requests that hold slots [B]; true until any request comes, goes or changes its policy.

    groups: the requests of each policy among them. reads_confidence: whether one of these policies does.
    """

    ids: tuple[str, ...]
    slots: Ints
    groups: list[_Group]
    reads_confidence: bool


class _Verified(NamedTuple):
    """One verification step that is not yet in history and figures. capped: [R], where a plan cut the length."""

    seats: _Seats
    observation: StepObservation
    capped: Bools


UNBOOKED = 8
"""Steps that are booked together in history and figures: few policies read the one, and only an answer the other."""

REMEMBERED = 4
"""Batches whose seats are kept: what is planned, verified, drafted and trimmed in a step, which mostly are the same."""


class Controller:
    """Sets the speculation length of every request at every step, and keeps each request's figures.

    policy: the default policy, built or by name with `settings`. capacity: requests that decode together, a hard bound
    (max_num_seqs). max_length: longest speculation length in draft tokens. trims: whether trim() will follow every
    drafting, as it does in synchronous scheduling; without it a plan's lengths are what is verified. ValueError for a
    bad policy or setting.
    """

    def __init__(
        self,
        policy: Policy | str,
        settings: Mapping[str, Any] | None = None,
        *,
        capacity: int,
        max_length: int,
        trims: bool = False,
    ) -> None:
        self._capacity, self._trims = capacity, trims
        self._policies: WeakValueDictionary[tuple[str, object], Policy] = WeakValueDictionary()
        self._max_length = max_length
        self._default = self._build(policy, settings or {}) if isinstance(policy, str) else self._intern(policy)
        self._requests: dict[str, _Request] = {}
        self._choosers = 0
        self._history = History(capacity)
        self._figures = Figures(capacity)
        self._acceptance = Acceptance(capacity, max_length)
        self._cost = StepCost(capacity, max_length)
        self._limits = np.zeros(capacity, dtype=np.int64)
        self._capped = np.zeros(capacity, dtype=np.bool_)
        self._seats: dict[tuple[str, ...], _Seats] = {}
        self._unbooked: list[_Verified] = []
        self._ignored_steps = 0

    @property
    def live(self) -> int:
        """Requests that have state here, running, waiting or preempted."""
        return len(self._requests)

    @property
    def ignored_steps(self) -> int:
        """Verification steps of a request whose signals were ignored because a KLD or an overlap was not finite."""
        self._book()
        return self._ignored_steps

    @property
    def policy(self) -> Policy:
        """The default policy."""
        return self._default

    @property
    def cost(self) -> StepCost:
        """What was learnt of the steps' costs."""
        return self._cost

    def admit(
        self,
        request_id: str,
        *,
        policy: str | None = None,
        settings: Mapping[str, Any] | None = None,
        max_length: int | None = None,
    ) -> None:
        """Take a request in, with its own choices. It takes no slot until it is first planned or measured.

        policy: None follows the default, through every later set_policy(). max_length: its own longest length; one
        above the controller's changes nothing. ValueError for a bad choice, which keeps nothing, or for a live id.
        """
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is already live: finish it before admitting its id again")
        if policy is None and settings:
            raise ValueError(f"settings {dict(settings)!r} come without a policy: name the policy they belong to")
        if max_length is not None and (type(max_length) is not int or max_length < 0):
            raise ValueError(
                f"dsde_max_length {max_length!r} is not accepted: give an integer from 0 to {self._max_length}"
            )
        own = None if policy is None else self._build(policy, settings or {})
        limit = self._max_length if max_length is None else min(max_length, self._max_length)
        self._requests[request_id] = _Request(own, limit)
        self._choosers += own is not None

    def set_policy(self, name: str, settings: Mapping[str, Any] | None = None) -> None:
        """Make `name` the default from the next plan on. Histories and figures stay. ValueError changes nothing."""
        self._default = self._build(name, settings or {})
        self._seats.clear()
        followers = [r.slot for r in self._requests.values() if r.own is None and r.slot is not None]
        if followers:
            self._book()
            slots = np.array(followers)
            self._history.set_warmup(slots, self._default.warmup_tokens)
            self._default.start(slots)

    def plan(self, request_ids: Sequence[str], room: Sequence[int]) -> SpeculationPlan:
        """Lengths for the drafting at the end of this step.

        request_ids: the B distinct requests that will draft; an unknown one is admitted with the defaults. room: [B],
        the most draft tokens each can still use, applied after the cap. The cap is taken within each policy's requests.
        RuntimeError when more requests hold a slot than `capacity`.
        """
        if len(request_ids) != len(room):
            raise ValueError(f"room has {len(room)} entries for {len(request_ids)} requests: give one for each")
        if not request_ids:
            return SpeculationPlan()
        seats = self._seat(tuple(request_ids))
        usable = np.array(room, dtype=np.int64)
        if min(room) < 0:
            usable = np.maximum(usable, 0)

        proposals = [group.policy.plan(self._batch(seats, group, usable)) for group in seats.groups]
        lengths, caps = _lengths(seats, proposals)
        wanted = np.minimum(lengths, usable)
        self._capped[seats.slots] = caps < wanted
        planned = np.minimum(wanted, caps).tolist()
        by_id = dict(zip(seats.ids, planned, strict=True))
        stop = combine([proposal.stop for proposal in proposals], [group.rows for group in seats.groups], by_id)
        return SpeculationPlan(max(planned), by_id, stop, seats.reads_confidence)

    def trim(self, plan: SpeculationPlan, room: Mapping[str, int]) -> SpeculationPlan:
        """Final lengths of the drafts just drawn, for the scheduler to cut them to: call it after observe().

        plan: the plan of that drafting. room: request id -> the most draft tokens it can use; a request that is absent
        has ended and gets none. No length grows, and none depends on a token of its own slot or later.
        """
        if not plan.depth:
            return plan
        lengths = {i: min(length, room[i]) for i, length in plan.lengths.items() if i in room}
        ids = tuple(lengths)
        if ids not in self._seats:
            ids = tuple([i for i in ids if (r := self._requests.get(i)) and r.slot is not None])
        if ids:
            seats = self._seat(ids)
            usable = np.array([lengths[i] for i in ids])
            for group in seats.groups:
                usable[group.part] = group.policy.trim(self._batch(seats, group, usable), usable[group.part])
            lengths.update(zip(ids, usable.tolist(), strict=True))
        return SpeculationPlan(max(lengths.values(), default=0), lengths)

    def observe(self, observation: StepObservation, plan: SpeculationPlan | None = None) -> None:
        """Learn from one verification step.

        plan: the plan whose drafting ran in the same engine step, which is the drafting that draft_step_ms timed and
        whose confidences came along; its stragglers are booked. Requests that are not live, or preempted and not
        planned since, are passed over.
        ValueError when kld and overlap do not have sum(num_draft_tokens) entries.
        """
        positions = sum(observation.num_draft_tokens.tolist())
        if not positions == observation.kld.size == observation.overlap.size:
            raise ValueError(
                f"kld has {observation.kld.size} and overlap {observation.overlap.size} entries: "
                f"num_draft_tokens sums to {positions}"
            )
        top = observation.draft_top_prob
        depth = top.shape[1] if top is not None else 0 if plan is None else plan.depth
        time = self._spend(observation, plan, depth)
        self._acceptance.tick()
        ids = observation.request_ids
        if ids not in self._seats:
            kept = [(r := self._requests.get(i)) is not None and r.parked is None for i in ids]
            if not all(kept):
                observation = _keep(observation, np.array(kept))
                ids = observation.request_ids
        if ids:
            self._learn(self._seat(ids), observation, time)
        self._remember(observation, depth)
        if plan is not None and observation.draft_step_ms is not None:
            self._straggle(plan, observation.draft_step_ms, depth)

    def preempt(self, request_id: str) -> None:
        """Free the request's slot: its history is forgotten and its calibration starts again when it is next planned.

        Its figures go on. An unknown id, or a request without a slot, is left as it is.
        """
        request = self._requests.get(request_id)
        if request is not None and request.slot is not None:
            self._book()
            request.parked = self._figures.take(request.slot)
            self._history.release(request.slot)
            self._seats.clear()
            request.slot = None

    def snapshot(self, request_id: str) -> RequestSpeculation | None:
        """The request's figures so far; None for an unknown id."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.slot is not None:
            self._book()
            column = self._figures.take(request.slot)
        else:
            column = EMPTY if request.parked is None else request.parked
        return self._figures.summary(column, (request.own or self._default).name, request.limit)

    def calibrating(self, request_id: str) -> bool:
        """Whether the request's calibration goes on; True before its first plan, False for an unknown id."""
        request = self._requests.get(request_id)
        if request is None or request.slot is None:
            return request is not None
        self._book()
        return self._history.calibrating(request.slot)

    def finish(self, request_id: str) -> RequestSpeculation | None:
        """The request's last figures; everything it held is freed. None for an unknown id, so calling twice is safe."""
        figures = self.snapshot(request_id)
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._choosers -= request.own is not None
            if request.slot is not None:
                self._history.release(request.slot)
                self._seats.clear()
        return figures

    def _build(self, name: str, settings: Mapping[str, Any]) -> Policy:
        return self._intern(build_policy(name, settings, self._max_length))

    def _intern(self, policy: Policy) -> Policy:
        # Requests that chose alike must share one object: a batch is grouped, and capped, by policy.
        known = self._policies.setdefault((policy.name, policy.settings), policy)
        if known is policy:
            policy.attach(self._capacity)
        return known

    def _place(self, request: _Request) -> int:
        slot = self._history.allocate((request.own or self._default).warmup_tokens)
        self._figures.put(slot, request.parked)
        self._acceptance.start(slot)
        (request.own or self._default).start(np.array([slot]))
        self._limits[slot] = request.limit
        self._capped[slot] = False
        request.slot, request.parked = slot, None
        return slot

    def _seat(self, ids: tuple[str, ...]) -> _Seats:
        """The seats of requests: an unknown one is admitted, and one without a slot is given one."""
        seats = self._seats.get(ids)
        if seats is not None:
            return seats
        for request_id in ids:
            if request_id not in self._requests:
                self.admit(request_id)
        requests = [self._requests[request_id] for request_id in ids]
        slots = np.array([self._place(r) if r.slot is None else r.slot for r in requests])
        if len(self._seats) >= REMEMBERED:
            self._seats.clear()
        groups = self._groups(ids, requests, slots)
        reads_confidence = any(group.policy.reads_confidence for group in groups)
        seats = self._seats[ids] = _Seats(ids, slots, groups, reads_confidence)
        return seats

    def _groups(self, ids: tuple[str, ...], requests: Sequence[_Request], slots: Ints) -> list[_Group]:
        parts: dict[Policy, list[int]] = {}
        if self._choosers:
            for index, request in enumerate(requests):
                parts.setdefault(request.own or self._default, []).append(index)
        limits = self._limits.take(slots)
        if len(parts) < 2:
            return [_Group(next(iter(parts), self._default), slice(None), _rows(ids), slots, limits)]
        return [
            _Group(policy, np.array(part), _rows([ids[index] for index in part]), slots[part], limits[part])
            for policy, part in parts.items()
        ]

    def _batch(self, seats: _Seats, group: _Group, usable: Ints) -> Batch:
        return Batch(
            group.rows,
            group.slots,
            group.limits,
            np.minimum(usable[group.part], group.limits),
            len(seats.ids),
            self._trims,
            self._recent,
            self._acceptance,
            self._cost,
        )

    def _recent(self, slots: Ints) -> Recent:
        """The history of slots [B], up to the latest step."""
        self._book()
        return self._history.recent(slots)

    def _spend(self, observation: StepObservation, plan: SpeculationPlan | None, depth: int) -> StepTime:
        """Learn the costs of the step; its times."""
        drafting = len(plan.lengths) if plan is not None else len(observation.draft_ids)
        # One for each request, and its drafts. Reading prompts is no part of what decoding costs.
        decoded = len(observation.request_ids) + observation.kld.size
        tokens = decoded if observation.has_prefill else observation.num_tokens or decoded
        time = self._cost.learn(
            tokens,
            observation.step_ms,
            observation.has_prefill,
            drafting,
            depth,
            observation.draft_step_ms,
            requests=len(observation.request_ids),
            stoppable=plan is not None and plan.stop is not None,
            prompt_tokens=observation.num_tokens - decoded if observation.has_prefill else 0,
        )
        # What it cost to come back is no cost of drafting, but it was spent.
        return time if observation.catch_up_ms is None else time._replace(draft=observation.catch_up_ms)

    def _remember(self, observation: StepObservation, depth: int) -> None:
        """Keep the drafter's confidence in the `depth` drafts it has just drawn, until they are verified."""
        top, spread = observation.draft_top_prob, observation.draft_entropy
        if not depth or not observation.draft_ids:
            return
        seats = self._seats.get(observation.draft_ids)
        if seats is not None:
            self._acceptance.draft(seats.slots, depth, top, spread)
            return
        slots = [r.slot if (r := self._requests.get(i)) else None for i in observation.draft_ids]
        if None in slots:
            kept = np.array([slot is not None for slot in slots])
            slots = [slot for slot in slots if slot is not None]
            top, spread = None if top is None else top[kept], None if spread is None else spread[kept]
        if slots:
            self._acceptance.draft(np.array(slots), depth, top, spread)

    def _book(self) -> None:
        """Bring history and figures up to date."""
        if not self._unbooked:
            return
        steps = Measured([(step.seats.slots, step.observation, step.capped) for step in self._unbooked])
        newest = self._history.append(steps)
        wvir, stable = _signals([step.seats for step in self._unbooked], steps.usable, newest)
        self._figures.measure(steps, wvir, stable)
        self._ignored_steps += steps.ignored
        self._unbooked.clear()

    def _learn(self, seats: _Seats, observation: StepObservation, time: StepTime) -> None:
        slots = seats.slots
        drafted, accepted, temperature = (
            observation.num_draft_tokens,
            observation.num_accepted_tokens,
            observation.temperature,
        )
        capped = self._capped.take(slots)
        self._capped[slots] = False
        if not observation.kld.size and not self._acceptance.waiting:
            # Resting has to be free: nothing was measured, so there is nothing else to learn.
            self._figures.rest(slots, capped)
            self._acceptance.rest(slots, temperature)
            self._tell(seats, observation, time)
            return
        self._unbooked.append(_Verified(seats, observation, capped))
        if len(self._unbooked) >= UNBOOKED:
            self._book()
        if seats.reads_confidence:
            self._acceptance.learn(Verification(slots, drafted, accepted, _overlap(observation)), temperature)
        else:
            self._acceptance.waiting = False
        self._tell(seats, observation, time)

    def _tell(self, seats: _Seats, observation: StepObservation, time: StepTime) -> None:
        """Tell the policies how the step went."""
        size = len(seats.ids)
        # When the machine is slow, a plain step would have been slow too.
        plain_ms = self._cost.verify(size) * time.pace
        drafted, accepted = observation.num_draft_tokens, observation.num_accepted_tokens
        for group in seats.groups:
            part = group.part
            group.policy.observe(
                Step(group.slots, drafted[part], accepted[part], size, time.verify, time.draft, plain_ms)
            )

    def _straggle(self, plan: SpeculationPlan, draft_step_ms: float, depth: int) -> None:
        planned = list(plan.lengths.values())
        if len(planned) < 2 or min(planned) >= min(depth, max(planned)):
            return
        lengths = np.minimum(np.array(planned), depth)
        second, longest = np.partition(lengths, -2)[-2:].tolist()
        ids = tuple(plan.lengths)
        seats = self._seats.get(ids)
        if seats is not None:
            slots, running = seats.slots, lengths
        else:
            held = [r.slot if (r := self._requests.get(i)) else None for i in ids]
            here = np.array([slot is not None for slot in held])
            slots, running = np.array([slot for slot in held if slot is not None], dtype=np.int64), lengths[here]
        self._figures.straggle(slots, (longest - running) * draft_step_ms)
        culprits = slots[running == longest]
        if longest > second and culprits.size:
            self._figures.blame(int(culprits[0]), (longest - second) * draft_step_ms * (len(lengths) - 1))


def _rows(ids: Sequence[str]) -> dict[str, int]:
    return {request_id: row for row, request_id in enumerate(ids)}


def _overlap(observation: StepObservation) -> Floats:
    """Overlaps as a table [R, K], K the longest draft; nothing where all requests are greedy, for nobody reads them."""
    drafted = observation.num_draft_tokens
    if not np.count_nonzero(observation.temperature):
        return np.empty((drafted.size, 0))
    verified = np.arange(max(drafted.tolist())) < drafted[:, None]
    overlap = np.zeros(verified.shape)
    overlap[verified] = observation.overlap
    return overlap


def _lengths(seats: _Seats, proposals: Sequence[Proposal]) -> tuple[Ints, Ints]:
    """Lengths and caps [B] of the whole batch."""
    if len(proposals) == 1:
        return proposals[0].lengths, proposals[0].caps
    lengths, caps = np.empty((2, len(seats.ids)), dtype=np.int64)
    for group, proposal in zip(seats.groups, proposals, strict=True):
        lengths[group.part], caps[group.part] = proposal.lengths, proposal.caps
    return lengths, caps


def _signals(steps: Sequence[_Seats], usable: Bools, newest: Newest) -> tuple[Floats, Bools]:
    """WVIR, and whether the request is stable, each by its own policy: [U], of the usable rows of these steps."""
    rows: dict[Policy, list[Ints]] = {}
    start = 0
    for seats in steps:
        here = np.arange(start, start + len(seats.ids))
        for group in seats.groups:
            rows.setdefault(group.policy, []).append(here[group.part])
        start += len(seats.ids)
    if len(rows) == 1:
        signals = next(iter(rows)).signals(newest)
        return signals.wvir, signals.penalty <= 1.0
    wvir, penalty = np.empty((2, newest.count.size))
    place = np.add.accumulate(usable, dtype=np.int64) - 1
    for policy, parts in rows.items():
        mine = np.concatenate(parts)
        mine = place[mine[usable[mine]]]
        signals = policy.signals(newest.of(mine))
        wvir[mine], penalty[mine] = signals.wvir, signals.penalty
    return wvir, penalty <= 1.0


def _keep(observation: StepObservation, kept: Bools) -> StepObservation:
    """The observation of the requests where kept [R] is true."""
    positions = np.repeat(kept, observation.num_draft_tokens)
    return replace(
        observation,
        request_ids=tuple([i for i, keep in zip(observation.request_ids, kept.tolist(), strict=True) if keep]),
        num_draft_tokens=observation.num_draft_tokens[kept],
        num_accepted_tokens=observation.num_accepted_tokens[kept],
        kld=observation.kld[positions],
        overlap=observation.overlap[positions],
        temperature=observation.temperature[kept],
    )
