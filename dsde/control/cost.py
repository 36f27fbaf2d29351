"""What a step costs, learnt while serving: verification of t tokens, one draft step of n requests. No profiling run.

Only ratios of costs decide anything, so the prior is a shape without a unit: verification 1 + 0.005 t, a draft step
0.12. It is optimistic, since only speculation shows what speculation costs, and a ledger bounds what that may take. The
first clean measurement gives it its scale in milliseconds.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Curve", "StepCost", "StepTime"]

VERIFY_PRIOR = (1.0, 0.005)
DRAFT_PRIOR = (0.12, 0.0)
"""Constant and slope, in units of the constant part of one verification."""

FORGETTING = 0.995
DOUBT = 1.25
"""A verification further than this factor from what its size takes shows that the machine's speed has changed."""
OUTLIER = 4.0
"""A time further than this factor from its prediction is a pause, or the machine has changed."""
RESTART = 8
"""Outliers in a row after which it is the machine."""
CLIP = 0.5
"""Relative error above which a measurement at a size seen before pulls no harder."""
STEEPNESS_MEMORY = 0.95
"""What the sums under a batch size's slope keep when it decodes another step with drafts."""
PROMPT_MEMORY = 0.9
"""What the sums over prompt tokens keep when another step reads some."""
LOCAL_MEMORY = 20.0
LOCAL_PRIOR = 4.0
"""Measurements at one size that the average there remembers, and that weigh as much as the line."""


class StepTime(NamedTuple):
    """Times of one engine step, ms. verify: forward, verification and sampling. draft: all draft steps that followed.

    measured: whether verify is a measurement of decoding alone, without prompt tokens and without a pause. pace: how
    much slower the machine was than is known of it, 1 unless that is beyond doubt.
    """

    verify: float
    draft: float
    measured: bool
    pace: float


