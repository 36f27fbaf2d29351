"""`dsde serve`: a local Ray, the application on it, progress while it comes up, and nothing left when it stops.

The application is deployed through Serve's REST API as a declarative one, so that `serve deploy`, `serve status` and a
change of user_config work on it as on any other.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

from deployments.app import configuration, policy_config
from deployments.rpc.proxy import grpc_options, proxy_environment
from dsde.config import DsdeConfig
from dsde.control.policies import build_policy
from dsde.engine.plugin import served_name
from dsde.telemetry.setup import check_environment, serve_environment

__all__ = ["run", "switch_policy"]

_APP = "dsde"
_ENGINES = "EngineReplica"
# Tokens and settings cross between replicas; Ray's default store is a third of the machine.
_OBJECT_STORE_BYTES = 200 * 2**20
_FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
_RAY_ATTEMPTS = 3
_POLL_S = 0.5
_SILENCE_S = 10.0


class _Refused(Exception):
    """The application cannot come up; the text says why and what to change."""


class _Stopped(BaseException):
    """SIGINT or SIGTERM."""


@dataclass(frozen=True, slots=True)
class _Ports:
    """Where the application listens."""

    http: int
    grpc: int
    dashboard: int
    metrics: int


class _Progress:
    """Lines with the seconds since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:6.1f} s] {text}", flush=True)


def run(config: DsdeConfig) -> int:
    """Serve `config` in the foreground until SIGINT or SIGTERM; returns the process's exit status.

    0 after a requested stop; 1 when it cannot start: the reason stands on stderr, and nothing is left running.
    """
    progress = _Progress()
    try:
        with _stop_signals():
            ports = _free_ports(config)
            _check_telemetry(config)
            _check_cores(config)
            # Twice, because Ray takes the signals over when it starts.
            with _local_ray(config, ports, progress), _stop_signals():
                _check_gpus(config)
                client = _serve_client(f"http://127.0.0.1:{ports.dashboard}")
                _deploy(config, client, ports, progress)
                _await_ready(client, progress)
                print(_banner(config, ports), flush=True)
                while True:
                    signal.pause()
    except _Stopped:
        progress.say("stopped")
        return 0
    except _Refused as error:
        print(f"dsde serve: {error}", file=sys.stderr, flush=True)
        return 1


def switch_policy(policy: str, settings: dict[str, Any], dashboard: str = "http://127.0.0.1:8265") -> None:
    """Switch the policy of every replica of a running application, in place, and of replicas yet to come.

    dashboard: base URL of the application's Ray dashboard, which lets another process in under RAY_AUTH_MODE=token.
    Returns when Serve has taken the change; it reaches the replicas within seconds. Raises ValueError naming the
    setting, its value and what is accepted, RuntimeError with Serve's reason.
    """
    client = _serve_client(dashboard)
    running = client.get_serve_details()
    deployed = [app["deployed_app_config"] for app in running["applications"].values() if app["name"] == _APP]
    if not deployed:
        raise RuntimeError(f"no application {_APP!r} runs at {dashboard}")
    for app in deployed:
        build_policy(policy, settings, configuration(app["args"]).speculation.max_length)
        options = {one["name"]: one for one in app.get("deployments", [])}
        engines = options.get(_ENGINES, {"name": _ENGINES})
        options[_ENGINES] = {**engines, "user_config": policy_config(policy, settings)}
        app["deployments"] = list(options.values())
    instance = {key: running[key] for key in ("proxy_location", "http_options", "grpc_options")}
    client.deploy_applications({**instance, "applications": deployed})


def _serve_client(dashboard: str) -> ServeSubmissionClient:
    # Ray's client goes through the environment's proxy, which has no business with loopback.
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
    return ServeSubmissionClient(dashboard)


