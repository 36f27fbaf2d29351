"""The application that `dsde chaos --serve` hurts: a `dsde serve` of its own, gone afterwards."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from loadtest.exchange import Failure
from loadtest.server import Server

__all__ = ["Place", "serving"]

# float32, so that greedy tokens do not depend on the batch; a short deadline, so that a stall costs little of the time.
_SETTINGS = ("model.dtype=float32", "engine.step_timeout_s=20", "engine.start_timeout_s=120")
_ANY_PORT = ("--port", "--grpc-port", "--dashboard-port")


class Place(NamedTuple):
    """pid of `dsde serve`; url, which ends in /v1, and gRPC address."""

    pid: int
    url: str
    address: str


@contextmanager
def serving() -> Iterator[Place]:
    """Two replicas of the embedded pair, on free ports. Raises RuntimeError with the reason where they do not start."""
    command = [sys.executable, "-m", "dsde.cli", "serve", "--pair", "embedded", "--open"]
    command += [word for flag in _ANY_PORT for word in (flag, "0")]
    command += [word for setting in _SETTINGS for word in ("--set", setting)]
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "serve.log"
        try:
            with Server("dsde serve", command, os.environ, log, announced=r"OpenAI API\s+(\S+)/v1") as server:
                address = re.search(r"gRPC\s+(\S+)", log.read_text(errors="replace"))
                assert address is not None
                yield Place(server.pid, f"{server.url}/v1", address.group(1))
        except Failure as failure:
            raise RuntimeError(str(failure)) from None
