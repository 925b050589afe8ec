"""Generates deploy/helm/canopy/values.schema.json, which refuses values that mean nothing.

`router.config`, `draft.config` and `verify.config` take the services' own settings: their names,
types and limits are read off the settings' classes, so that helm refuses what a service would
refuse. Settings that the chart derives from other values are left out there.

Usage: python -m tools.chart_schema [--out FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from common.config import ServiceConfig
from draft_service.config import DraftConfig
from router.config import RouterConfig
from verify_service.config import VerifyConfig

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy/helm/canopy"
Schema = dict[str, Any]

SERVICES: dict[str, type[ServiceConfig]] = {
    "router": RouterConfig,
    "draft": DraftConfig,
    "verify": VerifyConfig,
}
SET_BY_THE_CHART = frozenset(
    {"host", "port", "metrics_port", "drain_seconds", "log_format", "parent_pid"}
    | {"model", "head", "target", "verify", "draft", "platform", "chip", "compile_cache"}
    | {"num_hosts", "host_id", "coordinator_address"}
    | {"tls_cert", "tls_key", "tls_client_ca", "token_file"}
    | {"peer_ca", "peer_cert", "peer_key", "peer_token_file"}
)
"""Fields of the settings that follow from other values of the chart, or that a LeaderWorkerSet's
controller gives the pods of a slice."""

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
COUNT: Schema = {"type": "integer", "minimum": 1}
SECONDS: Schema = {"type": "integer", "minimum": 0, "maximum": 86400}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
NAME_OR_EMPTY: Schema = {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"}
DIRECTORY: Schema = {"type": "string", "pattern": "^/[^ ]+[^/ ]$"}
BELOW: Schema = {"type": "string", "pattern": "^[^/ ][^ ]*$", "description": "A relative path."}
DIGEST: Schema = {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"}
QUANTITY: Schema = {
    "type": ["string", "integer"],
    "pattern": "^[0-9]+([.][0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$",
}
STRINGS: Schema = {"type": "object", "additionalProperties": TEXT}
OPEN: Schema = {"type": "object", "description": "As Kubernetes has it."}


def one_of(*names: str) -> Schema:
    return {"enum": list(names)}


def listed(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def closed(properties: Schema, required: tuple[str, ...] = ()) -> Schema:
    """An object with these properties and no other."""
    schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": list(required)} if required else schema


def settings(config: type[ServiceConfig]) -> Schema:
    """What a service's `config` may hold: every setting that is left to the user."""
    properties = config.model_json_schema()["properties"]
    kept = ("type", "description", "minimum", "maximum", "exclusiveMinimum", "enum", "items")
    return closed(
        {
            name: {key: value for key, value in field.items() if key in kept}
            for name, field in properties.items()
            if name not in SET_BY_THE_CHART
        }
    )


def slice_names() -> list[str]:
    return [*yaml.safe_load((CHART / "files/slices.yaml").read_text(encoding="utf-8")), "custom"]


def pod() -> Schema:
    toleration = closed(
        {
            **{"key": TEXT, "value": TEXT, "tolerationSeconds": {"type": "integer"}},
            "operator": one_of("Exists", "Equal"),
            "effect": one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
        }
    )
    variable = closed({"name": TEXT, "value": TEXT, "secret": NAME, "key": TEXT}, ("name",))
    mount = {"name": NAME, "secretName": NAME, "mountPath": DIRECTORY}
    return closed(
        {
            **{"annotations": STRINGS, "labels": STRINGS, "nodeSelector": STRINGS},
            "tolerations": listed(toleration),
            "affinity": OPEN,
            "priorityClassName": NAME_OR_EMPTY,
            "addCapabilities": listed(TEXT),
            "extraEnv": listed(variable),
            "secretMounts": listed(closed(mount, tuple(mount))),
        }
    )


