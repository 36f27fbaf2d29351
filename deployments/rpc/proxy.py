"""Serve's proxy as the gRPC server: its services, its message size, its address, its last words."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import grpc

from dsde.config import ServingConfig

__all__ = ["grpc_options", "prepare_proxy", "proxy_environment"]

_SERVICERS = [
    "deployments.proto.dsde.v1.inference_pb2_grpc.add_InferenceServicer_to_server",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
]
_HOST = "DSDE_GRPC_HOST"


def grpc_options(port: int) -> dict[str, Any]:
    """Serve's `grpc_options`: our services and reflection on `port`."""
    return {"port": port, "grpc_servicer_functions": _SERVICERS, "enable_reflection": True}


def proxy_environment(serving: ServingConfig) -> dict[str, str]:
    """Environment in which Ray must start: what Serve's gRPC proxy reads from there and from nowhere else."""
    return {
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(serving.grpc_max_message_mib * 2**20),
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}.{prepare_proxy.__name__}",
        _HOST: serving.host,
    }


def prepare_proxy() -> list[Any]:
    """Called by Serve in its proxy before the servers start.

    Serve binds gRPC to every address and tells a client the text of any exception, addresses and paths included. Here
    it binds where HTTP does, and says of what nobody foresaw only that it happened. Returns the HTTP middlewares that
    Serve asks for: none.
    """
    from ray.serve._private import default_impl, proxy

    default_impl.add_grpc_address = _bound_to(os.environ[_HOST])
    proxy.get_grpc_response_status = _discreet(proxy.get_grpc_response_status)
    return []


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
            told = "the ingress of this request went away; send it again"
            return dataclasses.replace(status, code=grpc.StatusCode.UNAVAILABLE, message=told)
        return dataclasses.replace(status, message=f"internal error; the server's log has it as request {request_id}")

    return get_grpc_response_status
