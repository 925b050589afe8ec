"""Models and heads on this machine: where they are kept, how they come there.

The functions that do the work live in `models`; they bring jax, so they are imported when called.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from common.entry import stoppable
from common.errors import StartupError

DEMO_MODEL = "smollm2-135m-instruct"


def default_cache_dir() -> Path:
    """`canopy` below the user's cache directory, as the XDG rules name it."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "canopy"


def fetch_model(name: str, cache_dir: Path | None = None) -> Path:
    """The directory of a known model, fetched and converted unless it is there. StartupError."""
    if name != DEMO_MODEL:
        raise StartupError(f"model: {name!r} cannot be fetched; known: {DEMO_MODEL}")
    from models.errors import ModelError
    from models.fetch import fetch_smollm2
    from models.progress import console_progress

    try:
        with stoppable(), console_progress() as report:
            return fetch_smollm2((cache_dir or default_cache_dir()) / "models", report)
    except ModelError as error:
        raise StartupError(str(error)) from None


def model_directory(name: Path) -> Path:
    """Of a model named by its directory or its Hugging Face id, which is downloaded. StartupError.

    Raised before any service starts, and so that all three read the same files.
    """
    from models.errors import ModelError
    from models.hub import resolve_model

    try:
        with stoppable():
            return resolve_model(name)
    except ModelError as error:
        raise StartupError(f"model: {error}") from None


def init_head(target: Path, head: Path, num_layers: int = 1, draft_vocab: int = 8192) -> Path:
    """Makes a head from the target's own last layers. Raises StartupError."""
    from models.eagle3.init import init_head as init
    from models.errors import ModelError

    if head.exists() and any(head.iterdir()):
        raise StartupError(f"head: {head} is not empty; name a new directory")
    try:
        init(target, head, num_layers=num_layers, draft_vocab_size=draft_vocab)
    except ModelError as error:
        raise StartupError(str(error)) from None
    return head


def demo_head(model: Path) -> Path:
    """The head that comes with this package, trained for the demo's model. Raises StartupError."""
    head = Path(__file__).resolve().parent / "heads" / model.name
    if not head.is_dir():
        raise StartupError(f"head: none comes with Canopy for {model}; name one with --head")
    return head


def copy_demo_head(model: Path, cache_dir: Path | None = None) -> Path:
    """The demo's head as files beside its model, for services that do not share our package."""
    head = (cache_dir or default_cache_dir()) / "heads" / model.name
    shutil.copytree(demo_head(model), head, dirs_exist_ok=True)
    return head
