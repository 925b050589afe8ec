"""Strict JSON schemas of the kinds that the chart renders.

- Kubernetes' own: the strict schemas in the package `kubernetes-validate`.
- Prometheus operator and KEDA: made from the typed models that the `cloudcoil` packages generate
  out of those projects' CRDs, and closed, so that a misspelt field fails.
- LeaderWorkerSet: no package has its CRD, so the fields that the chart uses are written down here
  after the API's reference; its pod templates are checked as Kubernetes' own.
"""

from __future__ import annotations

import functools
from typing import Any

import jsonschema
import referencing
from cloudcoil.models.keda import v1alpha1 as keda
from cloudcoil.models.prometheus_operator import v1 as operator
from kubernetes_validate import utils

Schema = dict[str, Any]

MODELS = {
    ("monitoring.coreos.com/v1", "PodMonitor"): operator.PodMonitor,
    ("monitoring.coreos.com/v1", "ServiceMonitor"): operator.ServiceMonitor,
    ("monitoring.coreos.com/v1", "PrometheusRule"): operator.PrometheusRule,
    ("keda.sh/v1alpha1", "ScaledObject"): keda.ScaledObject,
}
WHOLE = {"type": "integer", "minimum": 0}
POD_TEMPLATE = {"type": "object", "required": ["metadata", "spec"]}
LEADER_WORKER_SET: Schema = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "metadata": {"properties": {"name": {}, "labels": {}, "annotations": {}}},
        "spec": {
            "required": ["leaderWorkerTemplate"],
            "properties": {
                "replicas": WHOLE,
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "networkConfig": {
                    "required": ["subdomainPolicy"],
                    "properties": {"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}},
                },
                "rolloutStrategy": {
                    "required": ["type"],
                    "properties": {
                        "type": {"const": "RollingUpdate"},
                        "rollingUpdateConfiguration": {
                            "properties": dict.fromkeys(
                                ("partition", "maxUnavailable", "maxSurge"), WHOLE
                            )
                        },
                    },
                },
                "leaderWorkerTemplate": {
                    "required": ["workerTemplate"],
                    "properties": {
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {
                            "enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
                        },
                        "leaderTemplate": POD_TEMPLATE,
                        "workerTemplate": POD_TEMPLATE,
                    },
                },
            },
        },
    },
}


def closed(schema: Any) -> Any:
    """The same schema, in which an object takes no property that is not named."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: closed(value) for name, value in schema.items()}
    properties = schema.get("properties")
    if isinstance(properties, dict) and "additionalProperties" not in schema:
        # `properties` may itself be a property's name; a schema of one has no "type" below it
        inner["additionalProperties"] = False
    return inner


@functools.cache
def custom_validator(api_version: str, kind: str) -> jsonschema.Draft202012Validator | None:
    if kind == "LeaderWorkerSet":
        return jsonschema.Draft202012Validator(closed(LEADER_WORKER_SET))
    model = MODELS.get((api_version, kind))
    if model is None:
        return None
    return jsonschema.Draft202012Validator(closed(model.model_json_schema()))


@functools.cache
def kubernetes_validator(
    api_version: str, kind: str, version: str
) -> jsonschema.Draft202012Validator:
    """The strict schema of one of Kubernetes' own kinds. Raises FileNotFoundError for others."""
    folder = f"kubernetes-json-schema/v{version}-local-strict"
    group = api_version.split("/")[0].split(".")[0] + "-" if "/" in api_version else ""
    file = f"{kind.lower()}-{group}{api_version.split('/')[-1]}.json"
    schema = utils.schema_contents(f"{folder}/{file}", version)
    resource = referencing.Resource.from_contents(schema)
    return jsonschema.Draft202012Validator(schema, registry=resource @ _definitions(version))


@functools.cache
def _definitions(version: str) -> Any:
    folder = f"kubernetes-json-schema/v{version}-local-strict"
    contents = utils.schema_contents(f"{folder}/_definitions.json", version)
    return referencing.Resource.from_contents(contents) @ referencing.Registry()


def newest(minor: str) -> str:
    """The newest patch of `1.33` that there are schemas of."""
    (*_, version) = (v for v in utils.all_versions() if utils.major_minor(v) == minor)
    return version


def failures(item: Schema, version: str) -> list[str]:
    """What is wrong with an object, a line for each fault; empty: it is valid."""
    custom = custom_validator(item["apiVersion"], item["kind"])
    validator = custom or kubernetes_validator(item["apiVersion"], item["kind"], version)
    name = f"{item['kind']}/{item['metadata']['name']}"
    found = [
        f"{name}: {'.'.join(map(str, error.path))}: {error.message[:300]}"
        for error in validator.iter_errors(item)
    ]
    if item["kind"] == "LeaderWorkerSet":
        group = item["spec"]["leaderWorkerTemplate"]
        for part in ("leaderTemplate", "workerTemplate"):
            body = {"spec": group[part]["spec"], "metadata": {"name": part}}
            found += failures({"apiVersion": "v1", "kind": "Pod", **body}, version)
    return found
