"""The images, as far as a machine without a container engine can tell.

The steps that a Dockerfile runs are run here in an environment of the same kind; the router's is
then put to work, and asked as `helm test` asks.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from canopy.stack import Stack, StackSettings
from tests.deploy.conftest import ROOT, Render, named, pods, tool

DOCKER = ROOT / "deploy/docker"
SERVICES = ("router", "draft", "verify")
PACKAGES = """
from importlib.metadata import distributions
print(*sorted({found.metadata["Name"].lower() for found in distributions()}))
"""


def locked(name: str) -> dict[str, str]:
    """Package and version of a list of hashes."""
    pairs = re.findall(r"^([\w.-]+)==(\S+)", (DOCKER / name).read_text(), re.M)
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in pairs}


@pytest.mark.parametrize("service", SERVICES)
def test_linter_finds_nothing(service: str) -> None:
    file = DOCKER / f"{service}.Dockerfile"
    result = subprocess.run(
        [tool("hadolint"), str(file)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_image_starts_what_the_chart_expects(render: Render, service: str) -> None:
    text = (DOCKER / f"{service}.Dockerfile").read_text()
    assert "\nUSER 65532:65532\n" in text
    objects = render()
    config = yaml.safe_load(
        named(objects, "ConfigMap", f"rel-canopy-{service}")["data"]["config.yaml"]
    )
    assert f"\nEXPOSE {config['port']} {config['metrics_port']}\n" in text
    module = re.findall(r'ENTRYPOINT \["python", "-m", "(\w+)"\]', text)[0]
    help_text = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=60
    )
    assert f"canopy serve {service}" in help_text.stdout


def test_locks_hold_the_tested_versions_with_hashes() -> None:
    constraints = dict(
        re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    )
    tested = {re.sub(r"[-_.]+", "-", name).lower(): v for name, v in constraints.items()}
    for name in ("router.lock", "engine.lock", "tpu.lock", "build.lock"):
        versions = locked(name)
        stale = {p: v for p, v in versions.items() if tested.get(p, v) != v}
        assert not stale, f"{name}: run deploy/docker/lock.sh"
        blocks = re.split(r"^(?=\w)", (DOCKER / name).read_text(), flags=re.M)
        assert all("--hash=sha256:" in block for block in blocks if "==" in block)
    direct = re.findall(r'^  "([\w-]+)>=', (ROOT / "pyproject.toml").read_text(), re.M)
    runtime = direct[: direct.index("uvloop") + 1]
    assert {name.replace("_", "-") for name in runtime} <= locked("engine.lock").keys()


def test_the_router_has_no_jax_in_it() -> None:
    packages = locked("router.lock").keys()
    assert not packages & {"jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "libtpu", "torch"}


def build_stage(service: str) -> list[tuple[str, str]]:
    """Instruction and text of the first stage, in order."""
    text = (DOCKER / f"{service}.Dockerfile").read_text()
    lines = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", "").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.endswith(" AS build"))
    end = next(i for i, line in enumerate(lines) if i > begin and line.startswith("FROM "))
    parts = (line.split(" ", 1) for line in lines[begin + 1 : end] if line)
    return [(instruction, rest) for instruction, rest in parts]


def copy_context(place: Path) -> None:
    """What .dockerignore lets through."""
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        for path in ROOT.glob(line[1:]) if line.startswith("!") else ():
            copy = place / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(path, copy, ignore=ignored, dirs_exist_ok=True)
            else:
                shutil.copy(path, copy)


def make_environment(service: str, directory: Path, **arguments: str) -> str:
    """The Python of the service's image: the commands of its Dockerfile's first stage, run in
    `directory` with `arguments` for its ARGs. They are the file's own but for the two folders.
    """
    source, opt = directory / "src", directory / "opt"
    source.mkdir()
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment.pop("PYTHONPATH", None)
    for instruction, text in build_stage(service):
        if instruction == "ARG":
            name, _, default = text.partition("=")
            environment[name] = arguments.get(name, default)
        elif instruction == "COPY" and text == "deploy/docker/*.lock locks/":
            (source / "locks").mkdir()
            for lock in DOCKER.glob("*.lock"):
                shutil.copy(lock, source / "locks")
        elif instruction == "COPY" and text == ". .":
            copy_context(source)
        elif instruction == "RUN":
            command = text.replace("/opt/canopy", str(opt))
            command = re.sub(r"^python ", f"{sys.executable} ", command)
            done = subprocess.run(
                ["bash", "-c", command], cwd=source, env=environment, capture_output=True,
                text=True, timeout=1500,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
        else:
            assert (instruction, text) in (
                ("WORKDIR", "/src"),
                ("ENV", "PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1"),
            ), f"{service}.Dockerfile: what is {instruction} {text}?"
    return str(opt / "bin/python")


@pytest.fixture(scope="module")
def router_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The environment of the router's image."""
    return make_environment("router", tmp_path_factory.mktemp("router-image"))


