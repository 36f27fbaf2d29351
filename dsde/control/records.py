"""The three records that cross a layer, and nothing else does.

SpeculationPlan goes down (scheduler to worker), StepObservation comes up (worker to controller), RequestSpeculation
leaves with the last output of a request. All are immutable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dsde.control.arrays import Bools, Ints, Numbers

__all__ = ["DraftStop", "RequestSpeculation", "SpeculationPlan", "StepObservation"]


class DraftStop(Protocol):
    """Decides inside the draft loop, on the host; it pickles, since it travels with the plan."""

    def bind(self, request_ids: Sequence[str]) -> DraftStop:
        """The rule for the requests of one drafting in batch order: call it once before the loop, and use its answer.

        Requests that it does not know want no draft tokens.
        """

    def goes_on(self, step: int, top_prob: Numbers, entropy: Numbers) -> Bools:
        """[B] bool after draft step `step` (0-based): which requests want another draft token.

        top_prob: [B], max_v q of the step. entropy: [B], H(q) in nats. Requests are in batch order, which is the order
        of StepObservation.draft_ids. Drafting ends when nobody wants another one; a request that once wanted none gets
        none, whatever a later answer says of it.
        """


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """Speculation lengths for one decoding iteration, fixed before any draft token is drawn.

    depth: draft steps the batch runs, D = max_i SL_i, in draft tokens; at 0 nobody speculates and the drafter may rest.
    lengths: request id -> SL_i in draft tokens, 0 <= SL_i <= depth. A request that is absent has length 0.
    stop: rule that may end the drafting before `depth`, None to draft all of it.
    confidence: whether the drafter's confidence at each step is to be measured and reported.
    """

    depth: int = 0
    lengths: Mapping[str, int] = field(default_factory=dict)
    stop: DraftStop | None = None
    confidence: bool = False


@dataclass(frozen=True, slots=True)
class StepObservation:
    """What one verification step measured, for the R requests that decoded in it.

    Positions are ragged and flattened request by request: N = sum(num_draft_tokens), and request r owns the next
    num_draft_tokens[r] entries of kld and overlap. p is the target's distribution, q the draft's, both exactly as the
    rejection sampler used them.

    request_ids: R ids, in batch order.
    num_draft_tokens: [R] int64, draft tokens verified; 0 where the request decoded without speculation.
    num_accepted_tokens: [R] int64, draft tokens accepted, bonus token not counted.
    kld: [N] float32, D_KL(p || q) in nats; NaN where a logit was NaN, or where the drafter has no distribution.
    overlap: [N] float32, sum_v min(p, q) = 1 - TV(p, q), the acceptance probability at temperature > 0; NaN as in kld.
    temperature: [R] float32, sampling temperature (0 = greedy).
    draft_step_ms: mean time of one draft step of the drafting that followed this verification, None when nothing was
        drafted.
    draft_ids: the B requests of that drafting, in batch order; empty when nothing was drafted.
    draft_top_prob, draft_entropy: [B, D] float32, max_v q and H(q) in nats of each draft step, as a function of the
        prefix alone, never of the token drawn; None for a drafter without distributions. D is what was drafted.
    step_ms: time of this step's target forward, verification and sampling without the drafting, None when not measured.
    num_tokens: tokens the target processed in that time, prompt tokens included.
    has_prefill: whether prompt tokens were among them.
    catch_up_ms: time of the whole drafting where the draft also read a backlog, and draft_step_ms therefore is None.
    """

    request_ids: tuple[str, ...]
    num_draft_tokens: Ints
    num_accepted_tokens: Ints
    kld: Numbers
    overlap: Numbers
    temperature: Numbers
    draft_step_ms: float | None = None
    draft_ids: tuple[str, ...] = ()
    draft_top_prob: Numbers | None = None
    draft_entropy: Numbers | None = None
    step_ms: float | None = None
    num_tokens: int = 0
    has_prefill: bool = False
    catch_up_ms: float | None = None


@dataclass(frozen=True, slots=True)
class RequestSpeculation:
    """A request's speculation figures, as they stand in its answer. README defines every field once.

    Lengths in draft tokens, KLD in nats, times in milliseconds. None where nothing was measured.
    """

    policy: str
    steps: int
    steps_off: int
    length_mean: float
    length_max: int
    length_limit: int
    kld_mean: float | None
    kld_last: float | None
    kld_max: float | None
    wvir_mean: float | None
    wvir_last: float | None
    stability: float | None
    expected_acceptance_rate: float | None
    capped_steps: int
    straggler_wait_ms: float
    straggler_caused_ms: float
    straggler_steps: int

    def to_dict(self) -> dict[str, Any]:
        """The JSON object that rides inside `metrics.speculative_decoding` as `dsde`."""
        return {
            "policy": self.policy,
            "steps": self.steps,
            "steps_off": self.steps_off,
            "speculation_length": {"mean": self.length_mean, "max": self.length_max, "limit": self.length_limit},
            "kld": {"mean": self.kld_mean, "last": self.kld_last, "max": self.kld_max},
            "wvir": {"mean": self.wvir_mean, "last": self.wvir_last},
            "stability": self.stability,
            "expected_acceptance_rate": self.expected_acceptance_rate,
            "capped_steps": self.capped_steps,
            "straggler": {
                "wait_ms": self.straggler_wait_ms,
                "caused_ms": self.straggler_caused_ms,
                "steps": self.straggler_steps,
            },
        }
