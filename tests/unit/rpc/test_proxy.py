from __future__ import annotations

import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.rpc.proxy import bind_to_host, grpc_options, proxy_environment
from dsde.config import ServingConfig


def test_what_serve_imports_by_name_is_there() -> None:
    environment = proxy_environment(ServingConfig())
    for path in [
        *grpc_options(9000)["grpc_servicer_functions"],
        environment["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"],
    ]:
        module, _, name = path.rpartition(".")
        assert callable(getattr(import_module(module), name))


def test_the_message_size_is_given_in_bytes() -> None:
    assert proxy_environment(ServingConfig())["RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"] == "4194304"
    serving = ServingConfig(grpc_max_message_mib=16)
    assert proxy_environment(serving)["RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"] == "16777216"


@pytest.mark.parametrize(
    ("host", "address"), [("127.0.0.1", "127.0.0.1:9000"), ("::1", "[::1]:9000"), ("localhost", "localhost:9000")]
)
def test_grpc_listens_where_http_does(host: str, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    default_impl: Any = SimpleNamespace(add_grpc_address=None)
    monkeypatch.setitem(sys.modules, "ray.serve._private", SimpleNamespace(default_impl=default_impl))
    monkeypatch.setenv("DSDE_GRPC_HOST", host)
    bound: list[str] = []
    assert bind_to_host() == []
    default_impl.add_grpc_address(SimpleNamespace(add_insecure_port=bound.append), "[::]:9000")
    assert bound == [address]
