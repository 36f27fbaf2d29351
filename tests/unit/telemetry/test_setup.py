from __future__ import annotations

import pytest

from dsde.config import TelemetryConfig
from dsde.telemetry import setup

ON = TelemetryConfig()


def test_without_an_endpoint_nothing_is_sent() -> None:
    assert setup.traces_endpoint(ON) is None
    assert setup.serve_environment(ON) == {}
    assert setup.start(ON, "embedded", "r1", None) is None


@pytest.mark.parametrize("switch", ["OTEL_SDK_DISABLED=true", "OTEL_TRACES_EXPORTER=none"])
def test_the_standard_switches_turn_traces_off(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    assert setup.traces_endpoint(ON) == "http://127.0.0.1:4317"
    monkeypatch.setenv(*switch.split("="))
    assert setup.traces_endpoint(ON) is None


def test_dsde_s_own_switch_turns_everything_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    off = TelemetryConfig(enabled=False)
    assert setup.traces_endpoint(off) is None
    assert setup.start(off, "embedded", "r1", None) is None


def ratio() -> str:
    return setup.serve_environment(ON)["RAY_SERVE_TRACING_SAMPLING_RATIO"]


def test_replicas_leave_the_decision_to_a_proxy_that_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH", raising=False)
    assert setup.replica_environment() == {}
    monkeypatch.setenv("RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH", "dsde.telemetry.setup:span_processors")
    assert setup.replica_environment() == {"RAY_SERVE_TRACING_SAMPLING_RATIO": "0.0"}


def test_the_sampler_is_the_standard_variable_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    assert ratio() == "1.0"
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.05")
    assert ratio() == "0.05"
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    assert ratio() == "0.0"


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", "should be grpc"),
        ("OTEL_TRACES_SAMPLER", "always_on", "parentbased_always_on"),
        ("OTEL_TRACES_SAMPLER_ARG", "2", "a number from 0 to 1"),
        ("OTEL_TRACES_SAMPLER_ARG", "some", "a number from 0 to 1"),
    ],
)
def test_a_variable_that_is_not_usable_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, accepted: str
) -> None:
    setup.check_environment(ON)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} = '{value}' is not accepted.*{accepted}"):
        setup.check_environment(ON)
