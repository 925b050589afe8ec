"""Helm and what it renders. Needs the tools that `make check-deploy` installs."""

from __future__ import annotations

import copy
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from canopy import library
from canopy.stack import Stack, StackSettings

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/canopy"
PRESETS = sorted((CHART / "presets").glob("*.yaml"))
if importlib.util.find_spec("cloudcoil") is None:  # the extra `deploy` is not installed
    collect_ignore_glob = ["test_*.py"]

Object = dict[str, Any]
Render = Callable[..., list[Object]]


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.deploy)


def tool(name: str) -> str:
    """The path of a tool beside this Python or on PATH; a missing one fails the test."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is missing; `make check-deploy` says how to install it")
    return found


def run_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tool("helm"), *arguments], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="session")
def render(tmp_path_factory: pytest.TempPathFactory) -> Render:
    """`render(values, preset)`: the objects that helm makes of them, in namespace `llm`."""
    file = tmp_path_factory.mktemp("values") / "values.yaml"
    known: dict[tuple[str, Path | None], list[Object]] = {}

    def rendered(values: Object | None = None, preset: Path | None = None) -> list[Object]:
        text = yaml.safe_dump(values or {})
        if (text, preset) not in known:
            known[text, preset] = template(text, preset)
        return copy.deepcopy(known[text, preset])

    def template(text: str, preset: Path | None) -> list[Object]:
        file.write_text(text)
        files = [str(path) for path in (preset, file) if path]
        flags = [part for path in files for part in ("--values", path)]
        result = run_helm("template", "rel", str(CHART), "--namespace", "llm", *flags)
        assert result.returncode == 0, result.stderr
        return [item for item in yaml.safe_load_all(result.stdout) if item]

    return rendered


@pytest.fixture(scope="session")
def settings() -> StackSettings:
    model = library.fetch_model(library.DEMO_MODEL)
    flags = {
        "router": ("--tree-seconds", "30"),  # on a busy machine drafts come late
        # Trees whether they pay here or not: every panel has something.
        "verify": ("--tree-budget", "full"),
    }
    return StackSettings(model=model, head=library.demo_head(model), flags=flags, show_logs=False)


@pytest.fixture(scope="session")
def stack(settings: StackSettings) -> Iterator[Stack]:
    """The real three processes; the last test kills the draft."""
    with Stack(settings) as running:
        yield running


def named(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = (o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, name))
    return found


def pods(objects: list[Object]) -> list[tuple[str, Object]]:
    """(owner's kind/name, pod template) of every pod that the objects bring about."""
    found = []
    for item in objects:
        name = f"{item['kind']}/{item['metadata']['name']}"
        if item["kind"] in ("Deployment", "StatefulSet"):
            found.append((name, item["spec"]["template"]))
        elif item["kind"] == "LeaderWorkerSet":
            group = item["spec"]["leaderWorkerTemplate"]
            found += [(f"{name}/{part}", group[f"{part}Template"]) for part in ("leader", "worker")]
        elif item["kind"] == "Pod":
            found.append((name, item))
    return found
