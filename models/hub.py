"""A model named on the command line: a directory here, or an id of the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from models.errors import FetchError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
_WANTED = ["*.json", "*.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json"]


def resolve_model(name: str | Path) -> Path:
    """The directory of a model: `name` itself where it is one, else downloaded from the hub.

    An id is `owner/name`, with `@revision` after it where a certain one is meant. Only configs,
    tokenizer and weights are fetched; what the hub's cache holds is not fetched again.

    Raises FetchError: neither a directory nor an id, or the download failed.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if not _HUB_ID.fullmatch(str(name)):
        raise FetchError(
            f"{name}: is neither a directory nor a Hugging Face id (owner/name); check the path"
        )
    # Imported here: it takes a while, and most models are directories.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repo_id, _, revision = str(name).partition("@")
    try:
        return Path(snapshot_download(repo_id, revision=revision or None, allow_patterns=_WANTED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise FetchError(
            f"{name}: could not be downloaded ({reason}); check the id, the network and your"
            " access, or download it elsewhere and name the directory"
        ) from error
