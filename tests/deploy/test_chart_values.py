"""Values that mean nothing are refused, by name, before anything is rendered."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.conftest import CHART, PRESETS, ROOT, Object, run_helm

REFUSED: dict[str, tuple[Object, str]] = {
    "typo-at-the-top": ({"verfy": {}}, "verfy"),
    "typo-below": ({"draft": {"slize": "v5e-1"}}, "slize"),
    "typo-in-a-setting": ({"verify": {"config": {"max_sequencess": 8}}}, "max_sequencess"),
    "setting-out-of-range": ({"verify": {"config": {"max_sequences": 0}}}, "max_sequences"),
    "setting-of-another-service": ({"draft": {"config": {"max_running": 8}}}, "max_running"),
    "setting-of-the-chart": ({"router": {"config": {"port": 1}}}, "port"),
    "setting-of-the-wrong-type": ({"router": {"config": {"tree_depth": "deep"}}}, "tree_depth"),
    "unknown-slice": ({"verify": {"slice": "v5e-3"}}, "slice"),
    "unknown-source": ({"model": {"source": "s3"}}, "source"),
    "port-too-large": ({"metricsPort": 70000}, "metricsPort"),
    "root": ({"podSecurity": {"runAsUser": 0}}, "runAsUser"),
    "bad-digest": ({"verify": {"image": {"digest": "sha256:1"}}}, "digest"),
    "bad-quantity": ({"verify": {"resources": {"limits": {"memory": "8 GB"}}}}, "memory"),
    "bad-interval": ({"monitoring": {"interval": "often"}}, "interval"),
    "no-bucket": ({"model": {"source": "gcsFuse"}}, "model.gcsFuse.bucket: empty"),
    "no-image": ({"model": {"source": "image"}}, "model.image.reference: empty"),
    "no-cache-claim": ({"compileCache": {"type": "claim"}}, "compileCache.claim.name: empty"),
    "custom-slice-without-chip": ({"verify": {"slice": "custom"}}, "verify.customSlice.chip"),
    "client-ca-without-tls": ({"security": {"publicClientCa": True}}, "needs security.publicTls"),
    "setting-of-security": ({"verify": {"config": {"tls_cert": "/x"}}}, "tls_cert"),
    "place-in-a-group": ({"verify": {"config": {"host_id": 1}}}, "host_id"),
    "claims-for-a-group": (
        {"verify": {"slice": "v5p-8"}, "compileCache": {"type": "perReplica"}},
        "perReplica needs a slice of one host",
    ),
}


def test_lint_finds_nothing() -> None:
    for preset in (None, *PRESETS):
        values = ("--values", str(preset)) if preset else ()
        result = run_helm("lint", "--strict", str(CHART), *values)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("case", REFUSED)
def test_bad_values_are_refused_by_name(tmp_path: Path, case: str) -> None:
    values, named = REFUSED[case]
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    result = run_helm("template", "rel", str(CHART), "--values", str(file))
    assert result.returncode != 0
    assert named in result.stderr


def test_the_committed_schema_is_current(tmp_path: Path) -> None:
    made = tmp_path / "schema.json"
    command = [sys.executable, "-m", "tools.chart_schema", "--out", str(made)]
    subprocess.run(command, check=True, timeout=120, cwd=ROOT)
    committed = json.loads((CHART / "values.schema.json").read_text())
    assert committed == json.loads(made.read_text()), "run `make deploy-files`"


def test_notes_have_the_first_request() -> None:
    flags = ("install", "rel", str(CHART), "--dry-run=client", "--namespace", "llm")
    result = run_helm(*flags)
    assert result.returncode == 0, result.stderr
    assert "canopy generate --address 127.0.0.1:50051" in result.stdout
    assert "rel-canopy-router.llm.svc:50051" in result.stdout
