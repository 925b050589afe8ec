"""Imports go one way: the rules of docs/architecture.md, read off the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SERVICES = {"router", "draft_service", "verify_service"}
OURS = {"benchmarks", "canopy", "common", "kernels", "models", "tools", *SERVICES}
STUBS = "canopy.v1"
DEVICE = {"jax", "jaxlib", "flax", "optax", "orbax"}
WIRE = {"grpc", "grpc_health", "grpc_reflection", "grpc_status", "google", STUBS}

MAY_IMPORT = {
    "common": {STUBS},
    "kernels": set(),
    "models": {"models", "kernels", "common"},
    "verify_service": {"models", "kernels", "common", STUBS},
    "draft_service": {"models", "kernels", "common", STUBS},
    "router": {"common", STUBS},
}
"""Which packages of ours a package may import, beside itself."""

MAY_TOUCH_THE_WIRE = {
    "common": {"security", "sequence_codec", "server", "stream_reader"},
    "kernels": set(),
    "models": set(),
    # assembly makes the one message that says who the service is; main registers the servicer.
    "draft_service": {"codec", "service", "assembly", "main"},
    "verify_service": {"codec", "service", "assembly", "main"},
    "router": {
        "api",
        "codec",
        "core",
        "draft_link",
        "fleet",
        "handshake",
        "links",
        "requests",
        "responses",
        "service",
        "session",
        "status",
        "verify_link",
    },
}
"""Servicers, codecs and the server under them; in the router also what joins both of its sides.

State machines, engines, tokenizers and schedulers are not here, and so stay free of it.
"""


def sources(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    return [path for path in files if "canopy/v1" not in path.as_posix()]


def imported_modules(path: Path) -> set[str]:
    """Full names of the modules that a file imports, also inside functions."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = path.relative_to(ROOT).parts[: -node.level]
                base = ".".join((*package, *filter(None, [node.module])))
            modules.add(base)
            modules.update(f"{base}.{alias.name}" for alias in node.names)
    return modules


def package_of(module: str) -> str:
    if module == STUBS or module.startswith(f"{STUBS}."):
        return STUBS
    return module.split(".")[0]


def imported_packages(path: Path) -> set[str]:
    packages = {package_of(module) for module in imported_modules(path)}
    if STUBS in packages:  # `from canopy.v1 import x` names canopy only to reach the stubs
        direct = {m for m in imported_modules(path) if package_of(m) == "canopy" and m != "canopy"}
        packages = packages - {"canopy"} | ({"canopy"} if direct else set())
    return packages


def violations(package: str, forbidden: set[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {', '.join(sorted(found))}"
        for path in sources(package)
        if (found := imported_packages(path) & forbidden)
    ]


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_package_imports_only_what_stands_below_it(package: str) -> None:
    assert sources(package), f"no sources in {package}"
    assert not violations(package, (OURS | {STUBS}) - MAY_IMPORT[package] - {package})


@pytest.mark.parametrize("package", ["common", "router", "canopy"])
def test_package_imports_no_device_library(package: str) -> None:
    assert not violations(package, DEVICE)


def test_kernels_import_jax_alone() -> None:
    """And LLVM, where a kernel is for the CPU."""
    allowed = {"kernels", "jax", "numpy", *sys.stdlib_module_names}
    for path in sources("kernels"):
        compiler = {"llvmlite"} if path.parent.name == "cpu_matmul" else set()
        extra = imported_packages(path) - allowed - compiler
        assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}"


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_only_servicers_and_codecs_touch_protobuf(package: str) -> None:
    touching = {path.stem for path in sources(package) if imported_packages(path) & WIRE}
    assert touching <= MAY_TOUCH_THE_WIRE[package]


@pytest.mark.parametrize("package", ["router", "common", "canopy"])
def test_no_device_library_is_loaded_even_indirectly(package: str) -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sources(package)
        if path.name != "__main__.py"
    ]
    script = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
loaded = sorted({DEVICE!r} & set(sys.modules))
sys.exit(f"loaded: {{loaded}}" if loaded else 0)
"""
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


def test_a_planted_violation_is_seen(tmp_path: Path) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text("def f():\n    import jax.numpy\n    from canopy.v1 import types_pb2\n")
    assert imported_packages(planted) == {"jax", STUBS}
    planted.write_text("from canopy import client\nfrom canopy.v1 import types_pb2\n")
    assert imported_packages(planted) == {"canopy", STUBS}
