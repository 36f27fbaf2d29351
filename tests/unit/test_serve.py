from __future__ import annotations

import socket
from typing import Any

import pytest

from deployments import serve
from dsde.config import from_values


class Rest:
    """Stands for Serve's REST client. deployed: what was sent last."""

    def __init__(self, deployments: list[dict[str, Any]]) -> None:
        self._app = {"name": "dsde", "import_path": "deployments.app:build_app", "args": {}, "deployments": deployments}
        self.deployed: dict[str, Any] = {}

    def get_serve_details(self) -> dict[str, Any]:
        instance = {"proxy_location": "EveryNode", "http_options": {"port": 8000}, "grpc_options": {"port": 9000}}
        return {**instance, "applications": {"dsde": {"name": "dsde", "deployed_app_config": self._app}}}

    def deploy_applications(self, config: dict[str, Any]) -> None:
        self.deployed = config


def test_another_policy_leaves_the_other_options_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    ingress = {"name": "OpenAIIngress", "num_replicas": 2}
    engines = {"name": "EngineReplica", "num_replicas": 3, "user_config": {"policy": "paper", "settings": {}}}
    rest = Rest([ingress, engines])
    monkeypatch.setattr(serve, "_serve_client", lambda dashboard: rest)
    serve.switch_policy("static", {"length": 3})
    assert rest.deployed["applications"][0]["deployments"] == [
        ingress,
        {"name": "EngineReplica", "num_replicas": 3, "user_config": {"policy": "static", "settings": {"length": 3}}},
    ]


def test_a_first_switch_adds_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = Rest([])
    monkeypatch.setattr(serve, "_serve_client", lambda dashboard: rest)
    serve.switch_policy("autoregressive", {})
    assert rest.deployed["applications"][0]["deployments"] == [
        {"name": "EngineReplica", "user_config": {"policy": "autoregressive", "settings": {}}}
    ]


def test_two_servers_cannot_share_a_port() -> None:
    config = from_values({"serving": {"port": 9000}})
    with pytest.raises(serve._Refused, match=r"serving.grpc_port = 9000 is serving.port too; choose another"):
        serve._free_ports(config)


def test_an_ingress_counts_among_the_cores() -> None:
    config = from_values({"serving": {"replicas": 1000, "cpus_per_ingress": 0.5}})
    with pytest.raises(serve._Refused, match=r"serving.cpus_per_ingress = 0.5 need 1000.5 cores"):
        serve._check_cores(config)


def test_a_port_is_free_on_an_ipv6_host_too() -> None:
    with socket.socket(socket.AF_INET6) as taken:
        try:
            taken.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
        taken.listen()
        assert serve._free_port("serving.port", "::1", 0) > 0
        port = taken.getsockname()[1]
        with pytest.raises(serve._Refused, match=rf"serving.port = {port} on ::1: address already in use"):
            serve._free_port("serving.port", "::1", port)
