from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from dsde.telemetry.metrics import FinishedRequest, Metrics, views
from dsde.telemetry.names import INSTRUMENTS
from dsde.telemetry.step import EngineStep
from dsde.telemetry.window import Window

FIGURES: dict[str, Any] = {
    "policy": "paper",
    "steps": 10,
    "steps_off": 2,
    "speculation_length": {"mean": 3.2, "max": 6, "limit": 8},
    "kld": {"mean": 0.4, "last": 0.1, "max": 2.0},
    "wvir": {"mean": 0.9, "last": 0.8},
    "stability": 0.75,
    "straggler": {"wait_ms": 30.0, "caused_ms": 0.0, "steps": 0},
}


class Booked:
    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        provider = MeterProvider([self._reader], views=views())
        self.metrics = Metrics(provider.get_meter("dsde"), "embedded")

    def points(self) -> dict[str, list[Any]]:
        data = self._reader.get_metrics_data()
        assert data is not None
        return {
            metric.name: list(metric.data.data_points)
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@pytest.fixture
def booked() -> Booked:
    return Booked()


def done(**changes: Any) -> FinishedRequest:
    values: dict[str, Any] = {
        "operation": "chat",
        "request_class": "greedy",
        "duration_s": 2.0,
        "first_token_s": 0.3,
        "per_token_s": 0.08,
        "decoding_s": 1.5,
        "figures": FIGURES,
        "drafted": 32,
        "accepted": 24,
    }
    return FinishedRequest(**{**values, **changes})


def test_a_finished_request_is_booked_by_the_conventions(booked: Booked) -> None:
    booked.metrics.request(done())
    points = booked.points()
    (duration,) = points["gen_ai.server.request.duration"]
    assert duration.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "embedded",
        "dsde.policy": "paper",
        "dsde.request.class": "greedy",
    }
    assert (duration.count, duration.sum) == (1, 2.0)
    assert tuple(duration.explicit_bounds) == (
        *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    )
    assert points["gen_ai.server.time_to_first_token"][0].sum == 0.3
    assert points["gen_ai.server.time_per_output_token"][0].sum == 0.08
    sums = {
        name: points[name][0].sum for name in points if name.startswith("dsde.") and hasattr(points[name][0], "sum")
    }
    assert sums == {
        "dsde.speculation_length": 3.2,
        "dsde.straggler.wait": pytest.approx(0.03),
        "dsde.acceptance_rate": 0.75,
        "dsde.kld": 0.4,
        "dsde.wvir": 0.9,
        "dsde.stability": 0.75,
    }
    booked.metrics.request(done(decoding_s=0.5, figures={**FIGURES, "straggler": {"wait_ms": 170.0}}))
    assert booked.points()["dsde.recent.straggler_share"][0].value == pytest.approx(0.2 / 2.0)


def test_a_failed_request_counts_its_time_and_its_error_only(booked: Booked) -> None:
    booked.metrics.request(done(error="cancelled", figures=None))
    points = booked.points()
    (duration,) = points["gen_ai.server.request.duration"]
    assert duration.attributes["error.type"] == "cancelled"
    assert "gen_ai.server.time_to_first_token" not in points
    assert "dsde.kld" not in points


def test_what_was_not_measured_is_not_booked(booked: Booked) -> None:
    unmeasured = {**FIGURES, "stability": None, "kld": {"mean": None}, "wvir": {"mean": None}}
    booked.metrics.request(done(figures=unmeasured, drafted=0, accepted=0))
    points = booked.points()
    assert "dsde.speculation_length" in points
    assert not {"dsde.kld", "dsde.wvir", "dsde.stability", "dsde.acceptance_rate"} & points.keys()


def test_steps_count_on_off_and_why(booked: Booked) -> None:
    on = EngineStep("paper", 4, 10, 6, 10, 2.0, 10, True, 4, 16, 10, "policy", 0.001)
    booked.metrics.step(on)
    booked.metrics.step(on)
    booked.metrics.step(EngineStep("paper", 4, emitted=4, may_draft=True, reason="room"))
    booked.metrics.step(EngineStep("paper"))
    points = booked.points()
    steps = {(p.attributes["dsde.state"], p.attributes["dsde.reason"]): p.value for p in points["dsde.steps"]}
    assert steps == {("on", "policy"): 2, ("off", "room"): 1}
    assert points["dsde.draft_tokens"][0].value == 20
    assert points["dsde.accepted_tokens"][0].value == 12
    assert points["dsde.decoded_tokens"][0].value == 24
    assert (points["dsde.straggler.ratio"][0].count, points["dsde.straggler.ratio"][0].sum) == (2, 3.2)
    assert points["dsde.controller.duration"][0].count == 4
    recent = {name: points[name][0].value for name in points if name.startswith("dsde.recent.")}
    assert recent == {
        "dsde.recent.speculation_length": pytest.approx(20 / 12),
        "dsde.recent.acceptance_rate": pytest.approx(0.6),
        "dsde.recent.kld": pytest.approx(0.2),
        "dsde.recent.unused_slots": pytest.approx(12 / 32),
        "dsde.recent.off_share": pytest.approx(1 / 3),
    }
    assert points["dsde.goodput"][0].value > 0


def test_the_load_is_the_latest(booked: Booked) -> None:
    booked.metrics.load(3, 1)
    booked.metrics.load(2, 0)
    points = booked.points()
    assert (points["dsde.requests.running"][0].value, points["dsde.requests.waiting"][0].value) == (2, 0)


def test_no_point_carries_an_undeclared_attribute_and_series_are_bounded(booked: Booked) -> None:
    booked.metrics._wait.record(1.0, {"user.id": "somebody"})
    for number in range(1000):
        booked.metrics.request(done(figures={**FIGURES, "policy": f"policy-{number}"}))
    points = booked.points()
    assert len(points["dsde.kld"]) <= 201
    for name, found in points.items():
        for point in found:
            assert set(point.attributes) - {"otel.metric.overflow"} <= set(INSTRUMENTS[name].attributes)


def test_the_window_forgets_and_its_rate_falls_to_zero() -> None:
    now = [100.0]
    window = Window(10, lambda: now[0])
    for second in range(30):
        now[0] = 100.0 + second
        window.add({"tokens": 5 if second < 20 else 8, "steps": 1})
    assert window.rate("tokens") == 8
    assert window.ratio("tokens", "steps") == 8
    now[0] += 60
    assert window.rate("tokens") == 0
    assert window.ratio("tokens", "steps") == 8
    assert window.ratio("tokens", "nothing") is None
