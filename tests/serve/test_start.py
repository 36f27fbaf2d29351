"""A start that cannot succeed ends soon, and its cause is what Serve tells of the application."""

from __future__ import annotations

import subprocess
import sys
import time

from tests.serve.conftest import user_environment

BOUND_S = 150
PORTS = [word for flag in ("--port", "--grpc-port", "--dashboard-port") for word in (flag, "0")]


def test_an_engine_that_cannot_start_is_told_with_its_cause() -> None:
    start = time.monotonic()
    # Nothing but the engine itself knows that this is none of its formats.
    wrong = ["--set", "engine.extra.load_format=papyrus", "--set", "serving.replicas=1"]
    command = [sys.executable, "-m", "dsde.cli", "serve", "--pair", "embedded", "--open", *PORTS, *wrong]
    ended = subprocess.run(
        command, env=user_environment(), capture_output=True, text=True, timeout=2 * BOUND_S, check=False
    )
    assert ended.returncode == 1, ended.stdout
    # The message of the failed deployment, as `serve status` prints it.
    (told,) = [line for line in ended.stderr.splitlines() if line.startswith("dsde serve: ")]
    assert told.startswith("dsde serve: the application did not start: ")
    assert "papyrus" in told
    assert time.monotonic() - start < BOUND_S
