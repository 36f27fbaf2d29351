"""A server started for a comparison: up when the block begins, gone when it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import httpx

from loadtest.exchange import Failure

__all__ = ["Server"]

READY_S = 600.0
STOP_S = 60.0
_POLL_S = 0.5
_LOG_LINES = 5


class Server:
    """A context manager around one process, whose output goes to `log`.

    url: where it will answer; None where its output says so: then `announced` is a pattern with the URL as its group.
    Raises Failure with the last lines of the output when it does not come up.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        url: str | None = None,
        announced: str | None = None,
    ) -> None:
        self.command = list(command)
        self._name = name
        self._environment = dict(environment)
        self._log = log
        self._url = url
        self._announced = announced
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Base URL, once it is up."""
        assert self._url is not None
        return self._url

    @property
    def pid(self) -> int:
        """Its process id, once it is up."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Server:
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                self.command, env=self._environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            self._await_ready(self._process)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        give_up = time.monotonic() + READY_S
        while not self._ready():
            if process.poll() is not None:
                raise Failure("server", f"{self._name} ended with status {process.returncode}: {self._said()}")
            if time.monotonic() > give_up:
                raise Failure("server", f"{self._name} did not answer within {READY_S:.0f} s: {self._said()}")
            time.sleep(_POLL_S)

    def _ready(self) -> bool:
        if self._url is None:
            found = re.search(self._announced or "", self._log.read_text(errors="replace"))
            if found is None:
                return False
            self._url = found.group(1)
        try:
            return httpx.get(f"{self._url}/health", timeout=5, trust_env=False).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def _said(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        return " | ".join([line.strip() for line in lines if line.strip()][-_LOG_LINES:])

    def _stop(self) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
