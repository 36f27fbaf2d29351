"""One real application for all tests here: `dsde serve` with the embedded pair, two replicas, on ports of its own.

It asks for a key, which the clients here have.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import openai
import psutil
import pytest

from tests.collector import Collector, collector

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

READY_TIMEOUT_S = 400
STOP_TIMEOUT_S = 60
ANSWER_TIMEOUT_S = 180
_BREAKING = ("test_changes.py", "test_failover.py", "test_recovery.py", "test_chaos.py")
_ANY_PORT = [word for flag in ("--port", "--grpc-port", "--dashboard-port") for word in (flag, "0")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Those that stop or kill come last: the others count replicas.
    items.sort(key=lambda item: item.path.name in _BREAKING)
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.serve)
            item.add_marker(pytest.mark.slow)


@dataclass(frozen=True)
class Served:
    """A running application, as its own banner describes it."""

    model: str
    policy: str
    url: str
    address: str
    dashboard: str
    metrics: str
    ray_address: str
    pid: int
    key: str
    keys: Path

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def web(self, timeout: float | httpx.Timeout = ANSWER_TIMEOUT_S) -> httpx.Client:
        base = self.url.removesuffix("/v1")
        return httpx.Client(base_url=base, timeout=timeout, trust_env=False, headers=self.headers)

    def channel(self, *options: tuple[str, int]) -> grpc.Channel:
        return grpc.intercept_channel(
            grpc.insecure_channel(self.address, (("grpc.enable_http_proxy", 0), *options)), _Keyed(self.key)
        )

    def logs(self) -> list[Path]:
        """Every file that the application's processes log to."""
        processes = psutil.Process(self.pid).children(recursive=True)
        opened = [Path(file.path) for process in processes for file in process.open_files()]
        folders = {path.parent for path in opened if path.suffix in (".log", ".out", ".err")}
        return [path for folder in folders for path in folder.rglob("*") if path.is_file()]


class _Keyed(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Sends a key with every call."""

    def __init__(self, key: str) -> None:
        self._authorization = ("authorization", f"Bearer {key}")

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._with_key(details), request)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(self._with_key(details), request)

    def _with_key(self, details: Any) -> Any:
        return details._replace(metadata=[*(details.metadata or ()), self._authorization])


def dsde_keys(*arguments: str) -> str:
    """What `dsde keys` prints."""
    command = [sys.executable, "-m", "dsde.cli", "keys", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def user_environment() -> dict[str, str]:
    """What a user's shell holds: not what other tests set for engines inside their own process."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "OMP_", "LD_PRELOAD"))}


@pytest.fixture(scope="session")
def received() -> Iterator[Collector]:
    """The OTLP collector that the application sends to."""
    with collector() as running:
        yield running


@pytest.fixture(scope="session")
def served(received: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = tmp_path_factory.mktemp("access") / "keys.json"
    # One test fills every queue.
    key = dsde_keys("add", "tests", "--file", str(keys), "--concurrency", "10000")
    environment = user_environment() | {
        "OTEL_EXPORTER_OTLP_ENDPOINT": received.endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": "200",
        "OTEL_METRIC_EXPORT_INTERVAL": "1000",
        "RAY_metrics_report_interval_ms": "2000",
        # An engine that is stopped is to be noticed within a test's time; a step takes a few seconds at most.
        "DSDE_ENGINE__STEP_TIMEOUT_S": "30",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "dsde.cli", "serve", "--pair", "embedded", "--keys", str(keys), *_ANY_PORT],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    output = _Output(process)
    started: list[psutil.Process] = []
    try:
        text = output.wait_for("Ctrl-C stops it.", READY_TIMEOUT_S)
        started = psutil.Process(process.pid).children(recursive=True)
        yield Served(
            model="embedded",
            policy=_field(text, "with policy"),
            url=_field(text, "OpenAI API"),
            address=_field(text, "gRPC"),
            dashboard=_field(text, "Ray dashboard"),
            metrics=_field(text, "Prometheus"),
            ray_address=_field(text, "Ray address"),
            pid=process.pid,
            key=key,
            keys=keys,
        )
    finally:
        process.send_signal(signal.SIGINT)
        try:
            status = process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert status == 0, output.text
    left = [one for one in started if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert left == []


@pytest.fixture(scope="session")
def engines(served: Served) -> Iterator[DeploymentHandle]:
    import ray
    from ray import serve

    ray.init(address=served.ray_address, log_to_driver=False, logging_level="ERROR")
    yield serve.get_deployment_handle("EngineReplica", "dsde")
    ray.shutdown()


@pytest.fixture
def web(served: Served) -> Iterator[httpx.Client]:
    with served.web() as client:
        yield client


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with httpx.Client(trust_env=False) as transport:
        yield openai.OpenAI(
            base_url=served.url, api_key=served.key, timeout=ANSWER_TIMEOUT_S, max_retries=0, http_client=transport
        )


class _Output:
    """What a process prints, collected while it runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.text = ""
        self._changed = threading.Condition()
        self._ended = False
        threading.Thread(target=self._collect, args=(process,), daemon=True).start()

    def _collect(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._changed:
                self.text += line
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(self, mark: str, timeout_s: float) -> str:
        with self._changed:
            self._changed.wait_for(lambda: mark in self.text or self._ended, timeout_s)
            assert mark in self.text, f"{mark!r} did not come within {timeout_s} s:\n{self.text}"
            return self.text


def _field(banner: str, name: str) -> str:
    found = re.search(rf"{name}\s+(\S+)", banner)
    assert found is not None, banner
    return found.group(1)
