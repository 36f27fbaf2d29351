"""Each serveConfigV2, as Serve and dsde read it, without a cluster."""

from __future__ import annotations

import pytest
from ray.serve.schema import ServeDeploySchema

from deployments.app import build_app, configuration
from deployments.ingress import OpenAIIngress
from deployments.replica import EngineReplica
from dsde.config import DsdeConfig, from_values
from dsde.control.policies import build_policy
from dsde.engine.plugin import served_name
from tests.k8s.manifests import OVERLAYS, application, options, serve_config

pytestmark = pytest.mark.parametrize("overlay", OVERLAYS)


def test_serve_takes_it(overlay: str) -> None:
    schema = ServeDeploySchema.model_validate(serve_config(overlay))
    (app,) = schema.applications
    assert app.import_path == f"{build_app.__module__}:{build_app.__name__}"
    assert {one.name for one in app.deployments} == {EngineReplica.name, OpenAIIngress.name}


def test_dsde_takes_its_arguments(overlay: str) -> None:
    config = configuration(application(overlay)["args"])
    http, grpc = serve_config(overlay)["http_options"], serve_config(overlay)["grpc_options"]
    assert (config.serving.host, config.serving.port, config.serving.grpc_port) == (
        http["host"],
        http["port"],
        grpc["port"],
    )
    if (policy := options(overlay, "EngineReplica").get("user_config")) is not None:
        build_policy(policy["policy"], policy.get("settings", {}), config.speculation.max_length)


def test_the_cpu_overlay_serves_what_make_run_serves(overlay: str) -> None:
    config = configuration(application(overlay)["args"])
    if overlay != "cpu":
        assert served_name(config) == config.model.target
        return
    default = from_values({}).model_dump()
    default["serving"] |= {"host": "0.0.0.0", "cpus_per_ingress": 0.5}
    assert config.model_dump() == default
    assert options(overlay, "EngineReplica")["autoscaling_config"]["min_replicas"] == default["serving"]["replicas"]


def test_the_application_asks_for_what_the_pods_offer(overlay: str) -> None:
    app = build_app(application(overlay)["args"])
    ingress = app._bound_deployment
    (config, engines) = ingress.init_args
    assert isinstance(config, DsdeConfig)
    asked = engines._bound_deployment.ray_actor_options
    assert (asked["num_cpus"], asked["num_gpus"]) == ((1, 0) if overlay == "cpu" else (4, 1))
    assert ingress.ray_actor_options["num_cpus"] == config.serving.cpus_per_ingress