@contextmanager
def _stop_signals() -> Iterator[None]:
    def stop(signum: int, frame: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise _Stopped

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is stop:
                signal.signal(number, handler)


def _free_ports(config: DsdeConfig) -> _Ports:
    serving, loopback = config.serving, "127.0.0.1"
    taken: dict[int, str] = {}
    for setting, port in (
        ("serving.port", serving.port),
        ("serving.grpc_port", serving.grpc_port),
        ("serving.dashboard_port", serving.dashboard_port),
        ("telemetry.metrics_port", config.telemetry.metrics_port),
    ):
        if port and port in taken:
            raise _Refused(f"{setting} = {port} is {taken[port]} too; choose another (0 = any free one)")
        taken[port] = setting
    return _Ports(
        http=_free_port("serving.port", serving.host, serving.port),
        grpc=_free_port("serving.grpc_port", serving.host, serving.grpc_port),
        dashboard=_free_port("serving.dashboard_port", loopback, serving.dashboard_port),
        metrics=_free_port("telemetry.metrics_port", loopback, config.telemetry.metrics_port),
    )


def _free_port(setting: str, host: str, port: int) -> int:
    """`port`, or a free one when it is 0."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = os.strerror(error.errno or 0).lower()
            raise _Refused(
                f"{setting} = {port} on {host}: {reason}; free the port or choose another (0 = any free one)"
            ) from None
        return int(probe.getsockname()[1])


def _check_telemetry(config: DsdeConfig) -> None:
    try:
        check_environment(config.telemetry)
    except ValueError as error:
        raise _Refused(str(error)) from None


def _cores(config: DsdeConfig) -> float:
    return config.serving.replicas * config.serving.cpus_per_replica + config.serving.cpus_per_ingress


def _check_cores(config: DsdeConfig) -> None:
    needed = _cores(config)
    cores = len(os.sched_getaffinity(0))
    if needed > cores:
        raise _Refused(
            f"serving.replicas = {config.serving.replicas} with serving.cpus_per_replica = "
            f"{config.serving.cpus_per_replica:g} and serving.cpus_per_ingress = {config.serving.cpus_per_ingress:g} "
            f"need {needed:g} cores, this machine has {cores}"
        )


def _check_gpus(config: DsdeConfig) -> None:
    """Refuse what Ray could never place; it would wait for a GPU without end."""
    if config.serving.device != "gpu":
        return
    needed = config.serving.replicas * config.serving.gpus_per_replica
    gpus = ray.cluster_resources().get("GPU", 0)
    if needed > gpus:
        raise _Refused(
            f"serving.replicas = {config.serving.replicas} with serving.gpus_per_replica = "
            f"{config.serving.gpus_per_replica:g} need {needed:g} GPUs, Ray finds {gpus:g}"
        )


@contextmanager
def _local_ray(config: DsdeConfig, ports: _Ports, progress: _Progress) -> Iterator[None]:
    """A Ray of our own for the time of the block; afterwards none of its processes is left."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    progress.say("starting Ray")
    try:
        for attempt in range(1, _RAY_ATTEMPTS + 1):
            try:
                _start_ray(config, ports)
                break
            except Exception as error:
                # Ray gives its node half a minute, which a busy machine may not keep.
                if attempt == _RAY_ATTEMPTS:
                    raise _Refused(f"Ray did not start: {error}") from error
                progress.say(f"Ray did not start ({error}); trying again")
                _stop_ray()
        yield
    finally:
        progress.say("stopping")
        _stop_ray()


def _start_ray(config: DsdeConfig, ports: _Ports) -> None:
    # A replica that is killed takes its engine's process, and the memory that holds, with it.
    os.environ.setdefault("RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper", "true")
    # Serve's proxy runs in no runtime environment of an application.
    os.environ.update(proxy_environment(config) | serve_environment(config.telemetry))
    ray.init(
        address="local",
        num_cpus=math.ceil(_cores(config)),
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        # Ray's own ports stay on loopback too.
        _node_ip_address="127.0.0.1",
        dashboard_port=ports.dashboard,
        _metrics_export_port=ports.metrics,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )


def _stop_ray() -> None:
    started = psutil.Process().children(recursive=True)
    # Serve's own shutdown drains replica by replica, longer than somebody at a terminal waits.
    ray.shutdown()
    _end(started)


def _end(processes: list[psutil.Process]) -> None:
    """See every process gone: by itself, asked to, or killed; 8 s at most."""
    _, alive = psutil.wait_procs(processes, timeout=1)
    for end, patience_s in ((psutil.Process.terminate, 4), (psutil.Process.kill, 3)):
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                end(process)
        _, alive = psutil.wait_procs(alive, timeout=patience_s)


def _deploy(config: DsdeConfig, client: ServeSubmissionClient, ports: _Ports, progress: _Progress) -> None:
    progress.say(
        f"deploying {config.serving.replicas} engine replica(s) of {served_name(config)} and the ingress: "
        "each loads vLLM, then the target and the draft"
    )
    body = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": config.serving.host, "port": ports.http},
        "grpc_options": grpc_options(ports.grpc),
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [
            {
                "name": _APP,
                "route_prefix": "/",
                "import_path": "deployments.app:build_app",
                "args": config.model_dump(mode="json"),
            }
        ],
    }
    try:
        client.deploy_applications(body)
    except RuntimeError as error:
        raise _Refused(f"Serve refused the application: {error}") from error


