"""What the chart renders is valid, strictly, over a matrix of values; and it hangs together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config import ServiceConfig
from common.server import LIVENESS
from draft_service.config import DraftConfig
from draft_service.main import DraftService
from router.config import RouterConfig
from router.service import RouterService
from tests.deploy.conftest import CHART, PRESETS, Object, Render, named, pods
from tests.deploy.schemas import failures, newest
from verify_service.config import VerifyConfig
from verify_service.main import VerifyService

OLDEST, LATEST = newest("1.33"), newest("1.37")
"""Image volumes, one way to bring the model, begin with 1.33."""

CONFIGS: dict[str, type[ServiceConfig]] = {
    "router": RouterConfig,
    "draft": DraftConfig,
    "verify": VerifyConfig,
}
GRPC_NAMES = {
    "router": RouterService.names,
    "draft": DraftService.names,
    "verify": VerifyService.names,
}
EVERYTHING = {"monitor": "podMonitor", "rules": True, "dashboards": True, "labels": {"a": "b"}}
SLICES = [*yaml.safe_load((CHART / "files/slices.yaml").read_text())]


def scaling(kind: str, **more: Any) -> Object:
    own = {"autoscaling": {"kind": kind}}
    return {"router": own, "draft": own, "verify": {**own, **more}}


POD = {
    "annotations": {"note": "text"},
    "labels": {"team": "llm"},
    "nodeSelector": {"pool": "a"},
    "tolerations": [{"key": "spot", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "priorityClassName": "high",
    "addCapabilities": ["SYS_RESOURCE"],
    "extraEnv": [
        {"name": "A", "value": "1"},
        {"name": "TOKEN", "secret": "tokens", "key": "first"},
    ],
    "secretMounts": [{"name": "tls", "secretName": "canopy-tls", "mountPath": "/etc/tls"}],
}
SECURITY = {
    "publicTls": "front", "publicClientCa": True, "publicTokens": "callers",
    "internalTls": "inside", "internalTokens": "services",
}  # fmt: skip
MATRIX: dict[str, Object] = {
    "defaults": {},
    "no-draft": {"draft": {"enabled": False}},
    "no-extras": {
        "networkPolicy": {"enabled": False},
        "topologySpread": {"enabled": False},
        "serviceAccount": {"create": False},
        "router": {"podDisruptionBudget": {"enabled": False}},
    },
    "every-pod-option": {"router": {"pod": POD}, "draft": {"pod": POD}, "verify": {"pod": POD}},
    "image-volume": {"model": {"source": "image", "image": {"reference": "reg/model:1"}}},
    "bucket": {"model": {"source": "gcsFuse", "gcsFuse": {"bucket": "b"}}},
    "cache-claim": {"compileCache": {"type": "claim", "claim": {"name": "cache"}}},
    "cache-per-replica": {
        "compileCache": {"type": "perReplica", "perReplica": {"storageClass": "fast"}}
    },
    "digest": {"image": {"registry": "reg.example/x"}, "verify": {"image": {"digest": ""}}},
    "pull-secrets": {"image": {"pullSecrets": ["a", "b"], "tag": "1.2.3"}},
    "hpa": scaling("hpa"),
    "keda": scaling("keda"),
    "keda-multihost": scaling("keda", slice="v5p-8"),
    "pod-monitor": {"monitoring": EVERYTHING},
    "service-monitor": {"monitoring": {**EVERYTHING, "monitor": "serviceMonitor"}},
    "any-namespace": {"networkPolicy": {"monitoringNamespace": ""}},
    "few-callers": {
        "router": {
            "networkPolicyFrom": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}],
            "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        }
    },
    "custom-slice": {
        "verify": {
            "slice": "custom",
            "customSlice": {
                "platform": "tpu", "chip": "v6e", "accelerator": "tpu-v6e-slice",
                "topology": "8x8", "chipsPerHost": 4, "hosts": 16,
            },
        }
    },
    "settings": {
        "router": {"config": {"max_running": 512, "tree_depth": 4, "tree_seconds": 0.5}},
        "draft": {"config": {"boundaries": [2, 16, 29], "feature_memory_bytes": 268435456}},
        "verify": {"config": {"kv_pool_tokens": 262144, "row_buckets": [8, 64]}},
        "fullnameOverride": "spec", "logFormat": "text",
    },
    "security": {"security": SECURITY},
    "tokens-alone": {"security": {"publicTokens": "tokens"}},
    "replicas": {"router": {"replicas": 3}, "draft": {"replicas": 2}, "verify": {"replicas": 3}},
    **{
        f"slice-{name}": {"draft": {"slice": name}, "verify": {"slice": name}}
        for name in SLICES
    },
}  # fmt: skip
CASES = [
    *(pytest.param(values, None, id=name) for name, values in MATRIX.items()),
    *(pytest.param({}, preset, id=f"preset-{preset.stem}") for preset in PRESETS),
]


def configs(objects: list[Object]) -> dict[str, str]:
    """Each service's rendered settings file."""
    return {
        item["metadata"]["labels"]["app.kubernetes.io/component"]: item["data"]["config.yaml"]
        for item in objects
        if item["kind"] == "ConfigMap" and "config.yaml" in item["data"]
    }


