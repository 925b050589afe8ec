"""The `canopy` command: serve, generate, demo, model, head, plan."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from rich.console import Console

from canopy import generating, library, planning
from canopy.demo import run_demo
from canopy.results import CanopyError
from canopy.stack import MODULES, Stack, StackSettings
from common.arguments import OneLineParser
from common.entry import Stopped, run_program
from common.errors import StartupError
from common.server import canopy_version, check_port
from draft_service.training import command as training


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns its exit code. Raises StartupError, and Stopped on a signal."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["serve"] and arguments[1:2] and arguments[1] in MODULES:
        return _serve_one(arguments[1], arguments[2:])
    parsed = _parser().parse_args(arguments)
    try:
        code: int = parsed.run(parsed)
    except CanopyError as error:
        raise StartupError(str(error)) from None
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="canopy", description="Disaggregated EAGLE-3 speculative decoding over gRPC."
    )
    parser.add_argument("--version", action="version", version=f"canopy {canopy_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    generate = commands.add_parser("generate", help="send a prompt to a running router")
    generating.add_arguments(generate)
    generate.set_defaults(run=generating.generate)
    demo = commands.add_parser("demo", help="see it work: a model, three services, an answer")
    demo.set_defaults(run=lambda parsed: run_demo(Console(highlight=False)))
    _add_model(commands)
    _add_head(commands)
    plan = commands.add_parser("plan", help="how many slices of each kind a load needs")
    planning.add_arguments(plan)
    plan.set_defaults(run=planning.run)
    return parser


Commands: TypeAlias = "argparse._SubParsersAction[OneLineParser]"
"""The type of what add_subparsers returns has no public name."""


def _add_serve(commands: Commands) -> None:
    serve = commands.add_parser("serve", help="run a service, or all three")
    services = serve.add_subparsers(required=True, metavar="SERVICE")
    for name in MODULES:  # run by _serve_one, which hands every flag on
        services.add_parser(name, help=f"run the {name} service; its own --help lists the flags")
    every = services.add_parser("all", help="run all three as processes of this one")
    every.add_argument("--model", type=Path, help="directory or Hugging Face id [the demo's]")
    every.add_argument("--head", type=Path, help="head directory [for the demo's model: its own]")
    every.add_argument("--host", default="127.0.0.1", help="the router's address [%(default)s]")
    every.add_argument("--port", type=int, default=50051, help="the router's port [%(default)s]")
    every.add_argument("--num-verify", type=int, default=1, help="verify replicas [%(default)s]")
    every.add_argument("--num-draft", type=int, default=1, help="draft replicas [%(default)s]")
    every.set_defaults(run=_serve_all)


def _add_model(commands: Commands) -> None:
    model = commands.add_parser("model", help="fetch a target model")
    actions = model.add_subparsers(required=True, metavar="ACTION")
    fetch = actions.add_parser("fetch", help="download and convert a known model")
    fetch.add_argument("name", choices=[library.DEMO_MODEL], help="of the model")
    fetch.add_argument("--cache-dir", type=Path, help="where models are kept [the user's cache]")
    fetch.add_argument("--with-head", action="store_true", help="put its head beside it, in heads/")
    fetch.set_defaults(run=_model_fetch)


def _add_head(commands: Commands) -> None:
    head = commands.add_parser("head", help="make, look at and bundle draft heads")
    actions = head.add_subparsers(required=True, metavar="ACTION")
    init = actions.add_parser("init", help="make a head from the target's own last layers")
    init.add_argument("directory", type=Path, help="new directory for the head")
    init.add_argument("--target", type=Path, required=True, help="the target's directory")
    init.add_argument("--num-layers", type=int, default=1, help="of the head [%(default)s]")
    init.add_argument("--draft-vocab", type=int, default=8192, help="tokens it may draft")
    init.set_defaults(run=_head_init)
    inspect = actions.add_parser("inspect", help="say what a head is and what was assumed")
    inspect.add_argument("directory", type=Path, help="the head's")
    inspect.add_argument("--target", type=Path, help="see whether the head fits this target")
    inspect.add_argument("--json", action="store_true", help="one line of JSON")
    inspect.set_defaults(run=_head_inspect)
    train = actions.add_parser("train", help="train a head by a recipe; goes on where it stood")
    training.add_train_arguments(train)
    train.set_defaults(run=training.train)
    data = actions.add_parser("generate-data", help="have the target answer prompts, to train on")
    training.add_generate_arguments(data)
    data.set_defaults(run=training.generate_data)
    check = actions.add_parser("check", help="how much of its trees the target accepts")
    training.add_check_arguments(check)
    check.set_defaults(run=training.check)
    bundle = actions.add_parser("bundle", help="all that a draft machine needs, in one directory")
    bundle.add_argument("directory", type=Path, help="new directory for the bundle")
    bundle.add_argument("--head", type=Path, required=True, help="the head's directory")
    bundle.add_argument("--target", type=Path, required=True, help="the target's directory")
    bundle.set_defaults(run=_head_bundle)


def _serve_one(name: str, flags: Sequence[str]) -> int:
    """Becomes the service's process: its import brings what this command must not load."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", MODULES[name], *flags])


def _serve_all(parsed: argparse.Namespace) -> int:
    model, head = parsed.model, parsed.head
    check_port(parsed.host, parsed.port)  # before minutes of compiling; the router says it again
    if model is None:
        if head is not None:
            raise StartupError("head: given without --model; name the model that it belongs to")
        model = library.fetch_model(library.DEMO_MODEL)
        head = library.demo_head(model)
    else:
        model = library.model_directory(model)
    router = ("--host", parsed.host, "--port", str(parsed.port))
    settings = StackSettings(
        model=model,
        head=head,
        num_verify=parsed.num_verify,
        num_draft=parsed.num_draft,
        flags={"router": router},
    )
    with Stack(settings) as stack:
        print(json.dumps({"event": "serving", "address": stack.address}), flush=True)
        try:
            stack.watch(lambda line: print(f"canopy: {line}", file=sys.stderr, flush=True))
        except Stopped:  # the way to stop it
            return 0


def _model_fetch(parsed: argparse.Namespace) -> int:
    model = library.fetch_model(parsed.name, parsed.cache_dir)
    print(model)
    if parsed.with_head:
        print(library.copy_demo_head(model, parsed.cache_dir))
    return 0


def _head_init(parsed: argparse.Namespace) -> int:
    print(library.init_head(parsed.target, parsed.directory, parsed.num_layers, parsed.draft_vocab))
    return 0


def _head_inspect(parsed: argparse.Namespace) -> int:
    from models.eagle3.inspect import inspect_head
    from models.errors import ModelError

    try:
        report = inspect_head(parsed.directory, parsed.target)
    except ModelError as error:
        raise StartupError(str(error)) from None
    print(json.dumps(report.as_dict()) if parsed.json else report.as_text())
    return 1 if report.misfit else 0


def _head_bundle(parsed: argparse.Namespace) -> int:
    from models.eagle3.bundle import write_bundle
    from models.errors import ModelError

    try:
        write_bundle(parsed.head, parsed.target, parsed.directory)
    except ModelError as error:
        raise StartupError(str(error)) from None
    print(parsed.directory)
    return 0


if __name__ == "__main__":
    sys.exit(run_program("canopy", main))
