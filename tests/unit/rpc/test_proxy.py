from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from uvicorn.config import HTTP_PROTOCOLS

from deployments.header import BoundedHeader
from deployments.rpc.proxy import grpc_options, prepare_proxy, proxy_environment
from deployments.stream_end import StreamEnd, gone
from dsde.access.bounds import Bounds
from dsde.config import LimitsConfig, from_values

DEFAULT = from_values({})


@dataclass(frozen=True)
class Status:
    code: grpc.StatusCode
    message: str


@dataclass(frozen=True)
class HttpStatus:
    code: int
    message: Any
    headers: list[tuple[bytes, bytes]] | None = None


class ActorError(Exception):
    pass


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for Serve's modules; tests/serve has the real ones."""

    def status_of(error: BaseException, timeout_s: float | None, request_id: str) -> Status:
        code = grpc.StatusCode.CANCELLED if error.args == ("cancelled",) else grpc.StatusCode.INTERNAL
        return Status(code, str(error))

    def http_status_of(error: BaseException, timeout_s: float | None, request_id: str) -> HttpStatus:
        return HttpStatus(500, str(error))

    proxy = SimpleNamespace(get_grpc_response_status=status_of, get_http_response_status=http_status_of)
    private = SimpleNamespace(default_impl=SimpleNamespace(add_grpc_address=None), proxy=proxy)
    monkeypatch.setitem(sys.modules, "ray.serve._private", private)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "ray.exceptions", SimpleNamespace(RayActorError=ActorError))  # type: ignore[arg-type]
    monkeypatch.setenv("DSDE_GRPC_HOST", "127.0.0.1")
    for name in ("MESSAGE_MIB", "HEADER_KIB", "BODY_S"):
        monkeypatch.delenv(f"DSDE_LIMITS__{name}", raising=False)
    monkeypatch.setattr(BoundedHeader, "most", BoundedHeader.most)
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])
    return private


def test_what_serve_imports_by_name_is_there() -> None:
    callback = proxy_environment(DEFAULT)["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"]
    for path in [*grpc_options(9000)["grpc_servicer_functions"], callback]:
        module, _, name = path.rpartition(".")
        assert callable(getattr(import_module(module), name))


def test_the_message_size_is_given_in_bytes() -> None:
    assert proxy_environment(DEFAULT)["RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"] == "4194304"
    config = from_values({"limits": {"message_mib": 16}})
    assert proxy_environment(config)["RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"] == "16777216"


def test_the_limits_reach_the_proxy(serve: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    usual, stream_end = prepare_proxy()
    assert stream_end.cls is StreamEnd
    assert (usual.cls, usual.kwargs) == (Bounds, {"limits": LimitsConfig()})
    limits = {"message_mib": 16, "header_kib": 8, "body_s": 2.5}
    for name, value in proxy_environment(from_values({"limits": limits})).items():
        monkeypatch.setenv(name, value)
    given, _ = prepare_proxy()
    assert given.kwargs == {"limits": LimitsConfig.model_validate(limits)}
    assert BoundedHeader.most == 8192


@pytest.mark.parametrize(
    ("host", "address"), [("127.0.0.1", "127.0.0.1:9000"), ("::1", "[::1]:9000"), ("localhost", "localhost:9000")]
)
def test_grpc_listens_where_http_does(
    serve: SimpleNamespace, host: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSDE_GRPC_HOST", host)
    bound: list[str] = []
    prepare_proxy()
    serve.default_impl.add_grpc_address(SimpleNamespace(add_insecure_port=bound.append), "[::]:9000")
    assert bound == [address]


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ValueError("cancelled"), grpc.StatusCode.CANCELLED, "cancelled"),
        (ValueError("/secret"), grpc.StatusCode.INTERNAL, "internal error; the server's log has it as request mine"),
        (
            ActorError("10.0.0.1 died"),
            grpc.StatusCode.UNAVAILABLE,
            "the ingress of this request went away; send it again",
        ),
    ],
)
def test_the_proxy_tells_no_internals(
    serve: SimpleNamespace, error: Exception, code: grpc.StatusCode, told: str
) -> None:
    prepare_proxy()
    status: Any = serve.proxy.get_grpc_response_status(error, None, "mine")
    assert (status.code, status.message) == (code, told)


def test_over_http_a_dead_ingress_is_a_503(serve: SimpleNamespace) -> None:
    prepare_proxy()
    status = serve.proxy.get_http_response_status(ActorError("at 10.0.0.1"), None, "7")
    assert status == HttpStatus(503, gone(), [(b"retry-after", b"1")])
    assert serve.proxy.get_http_response_status(ValueError("x"), None, "7") == HttpStatus(500, "x")
