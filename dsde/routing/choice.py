"""The router without Ray: keeps the books between publications, and puts the replicas in order for a request."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from dsde.routing.prefixes import Prefixes
from dsde.routing.request import BLOCK, Request
from dsde.routing.score import DEEPEST, Array, Fleet, Wanted, level, losses
from dsde.routing.stats import ClassStats, ReplicaStats, acceptance

__all__ = ["StabilityAware"]

R = TypeVar("R", bound=Hashable)

STALE_S = 5.0
"""Age from which a publication is not relied on."""
UNSENT_S = 2.0
"""Age from which a request that was chosen a replica, and has not reached one, is struck from the books.

It has been cancelled, of which nobody tells a router, or waits for a place, and is booked anew when it gets one.
"""
BOOKED = 65_536
"""Requests in the books at most."""
RANKED = 3
"""Replicas that are put in order; the others follow together."""

OUTPUT = 200.0
ALPHA = 0.6
"""Tokens of an answer, and acceptance, that are taken for granted before anything is known."""
PRIOR = 4.0
STEPS = 20.0
"""Requests, and steps with drafts, that the wider class weighs within a narrower one."""
SLIGHT = 1e-6
COSTS = (20.0, 0.1, 1.5, 0.1)
"""a, b, d and a prompt token in ms of a replica that has published none, while nobody has."""
NOISE = 1.3
"""Factor up to which a replica's costs may differ from the others' for no other reason than how they were measured."""
TINY_MS = 1e-6
SIZE = np.array([1.0, 16.0, 1.0, 0.0])
"""The step by which replicas are compared, in (a, b, d, prompt token): one of 16 tokens, and one draft step."""
FREE = 256.0
"""Tokens that take at least as long as all else in a step, whatever was measured: where a step takes as long as reading
the weights does, b comes out as 0, and a replica to which more costs nothing would draw every request.
"""
FADES_S = 10.0
"""Time without a request after which that factor is squared, and so on: a replica that was slow once is tried again."""
TIE = 2e-3
"""Share of the least loss by which another may be larger and still be as good: chance decides between these."""
LATE = 1_024
"""Requests at most that ended before their replica was known, until it is."""
KV_FULL = 0.9
"""Use of the KV cache above which requests that wait do so for memory, not for a place."""


@dataclass(slots=True, eq=False)
class _Booked:
    """A request in the books. sent: whether it is known to have reached its replica."""

    row: int
    level: int
    sent: bool = False


@dataclass(slots=True, eq=False)
class _Replica:
    """What is known of one replica, besides its row in the fleet.

    own: requests that this router has sent there. ended: of these, those that it saw end since the latest publication,
    which may still count them. others: requests of other routers, in the fleet's members. worked: when it last had one.
    """

    stats: ReplicaStats | None = None
    own: int = 0
    ended: int = 0
    others: int = 0
    worked: float = -math.inf


class StabilityAware(Generic[R]):
    """Sends each request where it and those already there lose least; see `dsde.routing.score`.

    Between two publications of a replica it goes by its own books. Times are in seconds, of any one clock.
    """

    def __init__(self, *, stale_s: float = STALE_S, seed: int | None = None) -> None:
        self._stale_s = stale_s
        self._random = random.Random(seed)
        self._rows: dict[R, int] = {}
        self._free: list[int] = []
        self._replicas: list[_Replica] = []
        self._fleet = Fleet.empty(0)
        self._read_by = np.zeros(0)
        self._heard = np.zeros(0)
        self._draining: set[int] = set()
        self._measured = np.zeros((0, len(COSTS)))
        self._booked: OrderedDict[str, _Booked] = OrderedDict()
        self._unsent: OrderedDict[str, float] = OrderedDict()
        self._late: OrderedDict[str, R] = OrderedDict()
        self._classes: dict[str, ClassStats] = {}
        self._alphas: dict[str, float] = {}
        self._prefixes = Prefixes()
        self._changed: set[int] = set()

    @property
    def replicas(self) -> frozenset[R]:
        """Those that were added and not removed."""
        return frozenset(self._rows)

    @property
    def booked(self) -> int:
        """Requests in the books."""
        return len(self._booked)

    def add(self, replica: R) -> None:
        """A new replica; one that is known is left as it is."""
        if replica in self._rows:
            return
        row = self._free.pop() if self._free else self._grow()
        self._rows[replica], self._replicas[row] = row, _Replica()
        fleet = self._fleet
        known = [i for i in self._rows.values() if self._replicas[i].stats is not None]
        for column, prior in zip((fleet.base, fleet.token, fleet.draft, fleet.prompt), COSTS, strict=True):
            column[row] = float(np.median(column[known])) if known else prior
        fleet.places[row] = float(np.median(fleet.places[known])) if known else 32.0
        fleet.depth[row] = fleet.depth[known[0]] if known else -1.0
        fleet.members[row] = self._read_by[row] = 0.0
        self._heard[row], self._measured[row] = -math.inf, 0.0
        self._changed.add(row)

    def remove(self, replica: R) -> None:
        """It is gone, and all that was there with it."""
        row = self._rows.pop(replica, None)
        if row is None:
            return
        gone = self._replicas[row].stats
        self._merge(gone.classes if gone is not None else {}, {})
        for number in [number for number, one in self._booked.items() if one.row == row]:
            del self._booked[number]
            self._unsent.pop(number, None)
        self._prefixes.forget(row)
        self._draining.discard(row)
        self._replicas[row] = _Replica()
        self._fleet.members[row] = 0.0
        self._changed.add(row)
        self._free.append(row)

    def published(self, replica: R, stats: ReplicaStats, now: float) -> None:
        """A publication of a replica; one that was seen before, or is of an unknown replica, changes nothing."""
        row = self._rows.get(replica)
        if row is None:
            return
        known, fleet = self._replicas[row], self._fleet
        before = known.stats
        if before is not None and before.number == stats.number:
            return
        known.stats, self._heard[row] = stats, now
        if stats.draining:
            self._draining.add(row)
        else:
            self._draining.discard(row)
        if stats.verify_ms is not None and stats.draft_ms is not None and stats.verify_ms[0] > 0.0:
            prompt = stats.verify_ms[1] if stats.prompt_ms is None else stats.prompt_ms
            measured = (*stats.verify_ms, stats.draft_ms, prompt)
            if stats.running or measured != tuple(self._measured[row].tolist()):
                known.worked = now
            self._measured[row] = measured
            believed = self._believed(row, now - known.worked).tolist()
            fleet.base[row], fleet.token[row], fleet.draft[row], fleet.prompt[row] = believed
        starved = stats.kv_use > KV_FULL and stats.waiting > 0
        fleet.places[row] = max(1, min(stats.slots, stats.running) if starved else stats.slots)
        fleet.depth[row] = -1.0 if stats.priced else min(DEEPEST, round(stats.length))
        # A request that ended lately may still be in the count; it must not be taken for one of another router.
        others = max(0, stats.running + stats.waiting - known.own - known.ended)
        fleet.members[row, level(ALPHA)] += others - known.others
        known.others, known.ended = others, 0
        self._merge(before.classes if before is not None else {}, stats.classes)
        self._strike(now)
        self._changed.add(row)
        self._settle()

    def draining(self, replica: R) -> bool:
        """Whether it has said that it takes nothing new."""
        return self._rows.get(replica) in self._draining

    def requests(self, replica: R) -> int:
        """Requests on a replica by the books, those of other routers as of its latest publication; 0 where unknown."""
        row = self._rows.get(replica)
        return 0 if row is None else round(float(self._fleet.members[row].sum()))

    def choose(self, number: str, request: Request | None, candidates: Sequence[R], now: float) -> list[list[R]]:
        """Ranks of candidates, the best first; within one, the shorter queue is to be taken. Empty: none takes any.

        It books the request, by its `number`, where it should go; routed() corrects that. Two candidates at random
        where most of their publications are too old, or nothing is known of the request (None).
        """
        usable, places = candidates, list(map(self._rows.get, candidates))
        if self._draining or None in places:
            usable = [one for one in candidates if one in self._rows and self._rows[one] not in self._draining]
            places = [self._rows[one] for one in usable]
        if not usable:
            return []
        rows = np.array(places, dtype=np.intp)
        stale = np.count_nonzero(self._heard[rows] < now - self._stale_s)
        if request is None or 2 * stale > len(usable):
            pair = self._random.sample(usable, min(2, len(usable)))
            return [pair, [one for one in usable if one not in pair]] if len(usable) > 2 else [pair]
        self._strike(now)
        self._settle()
        wanted = self._wanted(request, now)
        total = losses(self._fleet, wanted).total[rows]
        order = total.argsort().tolist()
        tied, largest = 1, total[order[0]] * (1.0 + TIE)
        while tied < len(order) and total[order[tied]] <= largest:
            tied += 1
        if tied > 1:
            other = self._random.randrange(tied)
            order[0], order[other] = order[other], order[0]
        self._book(number, int(rows[order[0]]), request, wanted, now)
        ordered = list(map(usable.__getitem__, order))
        ranks = [[one] for one in ordered[:RANKED]]
        return [*ranks, ordered[RANKED:]] if len(order) > RANKED else ranks

    def routed(self, number: str, request: Request, replica: R, now: float) -> None:
        """A replica has taken the request."""
        row = self._rows.get(replica)
        if row is None:
            return
        booked = self._booked.get(number)
        if self._late.pop(number, None) == replica:
            if booked is not None:
                self._leave(number)
        else:
            if booked is None or booked.row != row:
                booked = self._book(number, row, request, self._wanted(request, now), now)
            if not booked.sent:
                booked.sent = True
                del self._unsent[number]
                self._replicas[row].own += 1
        self._prefixes.sent(request.blocks, row)
        self._settle()

    def completed(self, number: str, replica: R) -> None:
        """The request has ended there, in whatever way; the same request elsewhere, sent again, is left alone.

        A short one may end before routed() says where it went.
        """
        row, booked = self._rows.get(replica), self._booked.get(number)
        if row is None:
            return
        if booked is None or not booked.sent:
            self._late[number] = replica
            if len(self._late) > LATE:
                self._late.popitem(last=False)
        if booked is not None and booked.row == row:
            self._leave(number)
            self._settle()

    def _believed(self, row: int, idle_s: float) -> Array:
        """Costs of a replica: the medians of all, by as much faster or slower as noise does not account for.

        One replica's a and b apart are not to be relied on: what steps of few sizes have taken fits many lines. A b of
        0 would draw every request there.
        """
        noise = NOISE ** min(1.0 + idle_s / FADES_S, 30.0)
        measured = self._measured[list(self._rows.values())]
        middle: Array = np.maximum(np.median(measured[measured[:, 0] > 0.0], axis=0), TINY_MS)
        ratio = float(self._measured[row] @ SIZE) / float(middle @ SIZE)
        middle[[1, 3]] = np.maximum(middle[[1, 3]], middle[0] / FREE)
        return middle * (max(1.0, ratio / noise) if ratio > 1.0 else min(1.0, ratio * noise))

    def _grow(self) -> int:
        size = len(self._replicas)
        old, new = self._fleet, Fleet.empty(size + 1)
        for name in Fleet.__slots__:
            getattr(new, name)[:size] = getattr(old, name)
        self._fleet = new
        self._read_by, self._heard = np.append(self._read_by, 0.0), np.append(self._heard, -math.inf)
        self._measured = np.vstack((self._measured, np.zeros(len(COSTS))))
        self._replicas.append(_Replica())
        return size

    def _book(self, number: str, row: int, request: Request, wanted: Wanted, now: float) -> _Booked:
        if number in self._booked:
            self._leave(number)
        booked = self._booked[number] = _Booked(row, wanted.level)
        self._unsent[number] = now
        fleet = self._fleet
        fleet.members[row, wanted.level] += 1.0
        self._read_by[row] = max(self._read_by[row], now) + 1e-3 * fleet.prompt[row] * wanted.prompt[row]
        self._changed.add(row)
        if len(self._booked) > BOOKED:
            self._leave(next(iter(self._booked)))
        return booked

    def _leave(self, number: str) -> None:
        booked = self._booked.pop(number)
        self._unsent.pop(number, None)
        if booked.sent:
            replica = self._replicas[booked.row]
            replica.own -= 1
            replica.ended += 1
        self._fleet.members[booked.row, booked.level] -= 1.0
        self._changed.add(booked.row)

    def _settle(self) -> None:
        """Work out what follows from changed books; put off to where nobody waits for a choice, or to the next one."""
        for row in self._changed:
            self._fleet.refresh(row)
        self._changed.clear()

    def _strike(self, now: float) -> None:
        """Forget the requests that were not sent in time; those that are being served may take theirs."""
        while self._unsent:
            number, at = next(iter(self._unsent.items()))
            if now - at <= UNSENT_S:
                break
            self._leave(number)

    def _merge(self, before: Mapping[str, ClassStats], after: Mapping[str, ClassStats]) -> None:
        """Replace one replica's part in the sums of all."""
        for name in before.keys() | after.keys():
            was, now = before.get(name, ClassStats()), after.get(name, ClassStats())
            if was == now:
                continue
            held = self._classes.get(name, ClassStats()).plus(now).plus(was, -1.0)
            self._classes.pop(name, None)
            self._alphas.pop(name, None)
            if held.requests > SLIGHT:
                self._classes[name] = held
                if held.steps > SLIGHT and held.drafted > SLIGHT:
                    self._alphas[name] = acceptance(held.steps, held.drafted, held.accepted)

    def _expect(self, request: Request) -> tuple[float, float]:
        """(answer tokens, acceptance) of its narrowest class, each shrunk toward the next wider one."""
        output, accepted = min(OUTPUT, request.max_tokens / 2), ALPHA
        for name in reversed(request.classes):
            one = self._classes.get(name)
            if one is None:
                continue
            output = (one.output + PRIOR * output) / (one.requests + PRIOR)
            accepted += (self._alphas.get(name, accepted) - accepted) * one.steps / (one.steps + STEPS)
        return min(output, request.max_tokens), accepted

    def _wanted(self, request: Request, now: float) -> Wanted:
        output, accepted = self._expect(request)
        fleet = self._fleet
        np.subtract(self._read_by, now, out=fleet.busy)
        np.maximum(fleet.busy, 0.0, out=fleet.busy)
        fleet.busy *= 1e3
        prompt = np.empty(len(self._replicas))
        prompt.fill(request.prompt_tokens)
        for row, count in self._prefixes.matched(request.blocks).items():
            prompt[row] -= count * BLOCK
        return Wanted(max(1.0, output), level(accepted), prompt)