def test_nothing_is_left_in_the_routers_environment_that_installs(router_python: str) -> None:
    packages = subprocess.run(
        [router_python, "-c", PACKAGES], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    assert {"canopy-spec", "grpcio"} <= set(packages)
    assert not {"pip", "setuptools", "jax", "jaxlib", "flax"} & set(packages)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # half a gigabyte to fetch and unpack
@pytest.mark.parametrize("accelerator", ["cpu", "tpu"])
def test_the_engines_environment_starts_both_services(tmp_path: Path, accelerator: str) -> None:
    """Verify's and the draft's images are made by the same commands."""
    assert build_stage("verify") == build_stage("draft")
    python = make_environment("verify", tmp_path, ACCELERATOR=accelerator)
    packages = subprocess.run(
        [python, "-c", PACKAGES], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    assert ("libtpu" in packages) == (accelerator == "tpu")
    nowhere = {"verify": ["--model", "/no"], "draft": ["--head", "/no", "--target", "/no"]}
    for service, flags in nowhere.items():
        said = subprocess.run(
            [python, "-m", f"{service}_service", *flags],
            capture_output=True, text=True, timeout=120, cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        assert said.returncode != 0
        assert "/no" in said.stderr.splitlines()[-1]  # jax is loaded, and the model looked for
        assert "Traceback" not in said.stderr


def test_the_routers_environment_serves_and_asks(
    router_python: str, stack: Stack, settings: StackSettings, render: Render, tmp_path: Path
) -> None:
    flags = ["--model", str(settings.model), "--port", "0", "--metrics-port", "0"]
    for role in ("verify", "draft"):
        flags += [f"--{role}", stack.children[role].address]
    process = subprocess.Popen(
        [router_python, "-m", "router", *flags], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            announced = yaml.safe_load(line)
            if announced["event"] == "serving":
                break
        (pod,) = (pod for owner, pod in pods(render()) if owner.startswith("Pod/"))
        (container,) = pod["spec"]["containers"]
        arguments = [
            f"--address={announced['address']}" if part.startswith("--address=") else part
            for part in container["args"]
        ]
        asked = subprocess.run(
            [router_python, *container["command"][1:], *arguments],
            capture_output=True, text=True, timeout=120, cwd=tmp_path,
        )  # fmt: skip
        assert asked.returncode == 0, asked.stderr
        assert "Paris" in asked.stdout
    finally:
        process.terminate()
        deadline = time.monotonic() + 30
        assert process.wait(max(1.0, deadline - time.monotonic())) == 0
        process.stdout.close()


def test_what_pods_fetch_is_where_they_look_for_it(
    render: Render, settings: StackSettings, tmp_path: Path
) -> None:
    """Each pod's first container in the preset for CPUs, where the model is there already."""
    mount = tmp_path / "mount"
    mount.mkdir()
    (mount / "models").symlink_to(settings.model.parent)
    objects = render(preset=ROOT / "deploy/helm/canopy/presets/cpu.yaml")
    (pod,) = (pod for owner, pod in pods(objects) if owner.endswith("/rel-canopy-draft"))
    (container,) = pod["spec"]["initContainers"]
    command = [str(mount) if part == "/models" else part for part in container["command"]]
    assert command[0] == "python"
    subprocess.run([sys.executable, *command[1:]], check=True, timeout=120, capture_output=True)
    config = yaml.safe_load(named(objects, "ConfigMap", "rel-canopy-draft")["data"]["config.yaml"])
    for path, file in ((config["target"], "tokenizer.json"), (config["head"], "config.json")):
        assert (Path(path.replace("/models", str(mount), 1)) / file).is_file()
