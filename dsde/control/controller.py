"""The controller: one plan per decoding iteration, from what the iterations before it measured.

It composes history, policies, figures and what was learnt of acceptance and costs, and holds no rule of its own. It
knows requests only by their ids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from dsde.control.acceptance import Acceptance, Verification
from dsde.control.cost import StepCost, StepTime
from dsde.control.figures import EMPTY, Figures
from dsde.control.history import History
from dsde.control.policies import Policy, build_policy
from dsde.control.policies.base import Batch, Signals, Step
from dsde.control.records import DraftStop, RequestSpeculation, SpeculationPlan, StepObservation
from dsde.control.stop import combine

__all__ = ["Controller"]


@dataclass(slots=True, eq=False)
class _Request:
    """A live request. own: the policy it chose, None for the default. parked: its figures while it is preempted."""

    own: Policy | None
    limit: int
    slot: int | None = None
    parked: Tensor | None = None


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
        self._limits = torch.zeros(capacity, dtype=torch.int64)
        self._capped = torch.zeros(capacity, dtype=torch.float64)
        self._ignored_steps = 0

    @property
    def live(self) -> int:
        """Requests that have state here, running, waiting or preempted."""
        return len(self._requests)

    @property
    def ignored_steps(self) -> int:
        """Verification steps of a request whose signals were ignored because a KLD or an overlap was not finite."""
        return self._ignored_steps

    @property
    def policy(self) -> Policy:
        """The default policy."""
        return self._default

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
        followers = [r.slot for r in self._requests.values() if r.own is None and r.slot is not None]
        if followers:
            slots = torch.tensor(followers)
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
        for request_id in request_ids:
            if request_id not in self._requests:
                self.admit(request_id)
        requests = [self._requests[request_id] for request_id in request_ids]
        slots = torch.tensor([self._place(r) if r.slot is None else r.slot for r in requests])
        limits = self._limits.index_select(0, slots)
        usable = torch.tensor(room)

        lengths, caps = torch.empty_like(limits), torch.empty_like(limits)
        stops: list[tuple[DraftStop | None, Sequence[str]]] = []
        confidence = False
        for policy, part in self._groups(requests):
            batch = self._batch(request_ids, slots, limits, usable, part)
            proposal = policy.plan(batch)
            lengths[part], caps[part] = proposal.lengths, proposal.caps
            stops.append((proposal.stop, batch.ids))
            confidence |= policy.reads_confidence

        wanted = torch.minimum(lengths, usable).clamp_(min=0)
        self._capped[slots] = (caps < wanted).double()
        planned = torch.minimum(wanted, caps).tolist()
        by_id = dict(zip(request_ids, planned, strict=True))
        return SpeculationPlan(max(planned), by_id, combine(stops, by_id), confidence)

    def trim(self, plan: SpeculationPlan, room: Mapping[str, int]) -> SpeculationPlan:
        """Final lengths of the drafts just drawn, for the scheduler to cut them to: call it after observe().

        plan: the plan of that drafting. room: request id -> the most draft tokens it can use; a request that is absent
        has ended and gets none. No length grows, and none depends on a token of its own slot or later.
        """
        if not plan.depth:
            return plan
        alive = [(i, r) for i in plan.lengths if i in room and (r := self._requests.get(i)) and r.slot is not None]
        lengths = {i: min(length, room[i]) for i, length in plan.lengths.items() if i in room}
        if alive:
            ids, requests = zip(*alive, strict=True)
            slots = torch.tensor([r.slot for r in requests])
            limits = self._limits.index_select(0, slots)
            usable = torch.tensor([lengths[i] for i in ids])
            for policy, part in self._groups(requests):
                usable[part] = policy.trim(self._batch(ids, slots, limits, usable, part), usable[part])
            lengths.update(zip(ids, usable.tolist(), strict=True))
        return SpeculationPlan(max(lengths.values(), default=0), lengths)

    def observe(self, observation: StepObservation, plan: SpeculationPlan | None = None) -> None:
        """Learn from one verification step.

        plan: the plan whose drafting ran in the same engine step, which is the drafting that draft_step_ms timed and
        whose confidences came along; its stragglers are booked. Requests that are not live, or preempted and not
        planned since, are passed over.
        ValueError when kld and overlap do not have sum(num_draft_tokens) entries.
        """
        drafted = observation.num_draft_tokens
        row = torch.repeat_interleave(drafted)
        if not row.numel() == observation.kld.numel() == observation.overlap.numel():
            raise ValueError(
                f"kld has {observation.kld.numel()} and overlap {observation.overlap.numel()} entries: "
                f"num_draft_tokens sums to {row.numel()}"
            )
        requests = [self._requests.get(request_id) for request_id in observation.request_ids]
        known = [r for r in requests if r is not None and r.parked is None]
        top = observation.draft_top_prob
        depth = top.shape[1] if top is not None else 0 if plan is None else plan.depth
        time = self._spend(observation, plan, depth)
        self._acceptance.tick()
        if known:
            if len(known) == len(requests):
                self._learn(known, observation, drafted, row, time)
            else:
                kept = torch.tensor([r is not None and r.parked is None for r in requests])
                self._learn(known, *_keep(observation, kept, row), time)
        self._remember(observation, depth)
        if plan is not None and observation.draft_step_ms is not None:
            self._straggle(plan, observation.draft_step_ms, depth)

    def preempt(self, request_id: str) -> None:
        """Free the request's slot: its history is forgotten and its calibration starts again when it is next planned.

        Its figures go on. An unknown id, or a request without a slot, is left as it is.
        """
        request = self._requests.get(request_id)
        if request is not None and request.slot is not None:
            request.parked = self._figures.take(request.slot)
            self._history.release(request.slot)
            request.slot = None

    def snapshot(self, request_id: str) -> RequestSpeculation | None:
        """The request's figures so far; None for an unknown id."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.slot is not None:
            column = self._figures.take(request.slot)
        else:
            column = EMPTY if request.parked is None else request.parked
        return self._figures.summary(column, (request.own or self._default).name, request.limit)

    def finish(self, request_id: str) -> RequestSpeculation | None:
        """The request's last figures; everything it held is freed. None for an unknown id, so calling twice is safe."""
        figures = self.snapshot(request_id)
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._choosers -= request.own is not None
            if request.slot is not None:
                self._history.release(request.slot)
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
        (request.own or self._default).start(torch.tensor([slot]))
        self._limits[slot] = request.limit
        self._capped[slot] = 0.0
        request.slot, request.parked = slot, None
        return slot

    def _groups(self, requests: Sequence[_Request]) -> list[tuple[Policy, Tensor | slice]]:
        if not self._choosers:
            return [(self._default, slice(None))]
        parts: dict[Policy, list[int]] = {}
        for index, request in enumerate(requests):
            parts.setdefault(request.own or self._default, []).append(index)
        return [(policy, torch.tensor(part)) for policy, part in parts.items()]

    def _batch(self, ids: Sequence[str], slots: Tensor, limits: Tensor, usable: Tensor, part: Tensor | slice) -> Batch:
        return Batch(
            ids=ids if isinstance(part, slice) else [ids[index] for index in part.tolist()],
            slots=slots[part],
            limits=limits[part],
            usable=torch.minimum(usable[part], limits[part]),
            size=len(ids),
            trims=self._trims,
            history=self._history,
            acceptance=self._acceptance,
            cost=self._cost,
        )

    def _spend(self, observation: StepObservation, plan: SpeculationPlan | None, depth: int) -> StepTime:
        """Learn the costs of the step; its times."""
        drafting = len(plan.lengths) if plan is not None else len(observation.draft_ids)
        # Without a count of tokens, the step's own: one for each request, and its drafts.
        tokens = observation.num_tokens or len(observation.request_ids) + observation.kld.numel()
        time = self._cost.learn(
            tokens,
            observation.step_ms,
            observation.has_prefill,
            drafting,
            depth,
            observation.draft_step_ms,
            stoppable=plan is not None and plan.stop is not None,
        )
        # What it cost to come back is no cost of drafting, but it was spent.
        return time if observation.catch_up_ms is None else replace(time, draft=observation.catch_up_ms)

    def _remember(self, observation: StepObservation, depth: int) -> None:
        """Keep the drafter's confidence in the `depth` drafts it has just drawn, until they are verified."""
        top, spread = observation.draft_top_prob, observation.draft_entropy
        if not depth or not observation.draft_ids:
            return
        slots = [r.slot if (r := self._requests.get(i)) else None for i in observation.draft_ids]
        if None in slots:
            kept = torch.tensor([slot is not None for slot in slots])
            slots = [slot for slot in slots if slot is not None]
            top, spread = None if top is None else top[kept], None if spread is None else spread[kept]
        if slots:
            self._acceptance.draft(torch.tensor(slots), depth, top, spread)

    def _signals(self, groups: list[tuple[Policy, Tensor | slice]], requests: int, slots: Tensor) -> Signals:
        if len(groups) == 1:
            return groups[0][0].signals(self._history.recent(slots))
        factor = torch.empty(requests, dtype=torch.float64)
        ratio = torch.empty_like(factor)
        for policy, part in groups:
            signals = policy.signals(self._history.recent(slots[part]))
            factor[part], ratio[part] = signals.scale_factor, signals.wvir
        return Signals(factor, ratio)

    def _learn(
        self,
        requests: Sequence[_Request],
        observation: StepObservation,
        drafted: Tensor,
        row: Tensor,
        time: StepTime,
    ) -> None:
        slots = torch.tensor([self._place(r) if r.slot is None else r.slot for r in requests])
        if not row.numel() and not self._acceptance.waiting:
            # Resting has to be free: nothing was measured, so there is nothing else to learn.
            self._figures.rest(slots, self._capped.index_select(0, slots))
            self._capped.index_fill_(0, slots, 0.0)
            self._acceptance.rest(slots, observation.temperature)
            self._tell(self._groups(requests), slots, drafted, observation.num_accepted_tokens, time)
            return
        both = torch.stack((observation.kld, observation.overlap)).double()
        sums = torch.zeros(2, len(requests), dtype=torch.float64).index_add_(1, row, both)
        kld_sum, overlap_sum = sums
        kld_max = torch.zeros_like(kld_sum).scatter_reduce_(0, row, both[0], "amax")
        finite = sums.sum(0).isfinite()
        usable = finite & (drafted > 0)
        self._ignored_steps += len(requests) - int(finite.sum())

        accepted, temperature = observation.num_accepted_tokens, observation.temperature
        self._history.append(slots, drafted, accepted, temperature, row, both[0], kld_sum, kld_max, usable)
        groups = self._groups(requests)
        signals = self._signals(groups, len(requests), slots)
        capped = self._capped.index_select(0, slots)
        self._capped.index_fill_(0, slots, 0.0)
        self._figures.measure(
            slots, drafted, usable, kld_sum, overlap_sum, kld_max, signals.wvir, signals.penalty <= 1.0, capped
        )
        if any(policy.reads_confidence for policy, _ in groups):
            self._verify(slots, drafted, accepted, temperature, row, both[1])
        else:
            self._acceptance.waiting = False
        self._tell(groups, slots, drafted, accepted, time)

    def _tell(
        self,
        groups: list[tuple[Policy, Tensor | slice]],
        slots: Tensor,
        drafted: Tensor,
        accepted: Tensor,
        time: StepTime,
    ) -> None:
        """Tell the policies how the step went."""
        size = slots.numel()
        plain_ms = self._cost.verify(size)
        for policy, part in groups:
            policy.observe(
                Step(
                    slots=slots[part],
                    drafted=drafted[part],
                    accepted=accepted[part],
                    size=size,
                    verify_ms=time.verify,
                    draft_ms=time.draft,
                    plain_ms=plain_ms,
                    measured=time.measured,
                )
            )

    def _verify(
        self, slots: Tensor, drafted: Tensor, accepted: Tensor, temperature: Tensor, row: Tensor, overlap: Tensor
    ) -> None:
        """Teach the acceptance models; overlap: [N] of the positions that `row` [N] owns."""
        depth = int(drafted.max())
        table = torch.full((slots.numel(), depth), math.nan, dtype=torch.float64)
        position = torch.arange(row.numel()) - (drafted.cumsum(0) - drafted).index_select(0, row)
        table[row, position] = overlap
        self._acceptance.learn(Verification(slots, drafted, accepted, table), temperature)

    def _straggle(self, plan: SpeculationPlan, draft_step_ms: float, depth: int) -> None:
        lengths = [min(length, depth) for length in plan.lengths.values()]
        if len(lengths) < 2:
            return
        second, longest = sorted(lengths)[-2:]
        requests = [self._requests.get(request_id) for request_id in plan.lengths]
        running = [
            (r.slot, length)
            for r, length in zip(requests, lengths, strict=True)
            if r is not None and r.slot is not None
        ]
        if not running:
            return
        slots = [slot for slot, _ in running]
        wait = [(longest - length) * draft_step_ms for _, length in running]
        self._figures.straggle(torch.tensor(slots), torch.tensor(wait, dtype=torch.float64))
        if longest > second and 0.0 in wait:
            caused = (longest - second) * draft_step_ms * (len(lengths) - 1)
            self._figures.blame(slots[wait.index(0.0)], caused)


def _keep(observation: StepObservation, kept: Tensor, row: Tensor) -> tuple[StepObservation, Tensor, Tensor]:
    """The observation of the requests where kept [R] is true, its draft counts and the owner of each position."""
    positions = kept.index_select(0, row)
    drafted = observation.num_draft_tokens[kept]
    part = StepObservation(
        request_ids=observation.request_ids,
        num_draft_tokens=drafted,
        num_accepted_tokens=observation.num_accepted_tokens[kept],
        kld=observation.kld[positions],
        overlap=observation.overlap[positions],
        temperature=observation.temperature[kept],
        draft_step_ms=observation.draft_step_ms,
    )
    return part, drafted, torch.repeat_interleave(drafted)