@pytest.mark.parametrize(("values", "preset"), CASES)
def test_every_object_is_valid(
    render: Render, tmp_path: Path, values: Object, preset: Path | None
) -> None:
    objects = render(values, preset)
    wrong = [line for item in objects for v in (OLDEST, LATEST) for line in failures(item, v)]
    assert not wrong, "\n".join(wrong)
    keys = [(item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(keys) == len(set(keys))
    for service, text in configs(objects).items():  # as the service itself would read it
        file = tmp_path / f"{service}.yaml"
        file.write_text(text)
        CONFIGS[service].load(["--config", str(file)], environ={})


def test_a_misspelt_field_is_seen(render: Render) -> None:
    values = {"monitoring": EVERYTHING, "verify": {"slice": "v5p-8"}}
    objects = render({**values, "draft": {"autoscaling": {"kind": "keda"}}})
    for kind, path in {
        "Deployment": ("spec", "template", "spec"),
        "PodMonitor": ("spec", "podMetricsEndpoints", 0),
        "PrometheusRule": ("spec",),
        "ScaledObject": ("spec", "triggers", 0),
        "LeaderWorkerSet": ("spec", "leaderWorkerTemplate", "workerTemplate", "spec"),
    }.items():
        item = next(o for o in objects if o["kind"] == kind)
        assert failures(item, LATEST) == []
        place: Any = item
        for step in path:
            place = place[step]
        place["planted"] = 1
        assert any("planted" in line for line in failures(item, LATEST)), kind


@pytest.mark.parametrize(("values", "preset"), CASES)
def test_pods_are_restricted_and_drain(render: Render, values: Object, preset: Path | None) -> None:
    for owner, pod in pods(render(values, preset)):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"], owner
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"], owner
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"]["drop"] == ["ALL"]
            assert container["resources"]["requests"], owner
        mounts = {m["name"] for c in spec["containers"] for m in c.get("volumeMounts", [])}
        claims = {"compile-cache"} if "StatefulSet" in owner else set()
        assert mounts <= {v["name"] for v in spec.get("volumes", [])} | claims, owner


def test_the_grace_period_holds_pause_and_drain(render: Render) -> None:
    objects = render({"preStopSeconds": 7, "verify": {"drainSeconds": 300}})
    spec = named(objects, "StatefulSet", "rel-canopy-verify")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = yaml.safe_load(configs(objects)["verify"])["drain_seconds"]
    assert (pause, drain) == (7, 300)
    assert spec["terminationGracePeriodSeconds"] > pause + drain


@pytest.mark.parametrize("service", sorted(CONFIGS))
def test_probes_ask_for_names_that_the_service_has(render: Render, service: str) -> None:
    objects = render()
    (pod,) = (pod for owner, pod in pods(objects) if owner.endswith(f"/rel-canopy-{service}"))
    (container,) = pod["spec"]["containers"]
    port = yaml.safe_load(configs(objects)[service])["port"]
    for probe in ("startupProbe", "readinessProbe"):
        asked = container[probe]["grpc"]
        assert (asked["port"], [asked["service"]]) == (port, list(GRPC_NAMES[service]))
    assert container["livenessProbe"]["grpc"] == {"port": port, "service": LIVENESS}
    assert {p["name"]: p["containerPort"] for p in container["ports"]} == {
        "grpc": port,
        "metrics": yaml.safe_load(configs(objects)[service])["metrics_port"],
    }


def test_security_gives_each_side_what_the_other_asks_for(render: Render) -> None:
    objects = render({"security": SECURITY})
    files = {name: yaml.safe_load(text) for name, text in configs(objects).items()}
    inside = {"tls_cert", "tls_key", "tls_client_ca", "token_file"}
    for name in ("verify", "draft"):
        assert {files[name][field] for field in inside} == {
            f"/etc/canopy-internal-{file}"
            for file in ("tls/tls.crt", "tls/tls.key", "tls/ca.crt", "tokens/tokens")
        }
    router = files["router"]
    assert router["peer_token_file"] == files["verify"]["token_file"]
    assert router["peer_ca"] == files["verify"]["tls_client_ca"]
    for owner, pod in pods(objects):
        (container,) = pod["spec"]["containers"]
        mounts = {m["mountPath"] for m in container.get("volumeMounts", [])}
        texts = list(files.get(owner.rpartition("-")[2], {}).values()) + container["args"]
        paths = {text.rpartition("=")[2] for text in texts if isinstance(text, str)}
        for path in paths:
            if path.startswith("/etc/canopy-"):
                assert path.rpartition("/")[0] in mounts, (owner, path)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):  # no TLS in gRPC probes
            assert owner.startswith("Pod/") or "httpGet" in container[probe]


@pytest.mark.parametrize("name", ["v5e-8", "v5p-8"])
def test_services_and_policies_select_the_pods(render: Render, name: str) -> None:
    own = {"slice": name, "replicas": 2}
    objects = render({"verify": own, "draft": own})
    templates = pods(objects)
    for item in objects:
        if item["kind"] == "Service":
            selector = dict(item["spec"]["selector"])
            leader = selector.pop("leaderworkerset.sigs.k8s.io/worker-index", None)
            assert leader == ("0" if name == "v5p-8" and "router" not in str(item) else None)
        elif item["kind"] in ("PodDisruptionBudget", "NetworkPolicy"):
            key = "selector" if item["kind"] == "PodDisruptionBudget" else "podSelector"
            selector = item["spec"][key]["matchLabels"]
        else:
            continue
        labels = [pod["metadata"]["labels"] for _, pod in templates]
        assert any(selector.items() <= have.items() for have in labels), item["metadata"]["name"]
    config = yaml.safe_load(configs(objects)["router"])
    for role in ("verify", "draft"):
        assert len(config[role]) == 2
        for index, address in enumerate(config[role]):
            host, _, port = address.partition(":")
            pod, governing, namespace, _ = host.split(".")
            assert (pod, namespace) == (f"rel-canopy-{role}-{index}", "llm")
            if name == "v5p-8":  # the controller makes the set's Service, and names its leaders so
                assert governing == f"rel-canopy-{role}"
                assert "LeaderWorkerSet" in {o["kind"] for o in objects}
                continue
            service = named(objects, "Service", governing)
            assert service["spec"]["clusterIP"] == "None"
            assert int(port) in [p["port"] for p in service["spec"]["ports"]]
            owner = named(objects, "StatefulSet", f"rel-canopy-{role}")
            assert owner["spec"]["serviceName"] == governing


@pytest.mark.parametrize("service", ["verify", "draft"])
def test_models_are_split_over_all_chips_of_the_slice(render: Render, service: str) -> None:
    for name, chips in (("v5e-8", 8), ("v5e-1", 1), ("cpu", None), ("v6e-16", 16), ("v5p-8", 8)):
        config = yaml.safe_load(configs(render({service: {"slice": name}}))[service])
        assert config.get("tensor_parallel") == chips
    own = {"slice": "v5e-8", "config": {"tensor_parallel": 4}}
    config = yaml.safe_load(configs(render({service: own}))[service])
    assert config["tensor_parallel"] == 4


def test_multi_host_slices_become_groups(render: Render) -> None:
    objects = render({"verify": {"slice": "v6e-16"}})
    group = named(objects, "LeaderWorkerSet", "rel-canopy-verify")
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 4
    for part in ("leaderTemplate", "workerTemplate"):
        spec = template[part]["spec"]
        (container,) = spec["containers"]
        assert container["resources"]["limits"]["google.com/tpu"] == "4"
        assert spec["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4"
        leads = part == "leaderTemplate"
        assert [port["name"] for port in container["ports"]] == ["grpc"] * leads + ["metrics"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert ("grpc" in container[probe]) == leads
            assert ("httpGet" in container[probe]) != leads


def test_hosts_of_a_group_find_their_place_in_the_chart_s_settings(
    render: Render, tmp_path: Path
) -> None:
    """With the variables that the LeaderWorkerSet's controller adds to every container."""
    file = tmp_path / "config.yaml"
    file.write_text(configs(render({"verify": {"slice": "v6e-16"}}))["verify"])
    leader = "rel-canopy-verify-0.rel-canopy-verify.serving"
    for host_id in range(4):
        environ = {
            "LWS_LEADER_ADDRESS": leader,
            "LWS_GROUP_SIZE": "4",
            "LWS_WORKER_INDEX": str(host_id),
        }
        config = VerifyConfig.load(["--config", str(file)], environ)
        assert (config.num_hosts, config.host_id) == (4, host_id)
        assert config.group_address[0] == leader
        assert config.tensor_parallel == 16
