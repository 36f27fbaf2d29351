"""The Serve application: an OpenAI ingress over engine replicas. The only wiring there is.

`serve run deployments.app:build_app serving.replicas=2` and a Serve configuration file with
`import_path: deployments.app:build_app` and `args: {...}` both end here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from ray.serve import Application, Deployment

from deployments.ingress import OpenAIIngress
from deployments.replica import EngineReplica
from deployments.router import router_config
from dsde.access.gate import check_access
from dsde.config import DsdeConfig, from_values
from dsde.engine.plugin import engine_environment
from dsde.telemetry.setup import check_environment, replica_environment

__all__ = ["build_app", "configuration", "policy_config"]


def build_app(args: Mapping[str, Any] | DsdeConfig) -> Application:
    """The application for a configuration.

    args: a DsdeConfig, or its sections as plain values; a dotted key ("speculation.policy") reaches into a section.
    Raises ValueError naming the setting, its value and what is accepted.
    """
    config = configuration(args)
    check_access(config)
    check_environment(config.telemetry)
    environment = engine_environment(config) | replica_environment()
    # A type checker sees the classes, not the deployments that the decorators make of them.
    replica: Deployment = EngineReplica
    ingress: Deployment = OpenAIIngress
    engines = replica.options(
        num_replicas=config.serving.replicas,
        max_ongoing_requests=config.serving.max_ongoing_requests,
        max_queued_requests=config.serving.max_queued_requests,
        request_router_config=router_config(config.serving.router),
        user_config=policy_config(config.speculation.policy, config.speculation.settings),
        ray_actor_options={
            "num_cpus": config.serving.cpus_per_replica,
            "num_gpus": config.serving.gpus_per_replica if config.serving.device == "gpu" else 0,
            "runtime_env": {"env_vars": environment},
        },
    ).bind(config)
    return ingress.options(
        ray_actor_options={
            "num_cpus": config.serving.cpus_per_ingress,
            "runtime_env": {"env_vars": environment},
        },
    ).bind(config, engines)


def configuration(args: Mapping[str, Any] | DsdeConfig) -> DsdeConfig:
    """The configuration that build_app makes of its arguments; ValueError as there."""
    return args if isinstance(args, DsdeConfig) else from_values(_nested(args))


def policy_config(policy: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """EngineReplica's user_config, the part of the application that changes without a restart."""
    return {"policy": policy, "settings": dict(settings)}


def _nested(args: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in args.items():
        *sections, name = path.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        # On a command line every value is text.
        branch[name] = yaml.safe_load(value) if isinstance(value, str) and "." in path else value
    return tree
