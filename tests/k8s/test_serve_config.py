"""Each serveConfigV2, as Serve and dsde read it, without a cluster."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

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
    default["access"]["keys_file"] = Path("/keys/keys.json")
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


def test_numbers_delays_and_policy_of_the_engines_are_no_change_of_code(overlay: str) -> None:
    def version(**other: Any) -> str:
        app = copy.deepcopy(application(overlay))
        (engines,) = [each for each in app["deployments"] if each["name"] == EngineReplica.name]
        return get_app_code_version(ServeApplicationSchema.model_validate(app | {"deployments": [engines | other]}))

    scaling = options(overlay, EngineReplica.name)["autoscaling_config"]
    usual = version()
    assert version(user_config={"policy": "static", "settings": {}}) == usual
    assert version(autoscaling_config=scaling | {"min_replicas": 3, "max_replicas": 3, "upscale_delay_s": 1}) == usual
    # README says of these that they restart the engines.
    other = {"policy": scaling["policy"] | {"policy_kwargs": {"step_ms": 1}}}
    assert version(autoscaling_config=scaling | other) != usual
    assert version(autoscaling_config=None, num_replicas=2) != usual
