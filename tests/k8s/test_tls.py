"""The gateway: every way in is TLS with a client certificate, leads to the serving ports, and there is no other way."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.proto.dsde.v1 import inference_pb2 as pb
from tests.k8s.manifests import one, ray_service, rendered

OVERLAY = "cpu-tls"
API = "gateway.networking.k8s.io/v1"
# What vLLM's application offers beside /v1, less what describes it.
BESIDE_V1 = {"/tokenize", "/detokenize", "/health"}


@pytest.fixture(scope="module")
def gateway() -> dict[str, Any]:
    found = one(OVERLAY, "Gateway", "dsde")
    assert (found["apiVersion"], found["metadata"]["namespace"]) == (API, "dsde")
    return found["spec"]


def test_every_listener_ends_tls_and_asks_for_a_client_s_certificate(gateway: dict[str, Any]) -> None:
    assert {each["name"]: (each["port"], each["protocol"]) for each in gateway["listeners"]} == {
        "http": (443, "HTTPS"),
        "grpc": (9443, "HTTPS"),
    }
    for listener in gateway["listeners"]:
        assert listener["tls"] == {"mode": "Terminate", "certificateRefs": [{"kind": "Secret", "name": "dsde-tls"}]}
        assert listener["allowedRoutes"]["namespaces"] == {"from": "Same"}
    (authority,) = gateway["tls"]["frontend"]["default"]["validation"]["caCertificateRefs"]
    assert authority == {"group": "", "kind": "ConfigMap", "name": "dsde-clients"}
    # Its other mode lets anybody through.
    assert "mode" not in gateway["tls"]["frontend"]["default"]["validation"]


@pytest.mark.parametrize(
    ("kind", "listener", "backend"),
    [("HTTPRoute", "http", ("dsde-serve-svc", 8000)), ("GRPCRoute", "grpc", ("dsde-grpc", 9000))],
)
def test_each_route_leads_from_its_listener_to_its_service(
    gateway: dict[str, Any], kind: str, listener: str, backend: tuple[str, int]
) -> None:
    route = one(OVERLAY, kind, "dsde")
    assert route["apiVersion"] == API
    assert route["spec"]["parentRefs"] == [{"name": "dsde", "sectionName": listener}]
    (entry,) = [each for each in gateway["listeners"] if each["name"] == listener]
    assert entry["allowedRoutes"]["kinds"] == [{"kind": kind}]
    assert route["spec"]["hostnames"] == [entry["hostname"]]
    (rule,) = route["spec"]["rules"]
    assert [(each["name"], each["port"]) for each in rule["backendRefs"]] == [backend]


def test_the_routes_carry_the_api_and_nothing_else() -> None:
    (rule,) = one(OVERLAY, "HTTPRoute", "dsde")["spec"]["rules"]
    paths = {(each["path"]["type"], each["path"]["value"]) for each in rule["matches"]}
    assert paths == {("PathPrefix", "/v1"), *(("Exact", path) for path in BESIDE_V1)}
    (calls,) = one(OVERLAY, "GRPCRoute", "dsde")["spec"]["rules"]
    service = pb.DESCRIPTOR.services_by_name["Inference"].full_name
    assert {each["method"]["service"] for each in calls["matches"]} == {service, "grpc.health.v1.Health"}
    longest = ray_service(OVERLAY)["rayClusterDeletionDelaySeconds"] - 60
    assert rule["timeouts"] == {"request": f"{longest}s"}


def test_the_services_behind_it_exist() -> None:
    service = one(OVERLAY, "Service", "dsde-grpc")["spec"]
    assert [port["port"] for port in service["ports"]] == [9000]
    # KubeRay makes the other, named after the RayService, on Serve's port.
    assert one(OVERLAY, "RayService", "dsde")
    assert not [each for each in rendered(OVERLAY) if each["metadata"]["name"] == "dsde-serve-svc"]


def test_only_the_gateway_reaches_the_serving_ports() -> None:
    rules = one(OVERLAY, "NetworkPolicy", "dsde-ray")["spec"]["ingress"]
    serving = [rule for rule in rules if {"port": "serve"} in rule.get("ports", ())]
    assert serving == [
        {
            "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateway"}}}],
            "ports": [{"port": "serve"}, {"port": "serve-grpc"}],
        }
    ]
    # Besides it Ray's own pods, on any port, and Prometheus.
    others = [rule for rule in rules if rule not in serving]
    assert [rule.get("ports") for rule in others] == [None, [{"port": "metrics"}]]
    assert all("podSelector" in each for each in others[0]["from"])


@pytest.mark.parametrize("kind", ["Service", "Gateway", "HTTPRoute", "GRPCRoute"])
def test_nothing_leads_to_ray_s_dashboard(kind: str) -> None:
    for each in rendered(OVERLAY):
        if each["kind"] == kind:
            assert "8265" not in str(each)
            assert "dashboard" not in str(each["spec"])
