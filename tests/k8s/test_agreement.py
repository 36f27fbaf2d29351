"""What one file says, the others rely on: names, ports, labels, delays, sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.autoscaling import EngineLoad
from deployments.rpc.proxy import grpc_options, proxy_environment
from dsde.config import from_values
from dsde.telemetry.monitoring import alert_rules, dashboard
from dsde.telemetry.setup import serve_environment
from tests.k8s.manifests import (
    OVERLAYS,
    Manifest,
    application,
    containers,
    environment,
    groups,
    labels,
    one,
    options,
    pod_specs,
    ports,
    ray_service,
    rendered,
    selects,
    serve_config,
)

KUBERAY_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080, "serve": 8000}
OPEN_TO_ALL = {"serve", "serve-grpc"}
SECRETS = {
    "cpu": set(),
    "gpu": {("dsde-hub-token", "HF_TOKEN")},
    "gpu-redis": {("dsde-hub-token", "HF_TOKEN"), ("dsde-redis", "password")},
}
OPERATOR = {"podSelector": {"matchLabels": {"app.kubernetes.io/component": "kuberay-operator"}}}

pytestmark = pytest.mark.parametrize("overlay", OVERLAYS)


def ray_containers(overlay: str) -> dict[str, Manifest]:
    return {name: group["template"]["spec"]["containers"][0] for name, group in groups(overlay).items()}


def test_the_containers_open_the_ports_that_serve_listens_on(overlay: str) -> None:
    config, ray = serve_config(overlay), ray_containers(overlay)
    serving = {"serve": config["http_options"]["port"], "serve-grpc": config["grpc_options"]["port"]}
    assert ports(ray["head"]) == KUBERAY_PORTS | serving
    assert ports(ray["worker"]) == {"metrics": KUBERAY_PORTS["metrics"]} | serving
    probe = ray["worker"]["startupProbe"]["exec"]["command"][-1]
    assert probe == f"http://127.0.0.1:{serving['serve']}/-/healthz"
    assert config["http_options"]["host"] == "0.0.0.0"
    assert config["proxy_location"] == "EveryNode"


def test_the_grpc_service_leads_to_ready_workers_only(overlay: str) -> None:
    service = one(overlay, "Service", "dsde-grpc")["spec"]
    (port,) = service["ports"]
    assert (port["name"], port["targetPort"], port["appProtocol"]) == ("serve-grpc",) * 2 + ("kubernetes.io/h2c",)
    assert port["port"] == serve_config(overlay)["grpc_options"]["port"]
    assert [name for name, own in labels(overlay).items() if selects({"matchLabels": service["selector"]}, own)] == [
        "worker"
    ]


def test_the_collector_is_where_the_nodes_send_their_spans(overlay: str) -> None:
    service = one(overlay, "Service", "dsde-collector")["spec"]
    (port,) = service["ports"]
    for container in ray_containers(overlay).values():
        assert environment(container)["OTEL_EXPORTER_OTLP_ENDPOINT"] == f"http://dsde-collector:{port['port']}"
    deployment = one(overlay, "Deployment", "dsde-collector")["spec"]
    (collector,) = deployment["template"]["spec"]["containers"]
    assert ports(collector)[port["targetPort"]] == 4317
    assert selects(deployment["selector"], labels(overlay)["collector"])
    assert selects({"matchLabels": service["selector"]}, labels(overlay)["collector"])

    (volume,) = deployment["template"]["spec"]["volumes"]
    config = yaml.safe_load(one(overlay, "ConfigMap", volume["configMap"]["name"])["data"]["collector.yaml"])
    assert config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].endswith(":4317")
    assert config["extensions"]["health_check"]["endpoint"].endswith(f":{ports(collector)['health']}")
    for pipeline in config["service"]["pipelines"].values():
        for section in ("receivers", "processors", "exporters"):
            assert set(pipeline[section]) <= config[section].keys()


def test_other_namespaces_reach_the_serving_ports_and_no_other(overlay: str) -> None:
    policies = [each["spec"] for each in rendered(overlay) if each["kind"] == "NetworkPolicy"]
    for pod, own in labels(overlay).items():
        mine = [each for each in policies if selects(each["podSelector"], own)]
        assert mine, f"no policy closes {pod}"
        assert all(each["policyTypes"] == ["Ingress"] for each in mine)
        opened: dict[str, set[str]] = {}
        for rule in (rule for each in mine for rule in each["ingress"]):
            for source in rule["from"]:
                if "namespaceSelector" in source:
                    opened.setdefault(json.dumps(source), set()).update(port["port"] for port in rule["ports"])
        expected = {
            json.dumps({"namespaceSelector": {}}): OPEN_TO_ALL,
            json.dumps(namespace("monitoring")): {"metrics"},
        }
        if pod == "head":
            expected[json.dumps(namespace("kuberay-system") | OPERATOR)] = {"dashboard"}
        assert opened == ({} if pod == "collector" else expected)


def namespace(name: str) -> Manifest:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def test_ray_nodes_reach_each_other_and_the_collector(overlay: str) -> None:
    own = labels(overlay)
    for name, target in (("dsde-ray", "head"), ("dsde-ray", "worker"), ("dsde-collector", "collector")):
        policy = one(overlay, "NetworkPolicy", name)["spec"]
        assert selects(policy["podSelector"], own[target])
        inside = [each["podSelector"] for each in policy["ingress"][0]["from"]]
        assert all(any(selects(each, own[source]) for each in inside) for source in ("head", "worker"))


def test_what_selects_pods_finds_them(overlay: str) -> None:
    own = labels(overlay)
    for name, expected in (("dsde-workers", ["worker"]), ("dsde-head", ["head"])):
        budget = one(overlay, "PodDisruptionBudget", name)["spec"]
        assert [pod for pod in own if selects(budget["selector"], own[pod])] == expected
    monitor = one(overlay, "PodMonitor", "dsde")["spec"]
    assert [pod for pod in own if selects(monitor["selector"], own[pod])] == ["head", "worker"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert all(endpoint["port"] in ports(container) for container in ray_containers(overlay).values())
    (spread,) = groups(overlay)["worker"]["template"]["spec"]["topologySpreadConstraints"]
    assert selects(spread["labelSelector"], own["worker"])
    # Kubernetes knows no scale of a RayCluster, so that a budget must be a count.
    budgets = [each["spec"] for each in rendered(overlay) if each["kind"] == "PodDisruptionBudget"]
    assert all(isinstance(each["minAvailable"], int) and "maxUnavailable" not in each for each in budgets)


def test_every_node_has_what_dsde_serve_sets_before_ray(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = from_values(application(overlay)["args"])
    for container in ray_containers(overlay).values():
        held = environment(container)
        for name, value in held.items():
            if name.startswith("OTEL_"):
                monkeypatch.setenv(name, value)
        wanted = proxy_environment(config) | serve_environment(config.telemetry)
        assert wanted.items() <= held.items()
        assert held["OTEL_METRICS_EXPORTER"] == "none"
        assert held["RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"] == "true"
    head, worker = map(environment, ray_containers(overlay).values())
    assert head.items() <= worker.items()


def test_serve_has_the_services_of_dsde_serve(overlay: str) -> None:
    config = serve_config(overlay)
    assert config["grpc_options"] == grpc_options(config["grpc_options"]["port"])


def test_no_stream_is_cut_by_a_delay_that_is_too_short(overlay: str) -> None:
    spec, worker = ray_service(overlay), groups(overlay)["worker"]["template"]["spec"]
    longest = {options(overlay, name)["graceful_shutdown_timeout_s"] for name in ("OpenAIIngress", "EngineReplica")}
    assert longest == {600}
    assert worker["terminationGracePeriodSeconds"] >= 600 + 60
    assert spec["rayClusterDeletionDelaySeconds"] >= 600 + 60
    for container in ray_containers(overlay).values():
        assert int(environment(container)["RAY_gcs_rpc_server_reconnect_timeout_s"]) >= 600
    assert worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["dsde-drain"]
    assert spec["upgradeStrategy"]["type"] == "NewCluster"


def test_a_start_may_take_as_long_as_a_large_model_loads(overlay: str) -> None:
    worker = ray_containers(overlay)["worker"]
    probe = worker["startupProbe"]
    patience = probe["periodSeconds"] * probe["failureThreshold"]
    assert patience == int(environment(worker)["VLLM_ENGINE_READY_TIMEOUT_S"]) == 3600


def test_each_pod_holds_one_engine_and_the_pods_suffice(overlay: str) -> None:
    config, workers = from_values(application(overlay)["args"]), groups(overlay)["worker"]
    engines = options(overlay, "EngineReplica")
    scaling = engines["autoscaling_config"]
    assert engines["max_replicas_per_node"] == options(overlay, "OpenAIIngress")["max_replicas_per_node"] == 1
    surge = -(-scaling["max_replicas"] * engines["max_surge_percent"] // 100)
    assert workers["replicas"] == workers["minReplicas"] == scaling["min_replicas"] >= 2
    assert workers["maxReplicas"] >= scaling["max_replicas"] + surge
    assert options(overlay, "OpenAIIngress")["num_replicas"] <= scaling["min_replicas"]

    resources = ray_containers(overlay)["worker"]["resources"]
    assert resources["limits"] == resources["requests"]
    needed = config.serving.cpus_per_replica + config.serving.cpus_per_ingress
    assert needed <= float(resources["limits"]["cpu"])
    on_gpu = config.serving.device == "gpu"
    assert resources["limits"].get("nvidia.com/gpu") == (str(int(config.serving.gpus_per_replica)) if on_gpu else None)
    assert groups(overlay)["head"]["rayStartParams"]["num-cpus"] == "0"
    # With no core of its own an ingress could come to lie on the head.
    assert config.serving.cpus_per_ingress > 0


def test_serve_can_make_the_autoscaling_policy(overlay: str) -> None:
    policy = options(overlay, "EngineReplica")["autoscaling_config"]["policy"]
    assert policy["policy_function"] == f"{EngineLoad.__module__}:{EngineLoad.__name__}"
    EngineLoad(**policy["policy_kwargs"])


def test_the_secrets_are_those_that_the_readme_makes(overlay: str) -> None:
    found: set[tuple[str, str]] = set()

    def search(value: Any) -> None:
        if isinstance(value, dict):
            if "secretKeyRef" in value:
                found.add((value["secretKeyRef"]["name"], value["secretKeyRef"]["key"]))
            for each in value.values():
                search(each)
        elif isinstance(value, list):
            for each in value:
                search(each)

    for each in rendered(overlay):
        assert each["kind"] != "Secret"
        search(each)
    assert found == SECRETS[overlay]


def test_every_worker_has_the_key_file_that_the_application_follows(overlay: str) -> None:
    worker = groups(overlay)["worker"]["template"]["spec"]
    (mounted,) = [each for each in worker["containers"][0]["volumeMounts"] if each["name"] == "keys"]
    assert from_values(application(overlay)["args"]).access.keys_file == Path(mounted["mountPath"]) / "keys.json"
    # A path within the volume would not follow a change of the Secret.
    assert mounted == {"name": "keys", "mountPath": "/keys", "readOnly": True}
    assert [each for each in worker["volumes"] if each["name"] == "keys"] == [
        {"name": "keys", "secret": {"secretName": "dsde-keys"}}
    ]


def test_the_pods_meet_the_restricted_standard(overlay: str) -> None:
    namespace = one(overlay, "Namespace", "dsde")["metadata"]["labels"]
    assert namespace["pod-security.kubernetes.io/enforce"] == "restricted"
    for name, spec in pod_specs(overlay):
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] > 0, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["automountServiceAccountToken"] is False, name
    for name, container in containers(overlay):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
        for kind in ("requests", "limits"):
            assert {"cpu", "memory"} <= container["resources"][kind].keys(), name


def test_no_container_but_the_autoscaler_holds_a_token_of_the_api_server(overlay: str) -> None:
    with_token = [
        name
        for name, container in containers(overlay)
        if any("serviceaccount" in mount["mountPath"] for mount in container.get("volumeMounts", []))
    ]
    assert with_token == ["head/autoscaler"]
    for name, group in groups(overlay).items():
        account = one(overlay, "ServiceAccount", group["template"]["spec"]["serviceAccountName"])
        assert account["automountServiceAccountToken"] is False, name
    assert ray_service(overlay)["rayClusterConfig"]["authOptions"] == {"mode": "token"}


def test_what_is_mounted_is_there_and_what_is_written_is_mounted(overlay: str) -> None:
    for name, spec in pod_specs(overlay):
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
            assert mounts.keys() <= volumes, name
            held = environment(container)
            if container["image"].startswith("dsde"):
                assert {mounts["tmp"]["mountPath"], held["HOME"]} == {"/tmp", mounts["cache"]["mountPath"]}
    worker = groups(overlay)["worker"]["template"]["spec"]
    (loads,) = [mount for mount in worker["initContainers"][0]["volumeMounts"] if mount["name"] == "models"]
    (reads,) = [mount for mount in worker["containers"][0]["volumeMounts"] if mount["name"] == "models"]
    assert (loads["mountPath"], loads.get("readOnly", False), reads["readOnly"]) == (reads["mountPath"], False, True)


def test_the_models_that_are_served_are_those_that_are_prepared(overlay: str) -> None:
    model = application(overlay)["args"]["model"]
    worker = groups(overlay)["worker"]["template"]["spec"]
    prepares, serves = environment(worker["initContainers"][0]), environment(worker["containers"][0])
    if "pair" in model:
        assert worker["initContainers"][0]["command"] == ["dsde", "models", "prepare", model["pair"]]
        assert prepares["DSDE_MODELS_DIR"] == serves["DSDE_MODELS_DIR"]
    else:
        assert (prepares["TARGET"], prepares["DRAFT"]) == (model["target"], model["draft"])
        assert prepares["HF_HOME"] == serves["HF_HOME"]
        assert serves["HF_HUB_OFFLINE"] == "1"
        (volume,) = [each for each in worker["volumes"] if each["name"] == "models"]
        claim = one(overlay, "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_the_dashboard_and_the_rules_are_those_of_the_telemetry(overlay: str) -> None:
    (shown,) = [each for each in rendered(overlay) if each["metadata"].get("labels", {}).get("grafana_dashboard")]
    assert json.loads(shown["data"]["dsde.json"]) == dashboard()
    assert one(overlay, "PrometheusRule", "dsde")["spec"] == alert_rules()


def test_all_lies_in_one_namespace(overlay: str) -> None:
    for each in rendered(overlay):
        if each["kind"] != "Namespace":
            assert each["metadata"]["namespace"] == "dsde", each["metadata"]["name"]
