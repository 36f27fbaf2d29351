"""The controller: one plan per decoding iteration, from what the iterations before it measured.

It composes history, policies and figures and holds no rule of its own. It knows requests only by their ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from dsde.control.figures import EMPTY, Figures
from dsde.control.history import History
from dsde.control.policies import Policy, build_policy
from dsde.control.policies.base import Signals
from dsde.control.records import RequestSpeculation, SpeculationPlan, StepObservation

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
    (max_num_seqs). max_length: longest speculation length in draft tokens. ValueError for a bad policy or setting.
    """

    def __init__(
        self,
        policy: Policy | str,
        settings: Mapping[str, Any] | None = None,
        *,
        capacity: int,
        max_length: int,
    ) -> None:
        self._policies: WeakValueDictionary[tuple[str, object], Policy] = WeakValueDictionary()
        self._max_length = max_length
        self._default = self._build(policy, settings or {}) if isinstance(policy, str) else self._intern(policy)
        self._requests: dict[str, _Request] = {}
        self._choosers = 0
        self._history = History(capacity)
        self._figures = Figures(capacity)
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
            self._history.set_warmup(torch.tensor(followers), self._default.warmup_tokens)

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
        for policy, part in self._groups(requests):
            proposal = policy.propose(self._history.recent(slots[part]), limits[part])
            lengths[part], caps[part] = proposal.lengths, proposal.caps

        wanted = torch.minimum(lengths, usable).clamp_(min=0)
        self._capped[slots] = (caps < wanted).double()
        planned = torch.minimum(wanted, caps).tolist()
        return SpeculationPlan(max(planned), dict(zip(request_ids, planned, strict=True)))

    def observe(self, observation: StepObservation, plan: SpeculationPlan | None = None) -> None:
        """Learn from one verification step.

        plan: the plan whose drafting ran in the same engine step, which is the drafting that draft_step_ms timed; its
        stragglers are booked. Requests that are not live, or preempted and not planned since, are passed over.
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
        if known:
            if len(known) == len(requests):
                self._learn(known, observation, drafted, row)
            else:
                kept = torch.tensor([r is not None and r.parked is None for r in requests])
                self._learn(known, *_keep(observation, kept, row))
        if plan is not None and observation.draft_step_ms is not None:
            self._straggle(plan, observation.draft_step_ms)

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
        return self._policies.setdefault((policy.name, policy.settings), policy)

    def _place(self, request: _Request) -> int:
        slot = self._history.allocate((request.own or self._default).warmup_tokens)
        self._figures.put(slot, request.parked)
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

    def _signals(self, requests: Sequence[_Request], slots: Tensor) -> Signals:
        groups = self._groups(requests)
        if len(groups) == 1:
            return groups[0][0].signals(self._history.recent(slots))
        factor = torch.empty(len(requests), dtype=torch.float64)
        ratio = torch.empty_like(factor)
        for policy, part in groups:
            signals = policy.signals(self._history.recent(slots[part]))
            factor[part], ratio[part] = signals.scale_factor, signals.wvir
        return Signals(factor, ratio)

    def _learn(self, requests: Sequence[_Request], observation: StepObservation, drafted: Tensor, row: Tensor) -> None:
        slots = torch.tensor([self._place(r) if r.slot is None else r.slot for r in requests])
        both = torch.stack((observation.kld, observation.overlap)).double()
        sums = torch.zeros(2, len(requests), dtype=torch.float64).index_add_(1, row, both)
        kld_sum, overlap_sum = sums
        kld_max = torch.zeros_like(kld_sum).scatter_reduce_(0, row, both[0], "amax")
        finite = sums.sum(0).isfinite()
        usable = finite & (drafted > 0)
        self._ignored_steps += len(requests) - int(finite.sum())

        accepted, temperature = observation.num_accepted_tokens, observation.temperature
        self._history.append(slots, drafted, accepted, temperature, row, both[0], kld_sum, kld_max, usable)
        signals = self._signals(requests, slots)
        capped = self._capped.index_select(0, slots)
        self._capped.index_fill_(0, slots, 0.0)
        self._figures.measure(
            slots, drafted, usable, kld_sum, overlap_sum, kld_max, signals.wvir, signals.penalty <= 1.0, capped
        )

    def _straggle(self, plan: SpeculationPlan, draft_step_ms: float) -> None:
        lengths = list(plan.lengths.values())
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