def _await_ready(client: ServeSubmissionClient, progress: _Progress) -> None:
    """Return when the application serves; raise _Refused with the cause when it never will."""
    said, said_at = "", time.monotonic()
    while True:
        app = client.get_serve_details()["applications"].get(_APP, {})
        status = app.get("status")
        if status == "RUNNING":
            return
        if status in _FAILED:
            raise _Refused(f"the application did not start: {_cause(app)}")
        state = _state(app)
        if state != said or time.monotonic() - said_at > _SILENCE_S:
            progress.say(state)
            said, said_at = state, time.monotonic()
        time.sleep(_POLL_S)


def _state(app: dict[str, Any]) -> str:
    parts = []
    for name, deployment in sorted(app.get("deployments", {}).items()):
        replicas = deployment["replicas"]
        running = sum(replica["state"] == "RUNNING" for replica in replicas)
        parts.append(f"{name} {running}/{deployment['target_num_replicas']} ready")
    return ", ".join(parts) or "building the application"


def _cause(app: dict[str, Any]) -> str:
    """The line that ends each failed deployment's traceback; the whole of it stands in Ray's logs."""
    failed = [one for one in app.get("deployments", {}).values() if one["status"] in _FAILED and one["message"].strip()]
    lines = {one["message"].strip().splitlines()[-1] for one in failed}
    return "; ".join(sorted(lines)) or str(app.get("message", "Serve gives no reason"))


def _command() -> str:
    """The `dsde` of this environment, as typed here."""
    command = Path(sys.executable).with_name("dsde")
    return str(command.relative_to(Path.cwd()) if command.is_relative_to(Path.cwd()) else command)


def _banner(config: DsdeConfig, ports: _Ports) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.serving.host, config.serving.host)
    host = f"[{host}]" if ":" in host else host
    url = f"http://{host}:{ports.http}"
    name = served_name(config)
    key = "" if config.access.open else ' -H "Authorization: Bearer $DSDE_API_KEY"'
    return f"""
dsde serves {name} with policy {config.speculation.policy}

  OpenAI API     {url}/v1
  gRPC           {host}:{ports.grpc}
  health         {url}/health
  Ray dashboard  http://127.0.0.1:{ports.dashboard}  (asks for the token that `ray get-auth-token` prints)
  Prometheus     http://127.0.0.1:{ports.metrics}/metrics
  Ray address    {ray.get_runtime_context().gcs_address}

  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\
    -d '{{"model": "{name}", "messages": [{{"role": "user", "content": "What is speculative decoding?"}}]}}'

  {_command()} client --grpc --address {host}:{ports.grpc} "What is speculative decoding?"

Ctrl-C stops it.
"""
