"""Replays a policy on a recorded trace through the real controller, with any step costs, in seconds.

The batch is continuous and drafts in lock-step, as vLLM's synchronous scheduler does: plan, verify the drafts of the
step before, draft, observe, trim. A request that ends gives its place to the next of the trace, over and over.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, cycle
from typing import Any

import numpy as np

from dsde.control.arrays import Numbers
from dsde.control.controller import Controller
from dsde.control.records import SpeculationPlan, StepObservation
from dsde.control.trace import RequestTrace, Round, Trace

__all__ = ["COSTS", "Oracle", "Outcome", "StepCosts", "replay", "replay_oracle"]


@dataclass(frozen=True, slots=True)
class StepCosts:
    """True costs of a simulated machine, ms: verification base + token t, a draft step draft + draft_request n, and
    sync for every draft step under a stop rule.

    noise: relative standard deviation of what is measured; pauses: share of steps measured twenty times too long.
    Neither counts as time spent, so that policies are compared on equal terms.
    """

    base: float
    token: float
    draft: float
    draft_request: float = 0.0
    sync: float = 0.0
    noise: float = 0.0
    pauses: float = 0.0

    def verify_ms(self, tokens: int) -> float:
        """Time of a step of `tokens` tokens."""
        return self.base + self.token * tokens

    def draft_ms(self, requests: int) -> float:
        """Time of one draft step."""
        return self.draft + self.draft_request * requests


COSTS: Mapping[str, StepCosts] = {
    "cpu": StepCosts(112.0, 6.8, 13.43, 2.07),
    "gpu-mem": StepCosts(40.0, 0.05, 4.0),
    "gpu-mixed": StepCosts(20.0, 0.12, 1.5),
}
"""The three machines of the policy study."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay came to. ratio: against plain decoding of the same batches. mean_acceptance_length: tokens per
    request and step. acceptance_rate: accepted / verified. wasted_draft_share: drafted slots that were not accepted.
    off_share: steps after which nobody drafted. draft_steps: all of them.
    """

    policy: str
    steps: int
    tokens: int
    time_ms: float
    tokens_per_s: float
    ratio: float
    mean_acceptance_length: float
    acceptance_rate: float
    wasted_draft_share: float
    off_share: float
    draft_steps: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


class _Stream:
    """A request on its way through its rounds.

    At `offset` slots into a round the drafter would say what it said in that round's remaining slots: their prefix is
    the text itself up to the round's first rejection.
    """

    def __init__(self, request_id: str, request: RequestTrace) -> None:
        self.id, self.temperature = request_id, request.temperature
        self._rounds = request.rounds
        self._round = self._offset = 0
        self.kept: list[tuple[Round, int]] = []

    @property
    def ended(self) -> bool:
        return self._round >= len(self._rounds)

    def drafts(self, depth: int) -> list[tuple[Round, int]]:
        """The next `depth` slots as (round, index); fewer at the end of the trace."""
        found: list[tuple[Round, int]] = []
        number, offset = self._round, self._offset
        while len(found) < depth and number < len(self._rounds):
            here = self._rounds[number]
            found += [(here, index) for index in range(offset, min(len(here.top_prob), offset + depth - len(found)))]
            number, offset = number + 1, 0
        return found

    def coming(self, depth: int) -> int:
        """How many of the next `depth` slots would be accepted in a row."""
        return next((n for n, (r, i) in enumerate(self.drafts(depth)) if i >= r.accepted), depth)

    def verify(self) -> int:
        """Accepted of the kept drafts; the stream moves past them and the token that follows."""
        accepted = 0
        for here, index in self.kept:
            if index >= here.accepted:
                break
            accepted += 1
        for _ in range(accepted + 1):
            if self.ended:
                break
            here = self._rounds[self._round]
            # The token after the accepted ones belongs to the target: it ends the round, or is its next draft token.
            if self._offset < here.accepted and self._offset + 1 < len(here.top_prob):
                self._offset += 1
            else:
                self._round, self._offset = self._round + 1, 0
        return accepted


class _Count:
    """Sums of a replay."""

    def __init__(self) -> None:
        self.steps = self.tokens = self.request_steps = 0
        self.verified = self.accepted = self.drafted = self.draft_steps = self.off = 0
        self.time_ms = self.plain_ms = 0.0

    def outcome(self, policy: str) -> Outcome:
        return Outcome(
            policy=policy,
            steps=self.steps,
            tokens=self.tokens,
            time_ms=self.time_ms,
            tokens_per_s=1e3 * self.tokens / self.time_ms,
            ratio=self.plain_ms / self.time_ms,
            mean_acceptance_length=self.tokens / max(1, self.request_steps),
            acceptance_rate=self.accepted / max(1, self.verified),
            wasted_draft_share=1.0 - self.accepted / self.drafted if self.drafted else 0.0,
            off_share=self.off / max(1, self.steps),
            draft_steps=self.draft_steps,
        )


def replay(
    policy: str,
    trace: Trace,
    costs: StepCosts,
    batch: int | Sequence[tuple[int, int]],
    *,
    settings: Mapping[str, Any] | None = None,
    steps: int = 1000,
    max_length: int | None = None,
    trims: bool = True,
    warmup: int = 0,
    seed: int = 0,
    controller: Controller | None = None,
) -> Outcome:
    """Run `policy` for `steps` steps on the trace.

    batch: requests that decode together, or a load that moves: (batch, tokens) one after the other, in place of
    `steps`, so that every policy does the same work.
    trims: False replays asynchronous scheduling's plans, without the delay. warmup: steps that are not counted.
    controller: one to go on with, in place of a new one.
    """
    load: list[tuple[int, float]] = [(batch, math.inf)] if isinstance(batch, int) else list(batch)
    capacity = max(size for size, _ in load)
    length = min(max_length or trace.length, trace.length)
    controller = controller or Controller(policy, settings, capacity=capacity, max_length=length, trims=trims)
    rng = random.Random(seed)
    supply = _supply(trace, seed)
    running: list[_Stream] = []
    count = _Count()
    done = 0
    for size, tokens in load:
        goal = count.tokens + tokens
        while count.tokens < goal and (goal < math.inf or done < steps):
            while len(running) > size:
                controller.finish(running.pop().id)
            while len(running) < size:
                running.append(next(supply))
            if done == warmup:
                goal -= count.tokens
                count = _Count()
            running = _step(controller, running, costs, trims, rng, count)
            done += 1
    for stream in running:
        controller.finish(stream.id)
    return count.outcome(policy)


def _supply(trace: Trace, seed: int) -> Iterator[_Stream]:
    order = list(trace.requests)
    random.Random(seed).shuffle(order)
    return (_Stream(f"{number}-{request.request_id}", request) for number, request in enumerate(cycle(order)))


def _step(
    controller: Controller,
    running: list[_Stream],
    costs: StepCosts,
    trims: bool,
    rng: random.Random,
    count: _Count,
) -> list[_Stream]:
    """One engine step; returns the requests that go on."""
    ids = tuple(stream.id for stream in running)
    plan = controller.plan(ids, [1 << 20] * len(ids))
    verified = [list(stream.kept) for stream in running]
    accepted = [stream.verify() for stream in running]
    tokens = len(ids) + sum(map(len, verified))
    verify_ms = costs.verify_ms(tokens)

    slots = [stream.drafts(plan.depth) for stream in running]
    depth, top, entropy = _draft(plan, ids, slots)
    step_ms = costs.draft_ms(len(ids)) + (costs.sync if plan.stop is not None else 0.0)
    flat = [slot for kept in verified for slot in kept]
    blur = 1.0 + costs.noise * rng.gauss(0.0, 1.0) if costs.noise else 1.0
    if costs.pauses and rng.random() < costs.pauses:
        blur *= 20.0
    controller.observe(
        StepObservation(
            request_ids=ids,
            num_draft_tokens=np.array([len(kept) for kept in verified], dtype=np.int64),
            num_accepted_tokens=np.array(accepted, dtype=np.int64),
            kld=np.array([r.kld[i] for r, i in flat], dtype=np.float32),
            overlap=np.array([r.overlap[i] for r, i in flat], dtype=np.float32),
            temperature=np.array([stream.temperature for stream in running], dtype=np.float32),
            draft_step_ms=step_ms if depth else None,
            draft_ids=ids if depth else (),
            draft_top_prob=top if depth else None,
            draft_entropy=entropy if depth else None,
            step_ms=verify_ms * max(0.1, blur),
            num_tokens=tokens,
        ),
        plan,
    )
    going = [stream for stream in running if not stream.ended]
    for stream in running:
        if stream.ended:
            controller.finish(stream.id)
    final = plan
    if trims:
        final = controller.trim(plan, {stream.id: 1 << 20 for stream in going})
    for stream, drafted in zip(running, slots, strict=True):
        stream.kept = drafted[: min(depth, final.lengths.get(stream.id, 0))]

    count.steps += 1
    count.tokens += len(ids) + sum(accepted)
    count.request_steps += len(ids)
    count.verified += len(flat)
    count.accepted += sum(accepted)
    count.drafted += depth * len(ids)
    count.draft_steps += depth
    count.off += depth == 0
    count.time_ms += verify_ms + depth * step_ms
    count.plain_ms += costs.verify_ms(len(ids)) * (1.0 + sum(accepted) / len(ids))
    return going


def _draft(
    plan: SpeculationPlan, ids: Sequence[str], slots: Sequence[Sequence[tuple[Round, int]]]
) -> tuple[int, Numbers, Numbers]:
    """Draft steps that run, and the confidences [B, D] of each; a request at its end repeats an even guess."""
    columns = [[s[j] if j < len(s) else None for s in slots] for j in range(plan.depth)]
    top = np.array([[s[0].top_prob[s[1]] if s else 0.5 for s in column] for column in columns], dtype=np.float32)
    entropy = np.array([[s[0].entropy[s[1]] if s else 1.0 for s in column] for column in columns], dtype=np.float32)
    depth = plan.depth
    if depth and plan.stop is not None:
        rule = plan.stop.bind(ids)
        going = np.ones(len(ids), dtype=np.bool_)
        for step in range(depth):
            going &= rule.goes_on(step, top[step], entropy[step])
            if not going.any():
                depth = step + 1
                break
    if not depth:
        nothing = np.empty((len(ids), 0), dtype=np.float32)
        return 0, nothing, nothing
    return depth, top[:depth].T.copy(), entropy[:depth].T.copy()


class Oracle:
    """What no policy can know. `acceptances`: which slots will be accepted. `chances`: how likely each is to be, which
    is its overlap at temperature > 0; when greedy it is one or nought, and both oracles are the same.
    """

    def __init__(self, knows: str) -> None:
        if knows not in ("acceptances", "chances"):
            raise ValueError(f"oracle knows {knows!r}, which is not accepted: choose acceptances or chances")
        self.knows = knows

    def survival(self, stream: _Stream, depth: int) -> list[float]:
        """Survival of the stream's next `depth` slots."""
        drafts = stream.drafts(depth)
        if self.knows == "acceptances" or stream.temperature == 0.0:
            row = [1.0] * min(stream.coming(depth), len(drafts))
        else:
            row = list(accumulate((r.overlap[i] for r, i in drafts), lambda a, b: a * b))
        return row + [0.0] * (depth - len(row))


