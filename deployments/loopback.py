"""Keeps what Serve opens in a replica on this machine, where Ray is on this machine only."""

from __future__ import annotations

from typing import Any

import ray
from ray.serve._private import replica

__all__ = ["keep_local"]

LOOPBACK = "127.0.0.1"


def keep_local() -> None:
    """Called in a replica's constructor: where Ray's node is on loopback, so is the replica's own gRPC server.

    Serve opens one in each replica, for calls of other deployments, on every address and without asking for a key.
    Nothing calls it here; in a cluster the network policy guards it.
    """
    open_port = replica.add_port_to_grpc_server

    def open_local_port(server: Any, address: str) -> Any:
        return open_port(server, f"{LOOPBACK}:{address.rpartition(':')[2]}")

    if ray.util.get_node_ip_address() == LOOPBACK:
        replica.add_port_to_grpc_server = open_local_port
