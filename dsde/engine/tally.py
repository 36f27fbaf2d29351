"""What the scheduler adds up during one engine step, in plain numbers: a dozen additions, whatever the load."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from dsde.control.records import SpeculationPlan, StepObservation
from dsde.telemetry.step import EngineStep

__all__ = ["Tally"]


class Tally:
    """The EngineStep in the making. As a context manager it adds the time of its block to controller_s."""

    def __init__(self) -> None:
        self._start = 0.0
        self._step = EngineStep()
        self._seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds += time.perf_counter() - self._start

    def planned(self, plan: SpeculationPlan, room: Sequence[int], fits: bool) -> None:
        """Add the plan of this step's drafting. room: as for Controller.plan. fits: inside the draft's context."""
        lengths = plan.lengths.values()
        used = sum(lengths)
        reason = "policy" if used or any(room) else "room" if fits else "context"
        self._step = self._step._replace(
            may_draft=bool(room),
            depth=plan.depth,
            slots=plan.depth * len(lengths),
            used=used,
            reason=reason,
        )

    def observed(self, step: StepObservation) -> None:
        """Add what the step verified."""
        requests, drafted = len(step.request_ids), len(step.kld)
        accepted = int(step.num_accepted_tokens.sum())
        kld_sum = float(step.kld.sum()) if drafted else 0.0
        measured = math.isfinite(kld_sum)
        self._step = self._step._replace(
            requests=requests,
            drafted=drafted,
            accepted=accepted if drafted else 0,
            emitted=requests + accepted,
            kld_sum=kld_sum if measured else 0.0,
            positions=drafted if measured else 0,
        )

    def cut(self, emitted: int, kept: int) -> None:
        """Take off what a request emitted behind its end: its answer keeps `kept` of the `emitted` tokens of a step."""
        if kept < emitted:
            # The last of those emitted is the target's own token.
            self._step = self._step._replace(
                emitted=self._step.emitted - (emitted - kept),
                accepted=self._step.accepted - (emitted - 1 - kept),
            )

    def take(self, policy: str) -> EngineStep:
        """The step so far, under the engine's default `policy`; the next one starts from nothing."""
        step = self._step._replace(policy=policy, controller_s=self._seconds)
        self._step, self._seconds = EngineStep(), 0.0
        return step
