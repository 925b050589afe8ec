"""`canopy head train`, `generate-data` and `check`: their flags, and what they run."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import StartupError


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", type=Path, required=True, help="YAML file; docs/training.md")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="replace a field of the recipe, as optimiser.learning_rate=3e-4; may be repeated",
    )
    parser.add_argument("--max-steps", type=int, help="stop there; run again to go on")


def train(parsed: argparse.Namespace) -> int:
    """Trains by a recipe and prints the head's directory. Raises StartupError."""
    import jax
    import yaml

    from common.process import tune_malloc

    tune_malloc()  # mapping a step's buffers anew each time was a quarter of it

    # One device per core: a batch is split over them, which keeps all cores at work. It must be
    # said before jax makes its devices.
    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)  # type: ignore[no-untyped-call]
    try:
        from draft_service.training.recipe import load_recipe
        from draft_service.training.run import train as run
    except ModuleNotFoundError as error:
        raise StartupError(
            f"training needs {error.name}, which is not installed: pip install 'canopy[train]'"
        ) from error
    overrides: dict[str, object] = {}
    for item in parsed.set:
        field, equals, value = item.partition("=")
        if not equals:
            raise StartupError(f"--set: {item!r} must be FIELD=VALUE")
        overrides[field] = yaml.safe_load(value)
    with _in_one_line():
        head = run(load_recipe(parsed.recipe, overrides), parsed.max_steps)
    print(json.dumps({"head": str(head)}))
    return 0


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=Path, required=True, help="the target's directory")
    parser.add_argument(
        "--prompts", type=Path, required=True, help='JSON lines with "prompt" (text, one user turn)'
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, appended to")
    parser.add_argument("--max-tokens", type=int, default=192, help="of a response [%(default)s]")
    parser.add_argument("--max-prompt-tokens", type=int, default=320, help="longer: left out")
    parser.add_argument("--temperature", type=float, default=0.0, help="[%(default)s]")
    parser.add_argument("--batch", type=int, default=32, help="sequences at once [%(default)s]")
    parser.add_argument("--limit", type=int, help="use only the first prompts")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling [%(default)s]")


def generate_data(parsed: argparse.Namespace) -> int:
    """Writes the target's own responses; prompts already in the output are left out."""
    from draft_service.training.generate import GenerateSettings, generate_responses

    settings = GenerateSettings(
        target=parsed.target,
        prompts=parsed.prompts,
        output=parsed.output,
        max_tokens=parsed.max_tokens,
        max_prompt_tokens=parsed.max_prompt_tokens,
        temperature=parsed.temperature,
        batch=parsed.batch,
        limit=parsed.limit,
        seed=parsed.seed,
    )
    with _in_one_line():
        for progress in generate_responses(settings):
            print(json.dumps(progress), flush=True)
    return 0


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="the target's directory")
    parser.add_argument("--head", type=Path, required=True, help="the head's directory")
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        help='JSON lines with "prompt" or "turns", or with "prompt_ids" and "response_ids"',
    )
    parser.add_argument("--limit", type=int, default=8, help="answers to take [%(default)s]")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer [%(default)s]")
    parser.add_argument("--max-prompt-tokens", type=int, default=320, help="longer: left out")
    parser.add_argument("--temperature", type=float, default=0.0, help="[%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling [%(default)s]")
    parser.add_argument("--max-depth", type=int, default=5, help="of a tree [%(default)s]")
    parser.add_argument("--top-k", type=int, default=4, help="children a node [%(default)s]")
    parser.add_argument("--max-nodes", type=int, default=16, help="root included [%(default)s]")
    parser.add_argument("--boundaries", help="captured boundaries, as 2,15,27 [the head's files]")
    parser.add_argument(
        "--all-readings",
        action="store_true",
        help="try the neighbouring layers even where the head's files are sure of theirs",
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")


def check(parsed: argparse.Namespace) -> int:
    """Prints a head's acceptance on given prompts, by reading. Raises StartupError."""
    from common.types import TreeShape
    from draft_service.training.check import CheckSettings, check_head

    settings = CheckSettings(
        model=parsed.model,
        head=parsed.head,
        prompts=parsed.prompts,
        limit=parsed.limit,
        max_tokens=parsed.max_tokens,
        max_prompt_tokens=parsed.max_prompt_tokens,
        temperature=parsed.temperature,
        seed=parsed.seed,
        tree=TreeShape(max_depth=parsed.max_depth, top_k=parsed.top_k, max_nodes=parsed.max_nodes),
        boundaries=_numbers("boundaries", parsed.boundaries),
        all_readings=parsed.all_readings,
    )
    with _in_one_line():
        found = check_head(settings, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(found.as_dict()) if parsed.json else found.as_text())
    return 0


@contextmanager
def _in_one_line() -> Iterator[None]:
    """What a model, a recipe or a file is at fault for, as StartupError."""
    try:
        yield
    except ValueError as error:  # ModelError is one
        raise StartupError(str(error)) from error
    except OSError as error:
        raise StartupError(f"{error.filename}: {error.strerror}; check the path") from error


def _numbers(flag: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise StartupError(f"--{flag}: {text!r} must be numbers, as 2,15,27") from None
