"""What a live engine tells routers: its load from vLLM's statistics, its costs and classes from finished requests.

The scheduler sends the costs it has learnt home with every finished request, as one more entry of
RequestOutput.kv_transfer_params, so nothing is asked for and nothing is sent while nothing happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.outputs import RequestOutput

from dsde.engine.finished import decoding_of
from dsde.engine.remote import GenerateCall
from dsde.engine.stat_logger import EngineLoad
from dsde.engine.transport import ENGINE_KEY, FIGURES_KEY
from dsde.routing.request import described
from dsde.routing.stats import ClassStats, ClassTable, ReplicaStats

__all__ = ["RoutingRecord"]

PRICED = frozenset({"goodput"})
"""Policies that draft as deep as pays."""
MEMORY = 0.9
"""Weight that averages and sums over requests keep when another one finishes."""


class RoutingRecord:
    """Gathers a replica's finished requests and makes its publications. slots: requests that decode together."""

    def __init__(self, slots: int, policy: str) -> None:
        self._slots = slots
        self._published = 0
        self._classes = ClassTable()
        self._costs: Mapping[str, Any] = {"verify": None, "draft": None, "prompt": None, "policy": policy}
        self._length = self._waited_s = self._decoded_s = 0.0

    def finish(self, call: GenerateCall, output: RequestOutput) -> None:
        """Take a request's last output in, and take the engine's costs off it."""
        carried = dict(output.kv_transfer_params or {})
        costs = carried.pop(ENGINE_KEY, None)
        if costs is not None:
            self._costs = costs
            output.kv_transfer_params = carried or None
        figures = carried.get(FIGURES_KEY)
        if figures is None or not output.outputs or call.sampling_params.n > 1:
            # Of several answers, one's figures and another's counts would come together.
            return
        steps, drafted, accepted, seconds = decoding_of(output)
        emitted = 1 + figures["steps"] + accepted
        request = described(call.prompt, call.sampling_params)
        self._classes.finish(request.classes, ClassStats(1.0, emitted, steps, drafted, accepted))
        self._length += (1.0 - MEMORY) * (figures["speculation_length"]["mean"] - self._length)
        self._waited_s = MEMORY * self._waited_s + figures["straggler"]["wait_ms"] / 1e3
        self._decoded_s = MEMORY * self._decoded_s + seconds

    def publish(self, load: EngineLoad, unfinished: int, *, draining: bool) -> ReplicaStats:
        """The next publication. unfinished: requests in the engine, which is the truth where vLLM's count is of a step
        that is over.
        """
        self._published += 1
        running = min(load.running, unfinished)
        return ReplicaStats(
            number=self._published,
            running=running,
            waiting=unfinished - running,
            slots=self._slots,
            kv_use=load.kv_use,
            verify_ms=None if self._costs["verify"] is None else (self._costs["verify"][0], self._costs["verify"][1]),
            draft_ms=self._costs["draft"],
            prompt_ms=self._costs["prompt"],
            length=self._length,
            straggler_share=min(1.0, self._waited_s / self._decoded_s) if self._decoded_s else 0.0,
            priced=self._costs["policy"] in PRICED,
            draining=draining,
            classes=self._classes.newest(),
        )
