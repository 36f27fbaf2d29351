"""What happens to the speculation of a traced request, with the time of each event; untraced ones cost nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from dsde.control.controller import Controller
from dsde.control.records import SpeculationPlan
from dsde.telemetry.names import EVENT_CALIBRATED, EVENT_OFF, EVENT_ON

__all__ = ["Event", "Events"]

Event = tuple[str, int, dict[str, Any]]
"""Name, nanoseconds since the epoch, attributes."""

_MOST_EVENTS = 64


@dataclass(slots=True)
class _Request:
    on: bool | None = None
    calibrating: bool = True
    steps: int = 0
    events: list[Event] = field(default_factory=list)


class Events:
    """The events of the live requests that were admitted here, at most 64 of each; the earliest are kept."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._requests: dict[str, _Request] = {}

    def admit(self, request_id: str) -> None:
        """Follow a request until finish()."""
        self._requests[request_id] = _Request()

    def planned(self, plan: SpeculationPlan) -> None:
        """Note who starts or stops to speculate with this plan, and whose calibration has ended before it."""
        if not self._requests:
            return
        for request_id, request in self._requests.items():
            length = plan.lengths.get(request_id)
            if length is None:
                continue
            on = length > 0
            if request.on is not on:
                self._note(request, EVENT_ON if on else EVENT_OFF, length)
                request.on = on
            if request.calibrating and not self._controller.calibrating(request_id):
                request.calibrating = False
                self._note(request, EVENT_CALIBRATED, length)
            request.steps += 1

    def of(self, request_id: str) -> list[Event]:
        """The events so far of a request that goes on, oldest first."""
        request = self._requests.get(request_id)
        return [] if request is None else request.events

    def finish(self, request_id: str) -> list[Event]:
        """The request's events, oldest first; it is forgotten."""
        request = self._requests.pop(request_id, None)
        return [] if request is None else request.events

    @staticmethod
    def _note(request: _Request, name: str, length: int) -> None:
        if len(request.events) < _MOST_EVENTS:
            attributes = {"dsde.step": request.steps, "dsde.speculation_length": length}
            request.events.append((name, time.time_ns(), attributes))
