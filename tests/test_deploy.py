"""Compose and Kubernetes name what there is, and grant no rights that are not needed."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.scheduler.core import SchedulerCore
from services.scheduler.metrics import SchedulerCollector
from shared.mesh.curve import make_keys
from shared.mesh.resolver import DEFAULT_PORTS
from shared.settings import Settings, parse_settings, variable_of
from shared.types import ServiceName

ROOT = Path(__file__).parents[1]
KUBERNETES = ROOT / "deploy/kubernetes"
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
KUBERNETES_VERSION = "1.32"
VARIABLES = {variable_of(setting) for setting in fields(Settings)}
ONE_SHOT = {"prepare", "keys"}
MESH = {"executor": ServiceName.MODEL_EXECUTOR, "executor-gpu": ServiceName.MODEL_EXECUTOR}


def documents(*files: Path) -> list[dict[str, Any]]:
    return [one for file in files for one in yaml.safe_load_all(file.read_text()) if one]


PATCHES = ("kustomization.yaml", "pod.yaml")
BASE = documents(
    *(file for file in (KUBERNETES / "base").glob("*.yaml") if file.name not in PATCHES)
)
AUTOSCALERS = documents(KUBERNETES / "components/autoscaling/autoscalers.yaml")


def of_kind(kind: str, among: list[dict[str, Any]] = BASE) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in among if one["kind"] == kind}


def service_of(name: str) -> ServiceName:
    return MESH.get(name) or ServiceName(name)


# --- compose


def test_every_service_is_there_by_the_name_that_the_mesh_looks_for() -> None:
    for name, service in COMPOSE.items():
        if name in ONE_SHOT:
            continue
        names = {name, *service.get("networks", {}).get("default", {}).get("aliases", [])}
        assert service_of(name) in names
        assert service["command"] == service_of(name)
    assert {service_of(name) for name in COMPOSE.keys() - ONE_SHOT} == set(ServiceName)


@pytest.mark.parametrize("name", COMPOSE)
def test_no_container_has_rights_that_it_does_not_need(name: str) -> None:
    service = COMPOSE[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    writable = [one for one in service["volumes"] if not one.endswith(":ro")]
    assert writable == ({"prepare": ["models:/models"], "keys": ["keys:/keys"]}.get(name, []))


@pytest.mark.parametrize("name", sorted(COMPOSE.keys() - ONE_SHOT))
def test_containers_are_watched_started_again_and_drained(name: str) -> None:
    service = COMPOSE[name]
    port = 8000 if name == "gateway" else DEFAULT_PORTS[service_of(name)]
    assert str(port) in service["healthcheck"]["test"][-1]
    assert service["restart"] == "unless-stopped"
    assert int(service["stop_grace_period"].removesuffix("s")) > Settings().drain_timeout
    settings = {one for one in service["environment"] if one.startswith("HEADRACE_")}
    assert settings <= VARIABLES


def test_images_run_as_a_user() -> None:
    stages = (ROOT / "Dockerfile").read_text().split("\nFROM ")[1:]
    last = {stage.split()[2]: stage.split("USER ")[-1].split()[0] for stage in stages}
    assert (last["core"], last["executor"]) == ("10001:10001", "10001:10001")


# --- Kubernetes


@pytest.mark.parametrize(
    "file",
    [
        file.relative_to(KUBERNETES)
        for folder in ("base", "components/autoscaling")
        for file in sorted((KUBERNETES / folder).glob("*.yaml"))
        if file.name not in (*PATCHES, "prometheus-adapter.yaml")
    ],
    ids=str,
)
def test_manifests_fit_their_schemas(file: Path) -> None:
    for manifest in documents(KUBERNETES / file):
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("service", ServiceName)
def test_a_headless_service_leads_to_the_inboxes(service: ServiceName) -> None:
    found = of_kind("Service")[service]["spec"]
    assert found["clusterIP"] == "None"
    assert found["publishNotReadyAddresses"] is True  # else nobody would ever be ready
    [port] = found["ports"]
    assert port["port"] == DEFAULT_PORTS[service]
    template = of_kind("Deployment")[service]["spec"]["template"]
    assert found["selector"].items() <= template["metadata"]["labels"].items()
    [container] = template["spec"]["containers"]
    assert container["args"] == [service]
    assert {"name": "mesh", "containerPort": port["port"]} in container["ports"]


def test_what_refers_to_deployments_finds_them() -> None:
    names = of_kind("Deployment").keys()
    assert names == set(ServiceName)
    budgets = of_kind("PodDisruptionBudget").values()
    label = "app.kubernetes.io/component"
    assert {one["spec"]["selector"]["matchLabels"][label] for one in budgets} == names
    scaled = {one["spec"]["scaleTargetRef"]["name"] for one in AUTOSCALERS}
    assert ServiceName.SCHEDULER not in scaled and scaled < names


def test_autoscaling_asks_for_a_metric_that_there_is() -> None:
    [executor] = [one for one in AUTOSCALERS if one["metadata"]["name"] == "model-executor"]
    [metric] = executor["spec"]["metrics"]
    name = metric["object"]["metric"]["name"]
    collector = SchedulerCollector(SchedulerCore(1, time.monotonic), "scheduler.0")
    assert name in {one.name for one in collector.collect()}
    assert name in (KUBERNETES / "components/autoscaling/prometheus-adapter.yaml").read_text()
    assert metric["object"]["describedObject"]["name"] in of_kind("Service")


def test_kserve_runs_the_command_line_that_there_is() -> None:
    [runtime] = documents(KUBERNETES / "kserve/serving-runtime.yaml")
    [container] = runtime["spec"]["containers"]
    assert container["name"] == "kserve-container"
    command, model, *flags = container["args"]
    assert (command, model) == ("serve", "/mnt/models")
    settings = parse_settings(None, flags, {})
    assert settings.port == container["ports"][0]["containerPort"]
    [served] = documents(KUBERNETES / "kserve/inference-service.yaml")
    wanted = served["spec"]["predictor"]["model"]
    formats = [one["name"] for one in runtime["spec"]["supportedModelFormats"]]
    assert wanted["runtime"] == runtime["metadata"]["name"]
    assert wanted["modelFormat"]["name"] in formats
    assert wanted["protocolVersion"] in runtime["spec"]["protocolVersions"]


@pytest.fixture(params=["cpu", "gpu"])
def overlay(request: pytest.FixtureRequest, tmp_path: Path) -> list[dict[str, Any]]:
    """An overlay as a cluster would get it, autoscaling included."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which assembles overlays, is not installed")
    shutil.copytree(KUBERNETES, tmp_path, dirs_exist_ok=True)
    make_keys(tmp_path / "base/secrets")
    (tmp_path / "base/secrets/api-keys.env").write_text("HEADRACE_API_KEY=one,two\n")
    folder = tmp_path / "overlays" / request.param
    with (folder / "kustomization.yaml").open("a") as file:
        file.write("components:\n  - ../../components/autoscaling\n")
    built = subprocess.run(["kubectl", "kustomize", folder], check=True, capture_output=True)
    return list(yaml.safe_load_all(built.stdout))


