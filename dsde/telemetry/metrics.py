"""The instruments of an engine replica, and how a finished request and an engine step are booked on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation
from opentelemetry.sdk.metrics.view import DropAggregation, View
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE

from dsde.telemetry import names
from dsde.telemetry.names import Instrument
from dsde.telemetry.step import EngineStep
from dsde.telemetry.window import Window

__all__ = ["FinishedRequest", "Metrics", "views"]

# Policies times request classes times errors stay far below; a defect stops here.
_CARDINALITY_LIMIT = 200


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that left its engine.

    operation: gen_ai.operation.name. request_class: greedy, sampled or structured. duration_s: since its arrival.
    first_token_s, per_token_s: None for one that failed or got too few tokens. decoding_s: from its first token to its
    last. error: error.type of one that failed. figures: RequestSpeculation.to_dict(), None when the engine sent none.
    drafted, accepted: its draft tokens.
    """

    operation: str
    request_class: str
    duration_s: float
    first_token_s: float | None = None
    per_token_s: float | None = None
    decoding_s: float = 0.0
    error: str | None = None
    figures: Mapping[str, Any] | None = None
    drafted: int = 0
    accepted: int = 0


class Metrics:
    """Books requests and steps of one engine. `model`: its name in the API."""

    def __init__(self, meter: Meter, model: str) -> None:
        self._model = {gen_ai.GEN_AI_REQUEST_MODEL: model}
        self._window = Window()
        self._running = self._waiting = 0
        self._step_attributes: dict[tuple[str, ...], dict[str, str]] = {}

        def histogram(one: Instrument) -> Histogram:
            return meter.create_histogram(
                one.name, one.unit, one.description, explicit_bucket_boundaries_advisory=one.buckets
            )

        self._duration = histogram(names.REQUEST_DURATION)
        self._first_token = histogram(names.TIME_TO_FIRST_TOKEN)
        self._per_token = histogram(names.TIME_PER_OUTPUT_TOKEN)
        self._kld = histogram(names.KLD)
        self._wvir = histogram(names.WVIR)
        self._stability = histogram(names.STABILITY)
        self._length = histogram(names.SPECULATION_LENGTH)
        self._acceptance = histogram(names.ACCEPTANCE_RATE)
        self._wait = histogram(names.STRAGGLER_WAIT)
        self._straggler_ratio = histogram(names.STRAGGLER_RATIO)
        self._controller = histogram(names.CONTROLLER_DURATION)
        # Read when somebody exports, so that a step costs an addition.
        self._totals: dict[str, dict[tuple[str, ...], int]] = {}
        for one in (names.STEPS, names.DRAFT_TOKENS, names.ACCEPTED_TOKENS, names.DECODED_TOKENS):
            self._totals[one.name] = {}
            meter.create_observable_counter(one.name, [self._total(one)], one.unit, one.description)
        window = self._window
        recent: list[tuple[Instrument, Callable[[], float | None]]] = [
            (names.RUNNING, lambda: self._running),
            (names.WAITING, lambda: self._waiting),
            (names.GOODPUT, lambda: window.rate("emitted")),
            (names.RECENT_LENGTH, lambda: window.ratio("drafted", "requests")),
            (names.RECENT_ACCEPTANCE, lambda: window.ratio("accepted", "drafted")),
            (names.RECENT_KLD, lambda: window.ratio("kld_sum", "positions")),
            (names.RECENT_STABILITY, lambda: window.ratio("stable", "measured")),
            (names.RECENT_STRAGGLER_SHARE, lambda: window.ratio("waited_s", "decoding_s")),
            (names.RECENT_UNUSED_SLOTS, lambda: window.ratio("unused", "slots")),
            (names.RECENT_OFF_SHARE, lambda: window.ratio("off", "steps")),
        ]
        for one, value in recent:
            meter.create_observable_gauge(one.name, [self._observe(value)], one.unit, one.description)

    def request(self, done: FinishedRequest) -> None:
        """Book a request that left its engine, whole or not."""
        figures = done.figures
        ours = {
            **self._model,
            names.POLICY: figures["policy"] if figures else "",
            names.REQUEST_CLASS: done.request_class,
        }
        server = {
            **ours,
            gen_ai.GEN_AI_OPERATION_NAME: done.operation,
            gen_ai.GEN_AI_PROVIDER_NAME: names.PROVIDER,
        }
        self._duration.record(done.duration_s, server if done.error is None else {**server, ERROR_TYPE: done.error})
        if done.error is None:
            if done.first_token_s is not None:
                self._first_token.record(done.first_token_s, server)
            if done.per_token_s is not None:
                self._per_token.record(done.per_token_s, server)
        if not figures or not figures["steps"]:
            return
        self._length.record(figures["speculation_length"]["mean"], ours)
        waited_s = figures["straggler"]["wait_ms"] / 1e3
        self._wait.record(waited_s, ours)
        self._window.add({"waited_s": waited_s, "decoding_s": done.decoding_s})
        if done.drafted:
            self._acceptance.record(done.accepted / done.drafted, ours)
        if figures["stability"] is not None:
            self._kld.record(figures["kld"]["mean"], ours)
            self._wvir.record(figures["wvir"]["mean"], ours)
            self._stability.record(figures["stability"], ours)
            measured = figures["steps"] - figures["steps_off"]
            self._window.add({"stable": figures["stability"] * measured, "measured": measured})

    def load(self, running: int, waiting: int) -> None:
        """Note how many requests the engine has."""
        self._running, self._waiting = running, waiting

    def step(self, step: EngineStep) -> None:
        """Book one engine step."""
        attributes = self._attributes(step.policy)
        self._controller.record(step.controller_s, attributes)
        if step.requests:
            self._add(names.DRAFT_TOKENS, step.drafted, step.policy)
            self._add(names.ACCEPTED_TOKENS, step.accepted, step.policy)
            self._add(names.DECODED_TOKENS, step.emitted, step.policy)
        if step.may_draft:
            self._add(names.STEPS, 1, step.policy, "on" if step.depth else "off", step.reason)
        if step.used:
            self._straggler_ratio.record(step.slots / step.used, attributes)
        self._window.add(
            {
                "emitted": step.emitted,
                "requests": step.requests,
                "drafted": step.drafted,
                "accepted": step.accepted,
                "kld_sum": step.kld_sum,
                "positions": step.positions,
                "slots": step.slots,
                "unused": step.slots - step.used,
                "steps": int(step.may_draft),
                "off": int(step.may_draft and not step.depth),
            }
        )

    def _add(self, one: Instrument, amount: int, *key: str) -> None:
        totals = self._totals[one.name]
        totals[key] = totals.get(key, 0) + amount

    def _total(self, one: Instrument) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(total, self._attributes(*key)) for key, total in list(self._totals[one.name].items())]

        return observe

    def _attributes(self, policy: str, state: str = "", reason: str = "") -> dict[str, str]:
        key = (policy, state, reason)
        known = self._step_attributes.get(key)
        if known is None:
            known = {**self._model, names.POLICY: policy}
            if state:
                known |= {names.STATE: state, names.REASON: reason}
            self._step_attributes[key] = known
        return known

    def _observe(self, value: Callable[[], float | None]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            now = value()
            return [] if now is None else [Observation(now, self._model)]

        return observe


def views() -> list[View]:
    """One view for each instrument: no point carries an attribute that its instrument does not declare.

    Of the SDK's own metrics those of processors and exporters stay, which tell what was lost.
    """
    return [
        View(instrument_name="otel.sdk.*.duration", aggregation=DropAggregation()),
        View(instrument_name="otel.sdk.span.*", aggregation=DropAggregation()),
        *(
            View(
                instrument_name=one.name,
                attribute_keys=set(one.attributes),
                aggregation_cardinality_limit=_CARDINALITY_LIMIT,
            )
            for one in names.INSTRUMENTS.values()
        ),
    ]
