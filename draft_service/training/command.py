"""`canopy head train` and `canopy head generate-data`: their flags, and what they run."""

from __future__ import annotations

import argparse
import json
import os
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

    from models.errors import ModelError

    # One device per core: a batch is split over them, which keeps all cores at work. It must be
    # said before jax makes its devices.
    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)  # type: ignore[no-untyped-call]
    from draft_service.training.recipe import load_recipe
    from draft_service.training.run import train as run

    overrides: dict[str, object] = {}
    for item in parsed.set:
        field, equals, value = item.partition("=")
        if not equals:
            raise StartupError(f"--set: {item!r} must be FIELD=VALUE")
        overrides[field] = yaml.safe_load(value)
    try:
        head = run(load_recipe(parsed.recipe, overrides), parsed.max_steps)
    except (ModelError, ValueError) as error:
        raise StartupError(str(error)) from error
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
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=32, help="sequences at once [%(default)s]")
    parser.add_argument("--limit", type=int, help="use only the first prompts")
    parser.add_argument("--seed", type=int, default=0)


def generate_data(parsed: argparse.Namespace) -> int:
    """Writes the target's own responses; prompts already in the output are left out."""
    from draft_service.training.generate import GenerateSettings, generate_responses
    from models.errors import ModelError

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
    try:
        for progress in generate_responses(settings):
            print(json.dumps(progress), flush=True)
    except (ModelError, ValueError, OSError) as error:
        raise StartupError(str(error)) from error
    return 0
