"""Every metric and attribute name, in one place.

What the GenAI semantic conventions define is taken from the SDK's own constants; `dsde.*` is defined here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.semconv._incubating.attributes.otel_attributes import OTEL_COMPONENT_NAME, OTEL_COMPONENT_TYPE
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE

__all__ = ["INSTRUMENTS", "POLICY", "PROVIDER", "REASON", "REQUEST_CLASS", "STATE", "Instrument", "labels"]

PROVIDER = "vllm"
"""gen_ai.provider.name of every answer: the engine that makes it."""

POLICY = "dsde.policy"
REQUEST_CLASS = "dsde.request.class"
STATE = "dsde.state"
REASON = "dsde.reason"

EVENT_CALIBRATED = "dsde.calibration.done"
EVENT_OFF = "dsde.speculation.off"
EVENT_ON = "dsde.speculation.on"

_SERVER = (gen_ai.GEN_AI_OPERATION_NAME, gen_ai.GEN_AI_PROVIDER_NAME, gen_ai.GEN_AI_REQUEST_MODEL)
_REQUEST = (gen_ai.GEN_AI_REQUEST_MODEL, POLICY, REQUEST_CLASS)
_STEP = (gen_ai.GEN_AI_REQUEST_MODEL, POLICY)
_RECENT = (gen_ai.GEN_AI_REQUEST_MODEL,)
_SDK = (OTEL_COMPONENT_NAME, OTEL_COMPONENT_TYPE, ERROR_TYPE)

_SHARES = tuple(tenth / 10 for tenth in range(1, 11))
_LENGTHS = (0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 12.5, 16.5, 32.5, 64.5)
_NATS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Instrument:
    """A metric. unit: UCUM. attributes: every key a point may carry. buckets: upper bounds; None for no histogram."""

    name: str
    unit: str
    description: str
    attributes: tuple[str, ...]
    buckets: tuple[float, ...] | None = None


REQUEST_DURATION = Instrument(
    gen_ai_metrics.GEN_AI_SERVER_REQUEST_DURATION,
    "s",
    "Time an engine replica spends on a request, from arrival to its last token",
    (*_SERVER, POLICY, REQUEST_CLASS, ERROR_TYPE),
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
TIME_TO_FIRST_TOKEN = Instrument(
    gen_ai_metrics.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN,
    "s",
    "Time from arrival at an engine replica to the first token",
    (*_SERVER, POLICY, REQUEST_CLASS),
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TIME_PER_OUTPUT_TOKEN = Instrument(
    gen_ai_metrics.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN,
    "s",
    "Mean time between a request's tokens after the first",
    (*_SERVER, POLICY, REQUEST_CLASS),
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)

KLD = Instrument("dsde.kld", "{nat}", "Mean D_KL(p || q) over a request's verified positions", _REQUEST, _NATS)
WVIR = Instrument(
    "dsde.wvir", "1", "Mean WVIR of a request; above 1, instability grows", _REQUEST, (*_SHARES, 1.25, 1.5, 2.0, 3.0)
)
STABILITY = Instrument("dsde.stability", "1", "Share of a request's measured steps that were stable", _REQUEST, _SHARES)
SPECULATION_LENGTH = Instrument(
    "dsde.speculation_length", "{token}", "Mean draft tokens verified per step of a request", _REQUEST, _LENGTHS
)
ACCEPTANCE_RATE = Instrument(
    "dsde.acceptance_rate", "1", "Share of a request's draft tokens that were accepted", _REQUEST, _SHARES
)
STRAGGLER_WAIT = Instrument(
    "dsde.straggler.wait",
    "s",
    "Time a request waited while its batch drafted further for longer members",
    _REQUEST,
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)

STEPS = Instrument("dsde.steps", "{step}", "Engine steps that could draft", (*_STEP, STATE, REASON))
DRAFT_TOKENS = Instrument("dsde.draft_tokens", "{token}", "Draft tokens verified", _STEP)
ACCEPTED_TOKENS = Instrument("dsde.accepted_tokens", "{token}", "Draft tokens accepted", _STEP)
DECODED_TOKENS = Instrument("dsde.decoded_tokens", "{token}", "Tokens emitted by decoding", _STEP)
STRAGGLER_RATIO = Instrument(
    "dsde.straggler.ratio",
    "1",
    "Longest speculation length of a batch over the mean of its members",
    _STEP,
    (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 16.0),
)
CONTROLLER_DURATION = Instrument(
    "dsde.controller.duration",
    "s",
    "Time the controller takes in one engine step",
    _STEP,
    (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05),
)

RUNNING = Instrument("dsde.requests.running", "{request}", "Requests that an engine works on", _RECENT)
WAITING = Instrument("dsde.requests.waiting", "{request}", "Requests that wait inside an engine", _RECENT)
GOODPUT = Instrument("dsde.goodput", "{token}/s", "Tokens emitted by decoding per second, newest 10 s", _RECENT)
RECENT_LENGTH = Instrument(
    "dsde.recent.speculation_length", "{token}", "Draft tokens verified per request and step, newest 10 s", _RECENT
)
RECENT_ACCEPTANCE = Instrument(
    "dsde.recent.acceptance_rate", "1", "Share of draft tokens accepted, newest 10 s of drafting", _RECENT
)
RECENT_KLD = Instrument("dsde.recent.kld", "{nat}", "Mean KLD of verified positions, newest 10 s of drafting", _RECENT)
RECENT_STABILITY = Instrument(
    "dsde.recent.stability", "1", "Share of stable steps of the requests that finished last", _RECENT
)
RECENT_STRAGGLER_SHARE = Instrument(
    "dsde.recent.straggler_share",
    "1",
    "Share of decoding time that requests waited for longer members of their batch, those that finished last",
    _RECENT,
)
RECENT_UNUSED_SLOTS = Instrument(
    "dsde.recent.unused_slots", "1", "Share of draft slots left unused for a longer member, newest 10 s", _RECENT
)
RECENT_OFF_SHARE = Instrument("dsde.recent.off_share", "1", "Share of steps without drafts, newest 10 s", _RECENT)

INSTRUMENTS: Mapping[str, Instrument] = {
    value.name: value for value in list(globals().values()) if isinstance(value, Instrument)
}
"""Every instrument of this module by its name."""


def labels(metric: str) -> tuple[str, ...]:
    """The attribute keys that points of `metric` may carry; for a metric of the SDK itself, those of its components."""
    known = INSTRUMENTS.get(metric)
    return _SDK if known is None else known.attributes
