"""What the benchmarks share: a router to talk to, the machine in words, one line of JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from benchmarks.prompts import GOLDENS
from canopy import library
from canopy.results import CanopyError
from canopy.stack import MODULES, Stack, StackSettings
from common.arguments import OneLineParser
from common.errors import StartupError
from common.server import canopy_version


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """For `model_and_head`."""
    parser.add_argument("--model", type=Path, help="target's directory [the demo's, fetched]")
    parser.add_argument("--head", type=Path, help="head's directory [the demo's]")


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", help="a running router; unset: three services are started")
    add_model_arguments(parser)
    parser.add_argument(
        "--tree-budget", choices=("auto", "full"), default="full",
        help="of the services that are started; full: a tree in every round [%(default)s]",
    )  # fmt: skip
    add_flags_argument(parser)
    parser.add_argument("--max-tree-nodes", type=int, help="nodes of a tree, root included")
    parser.add_argument("--max-depth", type=int, help="depth of a tree")


def add_flags_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--flags", type=service_flags, default={}, metavar="'SERVICE FLAG…; SERVICE FLAG…'",
        help="further flags of the services that are started",
    )  # fmt: skip


def service_flags(text: str) -> dict[str, tuple[str, ...]]:
    """Flags by service of `SERVICE FLAG…; SERVICE FLAG…`. Raises ArgumentTypeError."""
    flags: dict[str, tuple[str, ...]] = {}
    for part in filter(None, (each.split() for each in text.split(";"))):
        if part[0] not in MODULES:
            raise argparse.ArgumentTypeError(f"{part[0]!r} is none of {', '.join(MODULES)}")
        flags[part[0]] = (*flags.get(part[0], ()), *part[1:])
    return flags


def prompt_parser(
    doc: str | None, *, limit: int | None, max_tokens: int
) -> argparse.ArgumentParser:
    """A parser with prompts, how many of them, and how long their answers may be."""
    parser = OneLineParser(description=(doc or "").splitlines()[0])
    parser.add_argument(
        "--prompts", type=Path, default=GOLDENS, help="JSON lines with `turns`; the first is used"
    )
    all_of_them = "all" if limit is None else limit
    parser.add_argument("--limit", type=int, default=limit, help=f"prompts to use [{all_of_them}]")
    parser.add_argument(
        "--max-tokens", type=int, default=max_tokens, help="per prompt [%(default)s]"
    )
    return parser


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What a client is told is one line. Raises StartupError."""
    try:
        yield
    except CanopyError as error:
        raise StartupError(str(error)) from None


@contextmanager
def router(arguments: argparse.Namespace) -> Iterator[str]:
    """The address of a router, its services ended afterwards if they were started here."""
    if arguments.address:
        yield arguments.address
        return
    model, head = model_and_head(arguments)
    more = arguments.flags
    budget = ("--tree-budget", arguments.tree_budget)
    flags = more | {"verify": (*budget, *more.get("verify", ()))}
    settings = StackSettings(model=model, head=head, flags=flags, show_logs=False)
    with Stack(settings) as stack:
        yield stack.address


def model_and_head(arguments: argparse.Namespace) -> tuple[Path, Path | None]:
    """As given; else the demo's, fetched."""
    model, head = arguments.model, arguments.head
    if model is None:
        model = library.fetch_model(library.DEMO_MODEL)
        head = head or library.demo_head(model)
    return model, head


def describe(arguments: argparse.Namespace) -> dict[str, object]:
    """Settings, versions and the machine, printed beside the figures."""
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(arguments).items()
        if value is not None
    }
    versions = {name: version(name) for name in ("jax", "grpcio", "numpy")}
    return {
        "settings": settings,
        "versions": {"canopy": canopy_version(), "python": platform.python_version(), **versions},
        "machine": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(terse=True),
        },
    }


def print_report(result: dict[str, object], arguments: argparse.Namespace) -> None:
    """What was run and where, then the figures as the one last line of JSON."""
    for name, value in describe(arguments).items():
        print(f"{name}: {json.dumps(value)}")
    print(json.dumps(result), flush=True)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
