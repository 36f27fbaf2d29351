"""Serve's proxy as the gRPC server: its services, its address, its message size."""

from __future__ import annotations

import os
from typing import Any

from dsde.config import ServingConfig

__all__ = ["bind_to_host", "grpc_options", "proxy_environment"]

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
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}.{bind_to_host.__name__}",
        _HOST: serving.host,
    }


def bind_to_host() -> list[Any]:
    """Called by Serve in its proxy before the servers start: have gRPC listen where HTTP does, not on every address.

    Returns the HTTP middlewares that Serve asks for: none.
    """
    from ray.serve._private import default_impl

    host = os.environ[_HOST]

    def add_grpc_address(server: Any, address: str) -> None:
        port = address.rpartition(":")[2]
        server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")

    default_impl.add_grpc_address = add_grpc_address
    return []