class Curve:
    """t(x) = a + b x by recursive least squares on relative errors, and the average of t / (a + b x) at each x seen.

    The line generalises and the averages follow staircases. Only the direction in (a, b) that a measurement excites is
    forgotten, so that a load that never varies keeps the slope it once learnt. prior: (a, b) up to a common factor.
    line: (a, b), both at least 0.
    """

    def __init__(self, prior: tuple[float, float], sizes: int) -> None:
        self._prior = prior
        self._scaled = False
        self._a, self._b = self.line = prior
        self._information = (0.0, 0.0, 0.0)
        self._strange = 0
        self._range = (1, 1)
        self._ratio = [1.0] * (sizes + 1)
        self._count = [0.0] * (sizes + 1)

    @property
    def scaled(self) -> bool:
        """Whether anything has been measured."""
        return self._scaled

    def at(self, size: int) -> float:
        """Expected time at x = size."""
        a, b = self.line
        time = a + b * size
        if size < len(self._count):
            count = self._count[size]
            time *= (count * self._ratio[size] + LOCAL_PRIOR) / (count + LOCAL_PRIOR)
        return time

    def seen(self, size: int) -> bool:
        """Whether x = size has been measured since the line last started."""
        return size < len(self._count) and self._count[size] > 0.0

    def rescale(self, unit: float) -> None:
        """Put the prior into ms, where nothing has been measured yet: (a, b) = prior * unit."""
        if not self._scaled:
            self._a, self._b = self.line = self._prior[0] * unit, self._prior[1] * unit

    def learn(self, size: int, time: float) -> bool:
        """Take one measurement in ms; False where it was taken for a pause and ignored."""
        if not self._scaled:
            self._start(size, time)
        predicted = max(self.at(size), 1e-9)
        smallest, largest = self._range
        bound = OUTLIER
        if not smallest <= size <= largest:
            # Far from all sizes seen, the slope is a guess, and time may grow as fast as the size does.
            bound *= max(size / largest, smallest / max(1, size))
        if not predicted / bound <= time <= predicted * bound:
            self._strange += 1
            if self._strange < RESTART:
                return False
            self._start(size, time)
            smallest = largest = max(1, size)
        self._strange = 0
        self._range = min(smallest, size), max(largest, size)
        self._fit(size, time, CLIP if self.seen(size) else bound)
        return True

    def _start(self, size: int, time: float) -> None:
        a, b = self._prior
        unit = time / (a + b * size)
        self._a, self._b = self.line = a * unit, b * unit
        # Weak in both: where constant and slope trade against each other, a stiff one would hold the other.
        self._information = ((0.05 / time) ** 2, 0.0, (0.03 / max(self._b, 0.02 * time)) ** 2)
        self._scaled = True
        self._range = (max(1, size), max(1, size))
        self._count = [0.0] * len(self._count)

    def _fit(self, size: int, time: float, clip: float) -> None:
        aa, ab, bb = self._information
        x = float(size)
        along_a, along_b = aa + ab * x, ab + bb * x
        excited = along_a + along_b * x
        forget = (1.0 - FORGETTING) / excited
        weight = 1.0 / time**2
        aa += weight - forget * along_a * along_a
        ab += weight * x - forget * along_a * along_b
        bb += weight * x * x - forget * along_b * along_b
        self._information = (aa, ab, bb)

        expected = self._a + self._b * x
        error = time - expected
        bound = clip * max(expected, 1e-9)
        pull = weight * max(-bound, min(bound, error))
        determinant = aa * bb - ab * ab
        if determinant > 1e-12 * aa * bb:
            self._a += (bb - ab * x) * pull / determinant
            self._b += (aa * x - ab) * pull / determinant

        nearest = self._admissible()
        if any(nearest):
            # No step takes no time: where the origin is nearest, the line stays.
            self.line = nearest
        a, b = self.line
        if size < len(self._count):
            count = self._count[size] = min(self._count[size] + 1.0, LOCAL_MEMORY)
            ratio = time / max(a + b * x, 1e-9)
            self._ratio[size] += (min(OUTLIER, ratio) - self._ratio[size]) / count

    def _admissible(self) -> tuple[float, float]:
        """The admissible point that is nearest to (a, b) in the metric of what was measured."""
        a, b = self._a, self._b
        aa, ab, bb = self._information
        if b < 0.0:
            return max(0.0, a + (ab / aa * b if aa else 0.0)), 0.0
        if a < 0.0:
            return 0.0, max(0.0, b + (ab / bb * a if bb else 0.0))
        return a, b


