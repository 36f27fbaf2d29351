"""A modelled replica: continuous batching, chunked prefill, a prefix cache, and speculation in lock-step.

A step of t tokens takes a + b t ms, and every draft step d + e n ms for n requests. Lengths follow the price of time,
as under the policy `goodput`, from the mean acceptance of each class. Not modelled: preemption, a full KV cache, the
time between steps.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsde.control.price import Costs, best_price
from dsde.control.replay import StepCosts
from dsde.routing.request import BLOCK
from dsde.routing.stats import ClassStats, ClassTable, ReplicaStats
from dsde.simulate.workload import Arrival, Group

__all__ = ["Engine", "Lengths", "Replica"]

MARGIN = 1.1
"""As in the policy `goodput`: what a slot must be worth above the price."""
MEMORY = 0.98
"""Weight that the published averages keep from step to step."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine's limits. slots: requests that decode together. step_tokens: most tokens of a step. longest: longest
    speculation length. prefix_tokens: tokens that the prefix cache keeps. kv_tokens: size of the KV cache.
    """

    slots: int = 32
    step_tokens: int = 2048
    longest: int = 8
    prefix_tokens: int = 12_000
    kv_tokens: int = 48_000


class Lengths:
    """Speculation length of each class for a batch, remembered by how many requests of each class it holds."""

    def __init__(self, recorded: Sequence[Group], costs: StepCosts, longest: int) -> None:
        self._survival = np.array([group.survival[:longest] for group in recorded])
        self._costs = costs
        self._known: dict[tuple[int, ...], tuple[tuple[int, ...], int]] = {}

    def of(self, batch: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """(length of each class, deepest of those present) of a batch with batch[g] requests of class g."""
        found = self._known.get(batch)
        if found is None:
            found = self._known[batch] = self._priced(batch)
        return found

    def _priced(self, batch: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        count = sum(batch)
        none = (0,) * len(batch), 0
        if not count:
            return none
        rows = np.repeat(self._survival, batch, axis=0)
        costs = Costs(self._costs.verify_ms(count), self._costs.token, self._costs.draft_ms(count))
        price = best_price(rows, np.zeros_like(rows), count, costs)
        if not price.depth:
            return none
        worth = (self._survival > MARGIN * price.rate * costs.token).sum(axis=1)
        lengths = tuple(int(n) for n in np.minimum(worth, price.depth))
        return lengths, max(length for length, n in zip(lengths, batch, strict=True) if n)


@dataclass(slots=True, eq=False)
class _Running:
    arrival: Arrival
    left: int
    at: int
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class Counted:
    """Sums since the start, ms and tokens. waited: that requests waited for longer members; decoded: of all."""

    tokens: int = 0
    waited: float = 0.0
    decoded: float = 0.0


class Replica:
    """One engine. `begin` starts a step and says how long it takes, `end` books it; both while it has work."""

    def __init__(self, engine: Engine, costs: StepCosts, lengths: Lengths, classes: int, speed: float = 1.0) -> None:
        self._engine, self._costs, self._lengths, self._speed = engine, costs, lengths, speed
        self.running: list[_Running] = []
        self.waiting: deque[Arrival] = deque()
        self._prefilling: list[tuple[Arrival, int]] = []
        self._batch = [0] * classes
        self._prefixes: OrderedDict[int, None] = OrderedDict()
        self._table = ClassTable()
        self._step = ((0,) * classes, 0, 0.0, 0.0)
        self._ready: list[Arrival] = []
        self._published = 0
        self._length = self._share = 0.0
        self._kv = 0
        self.counted = Counted()
        self.stepping = False

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.running or self.waiting or self._prefilling)

    def begin(self) -> float:
        """Start a step; its time in ms."""
        lengths, depth = self._lengths.of(tuple(self._batch))
        count = len(self.running)
        tokens = count + sum(map(int.__mul__, lengths, self._batch))
        room = self._engine.step_tokens - tokens
        self._ready = []
        prefilled = 0
        while room > prefilled:
            if not self._prefilling:
                if not self.waiting or count + len(self._ready) >= self._engine.slots:
                    break
                arrival = self.waiting.popleft()
                self._prefilling.append((arrival, max(1, arrival.request.prompt_tokens - self._cached(arrival))))
                self._kv += arrival.request.prompt_tokens
            arrival, left = self._prefilling.pop()
            part = min(left, room - prefilled)
            prefilled += part
            if part < left:
                self._prefilling.append((arrival, left - part))
            else:
                self._ready.append(arrival)
        draft = self._costs.draft_ms(count) / self._speed if depth else 0.0
        time = self._costs.verify_ms(tokens + prefilled) / self._speed + depth * draft
        self._step = (lengths, depth, draft, time)
        return time

    def end(self) -> list[Arrival]:
        """Book the step that was begun; the requests it finished."""
        lengths, depth, draft, time = self._step
        counted = self.counted
        done: list[_Running] = []
        if self.running:
            self._decode(lengths, done)
            count = len(self.running)
            planned = sum(map(int.__mul__, lengths, self._batch))
            waited = (depth * count - planned) * draft
            counted.waited += waited
            counted.decoded += count * time
            self._length += (1.0 - MEMORY) * (planned / count - self._length)
            self._share += (1.0 - MEMORY) * (waited / (count * time) - self._share)
        for one in done:
            self._leave(one)
        if done:
            self.running = [one for one in self.running if one.left > 0]
        finished = [one.arrival for one in done]
        for arrival in self._ready:
            # The prompt's step emits the first token.
            counted.tokens += 1
            self._remember(arrival)
            if arrival.output == 1:
                self._kv -= arrival.request.prompt_tokens
                finished.append(arrival)
                continue
            self.running.append(_Running(arrival, arrival.output - 1, arrival.at))
            self._batch[arrival.group] += 1
        self._ready = []
        return finished

    def stats(self) -> ReplicaStats:
        """What it publishes now."""
        self._published += 1
        count = max(1, len(self.running))
        base, token = self._costs.base / self._speed, self._costs.token / self._speed
        return ReplicaStats(
            number=self._published,
            running=len(self.running) + len(self._prefilling) + len(self._ready),
            waiting=len(self.waiting),
            slots=self._engine.slots,
            kv_use=min(1.0, self._kv / self._engine.kv_tokens),
            verify_ms=(base, token),
            draft_ms=self._costs.draft_ms(count) / self._speed,
            prompt_ms=token,
            length=self._length,
            straggler_share=self._share,
            classes=self._table.newest(),
        )

    def _decode(self, lengths: tuple[int, ...], done: list[_Running]) -> None:
        tokens = 0
        for one in self.running:
            arrival = one.arrival
            length = lengths[arrival.group]
            if length:
                one.steps += 1
                accepted = arrival.path[one.at]
                one.at = (one.at + 1) % len(arrival.path)
                if accepted > length:
                    accepted = length
                one.drafted += length
                one.accepted += accepted
                gained = min(accepted + 1, one.left)
            else:
                gained = 1
            tokens += gained
            one.left -= gained
            if one.left <= 0:
                done.append(one)
        self.counted.tokens += tokens
        self._kv += tokens

    def _leave(self, one: _Running) -> None:
        arrival = one.arrival
        self._batch[arrival.group] -= 1
        self._kv -= arrival.request.prompt_tokens + arrival.output - 1
        self._table.finish(
            arrival.request.classes,
            ClassStats(1.0, arrival.output, one.steps, one.drafted, one.accepted),
        )

    def _cached(self, arrival: Arrival) -> int:
        """Prompt tokens that the prefix cache holds."""
        matched = 0
        for block in arrival.request.blocks:
            if block not in self._prefixes:
                break
            self._prefixes.move_to_end(block)
            matched += 1
        return matched * BLOCK

    def _remember(self, arrival: Arrival) -> None:
        for block in arrival.request.blocks:
            self._prefixes[block] = None
            self._prefixes.move_to_end(block)
        while len(self._prefixes) * BLOCK > self._engine.prefix_tokens:
            self._prefixes.popitem(last=False)
