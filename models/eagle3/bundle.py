"""One directory with all that a draft machine needs: the head, the target's tables, who the target
is.

    <bundle>/                     the head's own files, as published
    <bundle>/target/              config.json; the embedding, and the lm_head where it is borrowed
    <bundle>/canopy_bundle.json   the target's identity; its presence marks a bundle

A bundle serves as `--head` and as `--target` of a draft service alike.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from models.checkpoint import INDEX_FILE, TensorEntry, open_checkpoint
from models.eagle3.description import HeadConfig, HeadOverrides, TableSource
from models.eagle3.loader import open_head
from models.errors import ModelError
from models.identity import target_identity
from models.target_tables import (
    BUNDLE_FILE,
    BUNDLED_TARGET,
    embedding_name,
    output_table_name,
    read_target_facts,
)
from models.writing import LazyTensor, write_json, write_safetensors

FORMAT_VERSION = 1


def write_bundle(
    head_directory: str | Path, target_directory: str | Path, bundle_directory: str | Path
) -> HeadConfig:
    """Makes a bundle; returns the head's description.

    Raises ModelError: a head that does not fit the target, files that cannot be read, a
    `bundle_directory` that is not empty.
    """
    head, target, bundle = map(Path, (head_directory, target_directory, bundle_directory))
    if bundle.exists() and any(bundle.iterdir()):
        raise ModelError(f"{bundle}: is not empty; name a new directory for the bundle")
    facts = read_target_facts(target)
    config, tensors = open_head(head, facts, HeadOverrides(), np.float32)
    identity = target_identity(target)
    (bundle / BUNDLED_TARGET).mkdir(parents=True, exist_ok=True)
    files = {entry.file for entry in tensors.values()}
    for name in ("config.json", INDEX_FILE):
        if (head / name).exists():
            files.add(head / name)
    for file in sorted(files):
        shutil.copyfile(file, bundle / file.name)
    tables = open_checkpoint(facts.directory)
    wanted: dict[str, TensorEntry] = {}
    if config.embedding_source is TableSource.TARGET:
        name = embedding_name(tables)
        wanted[name] = tables.entries[name]
    if config.lm_head_source is TableSource.TARGET:
        name = output_table_name(facts, tables)
        wanted[name] = tables.entries[name]
    write_safetensors(
        bundle / BUNDLED_TARGET / "model.safetensors",
        {name: LazyTensor(e.dtype, e.shape, e.read) for name, e in wanted.items()},
    )
    shutil.copyfile(facts.directory / "config.json", bundle / BUNDLED_TARGET / "config.json")
    # last: without this file the directory is no bundle
    write_json(bundle / BUNDLE_FILE, {"version": FORMAT_VERSION, "target": identity.as_dict()})
    return config
