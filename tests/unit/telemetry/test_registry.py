from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

from dsde.telemetry.metrics import Metrics, views
from dsde.telemetry.registry import RegistryExporter, prometheus_name
from dsde.telemetry.step import EngineStep


class Recorded:
    """A registry that remembers what it is told, label names included."""

    def __init__(self) -> None:
        self.made: dict[str, tuple[str, ...]] = {}
        self.told: list[tuple[str, float, dict[str, str]]] = []
        self.registry: Any = SimpleNamespace(Counter=self._make, Gauge=self._make, Histogram=self._make)

    def _make(self, name: str, description: str, tag_keys: tuple[str, ...], **_: Any) -> Any:
        assert name not in self.made
        assert description
        self.made[name] = tag_keys

        def tell(value: float, tags: dict[str, str]) -> None:
            assert set(tags) == set(tag_keys)
            self.told.append((name, value, tags))

        return SimpleNamespace(inc=tell, set=tell, observe=tell)

    def values(self, name: str) -> list[float]:
        return [value for told, value, _ in self.told if told == name]


def test_every_change_is_told_once_and_in_its_bucket() -> None:
    recorded = Recorded()
    reader = PeriodicExportingMetricReader(RegistryExporter(recorded.registry, {"ReplicaId": "r1"}), 3_600_000)
    provider = MeterProvider([reader], views=views())
    metrics = Metrics(provider.get_meter("dsde"), "embedded")
    for _ in range(3):
        metrics.step(EngineStep("paper", 2, 6, 3, 5, 1.0, 6, True, 4, 8, 6, "policy", 0.0012))
    provider.force_flush()
    metrics.step(EngineStep("paper", 2, 6, 3, 5, 1.0, 6, True, 4, 8, 6, "policy", 0.06))
    provider.force_flush()
    provider.force_flush()
    assert recorded.values("dsde_draft_tokens") == [18, 6]
    durations = recorded.values("dsde_controller_duration_seconds")
    assert durations[:3] == [0.0015] * 3
    assert durations[3:] == [durations[3]]
    assert durations[3] > 0.05
    told = {name: tags for name, _, tags in recorded.told}
    assert told["dsde_steps"] == {
        "gen_ai_request_model": "embedded",
        "dsde_policy": "paper",
        "dsde_state": "on",
        "dsde_reason": "policy",
        "ReplicaId": "r1",
    }
    provider.shutdown()


def test_names_follow_opentelemetry_s_rules_for_prometheus() -> None:
    assert prometheus_name("gen_ai.server.request.duration", "s") == "gen_ai_server_request_duration_seconds"
    assert prometheus_name("dsde.speculation_length", "{token}") == "dsde_speculation_length"
