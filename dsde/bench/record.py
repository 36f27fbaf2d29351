"""Traces of real drafts, for `dsde.control.replay`: every step of the longest fixed length, request by request."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dsde.bench.cell import Cell
from dsde.bench.engines import OnStep
from dsde.control.records import SpeculationPlan, StepObservation
from dsde.control.trace import RequestTrace, Round, Trace

__all__ = ["Recorder"]


class Recorder:
    """Records runs at a fixed length; a replay drafts no deeper than that, so it should be the longest there is."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._requests: dict[str, tuple[float, list[Round]]] = {}

    def observe(self, cell: Cell, label: str) -> OnStep:
        """An observer for a run at the fixed length, with the drafter's confidence."""
        drafts: dict[str, tuple[list[float], list[float]]] = {}

        def on_step(observation: StepObservation, plan: SpeculationPlan | None) -> None:
            self._verified(observation, drafts, cell.scene.temperature)
            drafts.clear()
            if observation.draft_top_prob is not None and observation.draft_entropy is not None:
                rows = zip(observation.draft_top_prob.tolist(), observation.draft_entropy.tolist(), strict=True)
                drafts.update(zip(observation.draft_ids, rows, strict=True))

        return on_step

    def trace(self, notes: Mapping[str, Any]) -> Trace:
        """All that was recorded; notes: what it was recorded on."""
        requests = []
        for request, (temperature, rounds) in self._requests.items():
            workload = request.partition("-")[0]
            requests.append(RequestTrace(request, workload, temperature, tuple(rounds)))
        return Trace(self._length, tuple(requests), dict(notes))

    def write(self, file: Path, notes: Mapping[str, Any]) -> int:
        """Write the trace, gzipped where the name ends in .gz; how many requests it holds."""
        trace = self.trace(notes)
        trace.write(file)
        return len(trace.requests)

    def _verified(
        self, observation: StepObservation, drafts: Mapping[str, tuple[list[float], list[float]]], temperature: float
    ) -> None:
        counts = observation.num_draft_tokens
        signals = np.stack((observation.kld, observation.overlap))
        rows = zip(
            observation.request_ids,
            np.split(signals, np.cumsum(counts)[:-1], axis=1),
            observation.num_accepted_tokens.tolist(),
            strict=True,
        )
        for request, both, accepted in rows:
            # Drafts from before the clock started, and those cut short near a request's end, are no whole round.
            if request in drafts and both.shape[1] == self._length and bool(np.isfinite(both).all()):
                top_prob, entropy = drafts[request]
                kld, overlap = both.tolist()
                round_ = Round(
                    tuple(top_prob[: self._length]),
                    tuple(entropy[: self._length]),
                    tuple(kld),
                    tuple(overlap),
                    accepted,
                )
                self._requests.setdefault(request, (temperature, []))[1].append(round_)