def references(manifest: Any, key: str, name: str = "name") -> Iterator[str]:
    """What stands at `key: {name: ...}`, however deep."""
    if isinstance(manifest, dict):
        if isinstance(found := manifest.get(key), dict) and name in found:
            yield found[name]
        for value in manifest.values():
            yield from references(value, key, name)
    elif isinstance(manifest, list):
        for value in manifest:
            yield from references(value, key, name)


def delay_of(pod: dict[str, Any]) -> int:
    """Seconds before it gets SIGTERM."""
    [container] = pod["containers"]
    if "lifecycle" not in container:
        return 0
    sleep, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    return int(seconds)


def test_overlays_are_whole(overlay: list[dict[str, Any]]) -> None:
    for manifest in overlay:
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)
    maps, secrets = of_kind("ConfigMap", overlay), of_kind("Secret", overlay)
    assert set(references(overlay, "configMapRef")) == set(maps)
    assert set(references(overlay, "secretKeyRef")) - {"hugging-face"} <= set(secrets)
    assert set(references(overlay, "secret", "secretName")) <= set(secrets)
    claims = set(references(overlay, "persistentVolumeClaim", "claimName"))
    assert claims == set(of_kind("PersistentVolumeClaim", overlay))
    settings = {name for one in maps.values() for name in one["data"] if name != "MODEL"}
    assert settings <= VARIABLES


def test_pods_have_no_rights_that_they_do_not_need(overlay: list[dict[str, Any]]) -> None:
    """What Pod Security's level `restricted` asks for, and a read-only root."""
    deployments = of_kind("Deployment", overlay)
    assert len(deployments) == len(ServiceName)
    for deployment in deployments.values():
        pod = deployment["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > Settings().drain_timeout + delay_of(pod)
        assert pod["enableServiceLinks"] is False  # HEADRACE_PORT would be set by them
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"] + pod["initContainers"]:
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["capabilities"] == {"drop": ["ALL"]}