def service(name: str) -> Schema:
    """The values of one of the three services."""
    resources = {"type": "object", "additionalProperties": QUANTITY}
    scaling = {
        "kind": one_of("none", "hpa", "keda"),
        **{"minReplicas": COUNT, "maxReplicas": COUNT, "waitingPerReplica": COUNT},
        "cpuPercent": {"type": "integer", "minimum": 1, "maximum": 100},
        "prometheusAddress": {"type": "string", "pattern": "^https?://"},
    }
    properties: Schema = {
        "image": closed({"repository": TEXT, "digest": DIGEST}),
        "replicas": {"type": "integer", "minimum": 0},
        "config": settings(SERVICES[name]),
        **{"drainSeconds": {**SECONDS, "maximum": 3600}, "startupSeconds": SECONDS},
        "resources": closed({"requests": resources, "limits": resources}),
        "podDisruptionBudget": closed({"enabled": FLAG, "maxUnavailable": COUNT}),
        "autoscaling": closed(scaling),
        "pod": pod(),
    }
    if name == "router":
        kinds = one_of("ClusterIP", "NodePort", "LoadBalancer")
        properties["service"] = closed({"type": kinds, "port": PORT, "annotations": STRINGS})
        properties["networkPolicyFrom"] = listed(OPEN)
        return closed(properties)
    properties["port"] = PORT
    properties["slice"] = one_of(*slice_names())
    properties["customSlice"] = closed(
        {
            **{"platform": one_of("cpu", "gpu", "tpu"), "chip": TEXT, "accelerator": TEXT},
            "topology": {"type": "string", "pattern": "^([0-9]+x[0-9]+(x[0-9]+)?)?$"},
            "chipsPerHost": {"type": "integer", "minimum": 0, "maximum": 8},
            "hosts": COUNT,
        }
    )
    if name == "draft":
        properties["enabled"] = FLAG
    return closed(properties)


def schema() -> Schema:
    pull = one_of("Always", "IfNotPresent", "Never")
    volume = {
        "source": one_of("claim", "gcsFuse", "image", "fetch"),
        "claim": closed({"name": NAME_OR_EMPTY}),
        "gcsFuse": closed({"bucket": TEXT, "mountOptions": TEXT}),
        "image": closed({"reference": TEXT, "pullPolicy": pull}),
    }
    cache = {
        "type": one_of("emptyDir", "claim", "perReplica"),
        "claim": closed({"name": NAME_OR_EMPTY}),
        "perReplica": closed({"storageClass": NAME_OR_EMPTY, "size": QUANTITY}),
    }
    ids = {"type": "integer", "minimum": 1}
    monitoring = {
        "monitor": one_of("none", "podMonitor", "serviceMonitor"),
        "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
        **{"labels": STRINGS, "dashboardLabels": STRINGS, "rules": FLAG, "dashboards": FLAG},
    }
    spread = {"enabled": FLAG, "keys": listed(TEXT)}
    top = {
        **{"nameOverride": NAME_OR_EMPTY, "fullnameOverride": NAME_OR_EMPTY},
        "image": closed(
            {"registry": TEXT, "tag": TEXT, "pullPolicy": pull, "pullSecrets": listed(NAME)}
        ),
        "serviceAccount": closed({"create": FLAG, "name": NAME_OR_EMPTY, "annotations": STRINGS}),
        "model": closed({"mountPath": DIRECTORY, "target": BELOW, "head": BELOW, **volume}),
        "compileCache": closed(cache),
        **{name: service(name) for name in SERVICES},
        **{"metricsPort": PORT, "preStopSeconds": {**COUNT, "maximum": 600}},
        "security": closed(
            {
                **{f"public{kind}": NAME_OR_EMPTY for kind in ("Tls", "Tokens")},
                **{f"internal{kind}": NAME_OR_EMPTY for kind in ("Tls", "Tokens")},
                "publicClientCa": FLAG,
            }
        ),
        "logFormat": one_of("json", "text"),
        "podSecurity": closed({"runAsUser": ids, "runAsGroup": ids, "fsGroup": ids}),
        "topologySpread": closed(
            {**spread, "whenUnsatisfiable": one_of("ScheduleAnyway", "DoNotSchedule")}
        ),
        "networkPolicy": closed({"enabled": FLAG, "monitoringNamespace": NAME_OR_EMPTY}),
        "monitoring": closed(monitoring),
        "tests": closed({"prompt": {"type": "string", "minLength": 1}, "maxTokens": COUNT}),
        "global": OPEN,  # helm adds it where the chart is a dependency
    }
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Canopy", **closed(top)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=CHART / "values.schema.json")
    text = json.dumps(schema(), indent=1, ensure_ascii=False)
    parser.parse_args().out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
