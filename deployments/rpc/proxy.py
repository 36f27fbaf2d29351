"""Serve's proxy, made fit for callers nobody knows: its services, its bounds, its address, its last words."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import grpc

from deployments.stream_end import GONE, StreamEnd, gone
from dsde.access.queue import RETRY_AFTER_S
from dsde.config import DsdeConfig, LimitsConfig

__all__ = ["grpc_options", "prepare_proxy", "proxy_environment"]

_SERVICERS = [
    "deployments.proto.dsde.v1.inference_pb2_grpc.add_InferenceServicer_to_server",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
]
_HOST = "DSDE_GRPC_HOST"
# The settings of these names, where the environment has them anyway.
_LIMITS = {name: f"DSDE_LIMITS__{name.upper()}" for name in ("message_mib", "header_kib", "body_s")}


def grpc_options(port: int) -> dict[str, Any]:
    """Serve's `grpc_options`: our services and reflection on `port`."""
    return {"port": port, "grpc_servicer_functions": _SERVICERS, "enable_reflection": True}


def proxy_environment(config: DsdeConfig) -> dict[str, str]:
    """Environment in which Ray must start: what Serve's proxy reads from there and from nowhere else."""
    return {
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(config.limits.message_mib * 2**20),
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}.{prepare_proxy.__name__}",
        _HOST: config.serving.host,
        **{variable: f"{getattr(config.limits, name):g}" for name, variable in _LIMITS.items()},
    }


def prepare_proxy() -> list[Any]:
    """Called by Serve in its proxy before the servers start.

    Serve binds gRPC to every address and tells a client the text of any exception, addresses and paths included. Here
    it binds where HTTP does, and says of what nobody foresaw only that it happened. Serve also takes in a request of
    any size before it hands it on, so the bounds of `limits` are kept here; and where an ingress dies it leaves off, or
    answers 500. Returns the HTTP middlewares that see to it.
    """
    from ray.serve._private import default_impl, proxy
    from starlette.middleware import Middleware

    from deployments.header import bound_header
    from dsde.access.bounds import Bounds

    default_impl.add_grpc_address = _bound_to(os.environ[_HOST])
    proxy.get_grpc_response_status = _discreet(proxy.get_grpc_response_status)
    proxy.get_http_response_status = _repeatable(proxy.get_http_response_status)
    given = {name: os.environ[held] for name, held in _LIMITS.items() if held in os.environ}
    limits = LimitsConfig.model_validate(given)
    bound_header(limits.header_kib * 2**10)
    return [Middleware(Bounds, limits=limits), Middleware(StreamEnd)]


def _bound_to(host: str) -> Callable[[Any, str], None]:
    def add_grpc_address(server: Any, address: str) -> None:
        port = address.rpartition(":")[2]
        server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")

    return add_grpc_address


def _discreet(status_of: Callable[..., Any]) -> Callable[..., Any]:
    from ray.exceptions import RayActorError

    def get_grpc_response_status(error: BaseException, request_timeout_s: float | None, request_id: str) -> Any:
        status = status_of(error, request_timeout_s, request_id)
        if status.code is not grpc.StatusCode.INTERNAL:
            return status
        if isinstance(error, RayActorError):
            return dataclasses.replace(status, code=grpc.StatusCode.UNAVAILABLE, message=GONE)
        return dataclasses.replace(status, message=f"internal error; the server's log has it as request {request_id}")

    return get_grpc_response_status


def _repeatable(status_of: Callable[..., Any]) -> Callable[..., Any]:
    from ray.exceptions import RayActorError

    def get_http_response_status(error: BaseException, request_timeout_s: float | None, request_id: str) -> Any:
        status = status_of(error, request_timeout_s, request_id)
        if not isinstance(error, RayActorError):
            return status
        after = [(b"retry-after", str(RETRY_AFTER_S).encode())]
        return dataclasses.replace(status, code=503, message=gone(), headers=after)

    return get_http_response_status