class StepCost:
    """Costs of the engine's steps, ms once measured. capacity: most requests of a batch; max_length: longest draft."""

    def __init__(self, capacity: int, max_length: int) -> None:
        self._verify = Curve(VERIFY_PRIOR, capacity * (1 + max_length))
        self._draft = Curve(DRAFT_PRIOR, capacity)
        # Of each batch size: sums of (draft tokens * time beyond the line's) and of (draft tokens)^2.
        self._steepness = [(0.0, 0.0)] * (capacity + 1)
        self._sync = self._syncs = 0.0
        self._prompt_ms = self._prompt_tokens = 0.0

    @property
    def measured(self) -> bool:
        """Whether a verification has been measured, so that times are in ms."""
        return self._verify.scaled

    @property
    def line(self) -> tuple[float, float]:
        """(a, b): a step of t tokens takes about a + b t."""
        return self._verify.line

    def token(self, requests: int) -> float:
        """Price of one more token in a verification of `requests` requests: b, and what this batch size adds to it.

        A machine that reads memory for a few tokens computes for many, so that no line holds for both.
        """
        excess, drafts = self._steepness[requests]
        return max(0.0, self._verify.line[1] + excess / (drafts + LOCAL_PRIOR * requests**2))

    @property
    def prompt(self) -> float | None:
        """Time of one prompt token, the average of those read lately; None until there were some.

        What decoding adds to a step can be less than its times vary by, and b comes out as 0; prompts do not hide.
        """
        return self._prompt_ms / self._prompt_tokens if self._prompt_tokens else None

    def verify(self, tokens: int) -> float:
        """Time of one step that decodes or verifies `tokens` tokens."""
        return self._verify.at(tokens)

    def verified(self, tokens: int) -> bool:
        """Whether a step of `tokens` tokens has been measured."""
        return self._verify.seen(tokens)

    def draft(self, requests: int) -> float:
        """d(n), time of one draft step of n requests."""
        return self._draft.at(requests)

    @property
    def sync(self) -> float:
        """What a rule inside the draft loop adds to a draft step; 0 until it has been measured."""
        return max(0.0, self._sync)

    def learn(
        self,
        tokens: int,
        step_ms: float | None,
        has_prefill: bool,
        drafting: int,
        depth: int,
        draft_step_ms: float | None,
        *,
        requests: int = 0,
        stoppable: bool = False,
        prompt_tokens: int = 0,
    ) -> StepTime:
        """Take one engine step and return its times, expected ones where measured ones are no decoding.

        tokens: tokens of the forward, those of prompts, prompt_tokens, left out. drafting: requests in the drafting, of
        `depth` draft steps of draft_step_ms each. requests: those that decoded in the forward, with tokens - requests
        drafts. stoppable: whether a rule could end the drafting after each of its steps.
        """
        verify, measured = self._learn_verify(tokens, step_ms, has_prefill)
        if has_prefill and prompt_tokens > 0 and step_ms is not None and self.measured:
            self._learn_prompt(prompt_tokens, step_ms - verify)
        if measured and 0 < requests < tokens:
            self._learn_steepness(requests, tokens - requests, verify)
        slowness = verify / self.verify(tokens) if measured else 1.0
        pace = slowness / min(DOUBT, max(1.0 / DOUBT, slowness))
        if not depth or not drafting:
            return StepTime(verify, 0.0, measured, pace)
        step = self.draft(drafting)
        if draft_step_ms is not None and draft_step_ms > 0.0 and not has_prefill:
            step = self._learn_draft(drafting, draft_step_ms, step, stoppable)
        return StepTime(verify, depth * step, measured, pace)

    def _learn_verify(self, tokens: int, step_ms: float | None, has_prefill: bool) -> tuple[float, bool]:
        if step_ms is None or step_ms <= 0.0 or has_prefill or not self._verify.learn(tokens, step_ms):
            return self.verify(tokens), False
        self._draft.rescale(self._verify.line[0])
        return step_ms, True

    def _learn_prompt(self, tokens: int, beyond: float) -> None:
        known = self.prompt
        # A pause counts as a slow step; a machine that has become slow does so in a few.
        bound = OUTLIER * tokens * known if known else beyond
        self._prompt_ms = PROMPT_MEMORY * self._prompt_ms + max(0.0, min(bound, beyond))
        self._prompt_tokens = PROMPT_MEMORY * self._prompt_tokens + tokens

    def _learn_steepness(self, requests: int, drafts: int, step_ms: float) -> None:
        beyond = step_ms - self.verify(requests) - self._verify.line[1] * drafts
        bound = CLIP * step_ms
        excess, weight = self._steepness[requests]
        excess = STEEPNESS_MEMORY * excess + drafts * max(-bound, min(bound, beyond))
        self._steepness[requests] = excess, STEEPNESS_MEMORY * weight + drafts * drafts

    def _learn_draft(self, requests: int, step_ms: float, expected: float, stoppable: bool) -> float:
        if not stoppable or not self._draft.seen(requests):
            return step_ms if self._draft.learn(requests, step_ms) else expected
        if step_ms > OUTLIER * expected:
            return expected
        self._syncs = min(self._syncs + 1.0, LOCAL_MEMORY)
        self._sync += (step_ms - expected - self._sync) / self._syncs
        return step_ms