def replay_oracle(
    knows: str, trace: Trace, costs: StepCosts, batch: int, *, steps: int = 1000, seed: int = 0, passes: int = 4
) -> Outcome:
    """The best that lock-step drafting can do with an oracle: at the price of the long run, which takes a few passes.

    The price is the rate of the pass before; maximising tokens - price * time at every step converges to the best rate.
    """
    oracle = Oracle(knows)
    price = batch / costs.verify_ms(batch)
    best: Outcome | None = None
    for _ in range(passes):
        outcome = _oracle_pass(oracle, trace, costs, batch, steps, seed, price)
        price = outcome.tokens / outcome.time_ms
        if best is None or outcome.tokens_per_s > best.tokens_per_s:
            best = outcome
    assert best is not None
    return best


def _oracle_pass(
    oracle: Oracle, trace: Trace, costs: StepCosts, batch: int, steps: int, seed: int, price: float
) -> Outcome:
    supply = _supply(trace, seed)
    running: list[_Stream] = []
    count = _Count()
    threshold, step_ms = price * costs.token, costs.draft_ms(batch)
    for _ in range(steps):
        while len(running) < batch:
            running.append(next(supply))
        verified = sum(len(stream.kept) for stream in running)
        accepted = sum(stream.verify() for stream in running)
        rows = [oracle.survival(stream, trace.length) for stream in running]
        gains = [sum(max(0.0, row[j] - threshold) for row in rows) - price * step_ms for j in range(trace.length)]
        value = list(accumulate(gains, initial=0.0))
        depth = value.index(max(value))
        for stream, row in zip(running, rows, strict=True):
            stream.kept = stream.drafts(sum(s > threshold for s in row[:depth]))
        running = [stream for stream in running if not stream.ended]
        count.steps += 1
        count.tokens += batch + accepted
        count.request_steps += batch
        count.verified += verified
        count.accepted += accepted
        count.drafted += depth * batch
        count.draft_steps += depth
        count.off += depth == 0
        count.time_ms += costs.verify_ms(batch + verified) + depth * step_ms
        count.plain_ms += costs.verify_ms(batch) * (1.0 + accepted / batch)
    return count.outcome(f"oracle: {oracle.knows}")
