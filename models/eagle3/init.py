"""A head to start from, made of the target's own last layers: it drafts a little, and trains well.

fc picks the last captured state; each layer is one of the target's last, its attention looking at
the hidden half only (the embedding's columns are zero); norm and lm_head rows are the target's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.typing import DTypeLike

from models.checkpoint import FETCH_AGAIN, Checkpoint, open_checkpoint
from models.config import TargetConfig, read_target_config
from models.eagle3.description import FeatureKind, FuseNorm, HeadConfig, TableSource
from models.eagle3.export import save_head
from models.eagle3.layouts import MIDLAYER, PLAIN
from models.eagle3.module import head_shapes
from models.eagle3.vocabulary import Int32Array
from models.errors import CheckpointError, ModelError
from models.families import family_named
from models.layers import Params
from models.target import flatten, unflatten
from models.target_tables import output_table_name, read_embedding, read_target_facts

DEFAULT_DRAFT_VOCAB_SIZE = 8192


def init_head(
    target_directory: str | Path,
    head_directory: str | Path,
    *,
    draft_vocab_size: int = DEFAULT_DRAFT_VOCAB_SIZE,
    token_counts: npt.NDArray[np.integer] | None = None,
    num_layers: int = 1,
    embedding_in_every_layer: bool = False,
    boundaries: Sequence[int] | None = None,
    dtype: DTypeLike = np.float32,
) -> HeadConfig:
    """Writes a warm-started head for the target into `head_directory`; returns its description.

    Args:
      token_counts: [V], how often each target token occurs in responses; the most frequent become
        the draft vocabulary. None: the lowest ids, which in a BPE vocabulary are the earliest
        merges.
      num_layers, embedding_in_every_layer: the target's last `num_layers` layers; convention A or
      B. boundaries: captured ones, the last of which feeds the first layer; None: the default.

    Raises ModelError: a target that cannot be read, a vocabulary or depth larger than the target's.
    """
    target_directory = Path(target_directory)
    target = read_target_config(target_directory, dtype=dtype, boundaries=boundaries)
    if not 1 <= num_layers <= target.num_layers:
        raise ModelError(
            f"num_layers: {num_layers} is outside [1, {target.num_layers}], the target's layers"
        )
    draft_to_target = choose_draft_vocabulary(
        target_directory, target, draft_vocab_size, token_counts
    )
    config = warm_config(target, num_layers, embedding_in_every_layer, draft_to_target.size)
    params = warm_params(target_directory, target, config, draft_to_target)
    extra = {"max_position_embeddings": target.max_positions}
    save_head(
        head_directory,
        config,
        params,
        target_num_layers=target.num_layers,
        dtype=dtype,
        extra=extra,
    )
    return config


def choose_draft_vocabulary(
    directory: Path,
    target: TargetConfig,
    draft_vocab_size: int,
    token_counts: npt.NDArray[np.integer] | None,
) -> Int32Array:
    """int32 [draft_vocab_size], ascending: special tokens, then the most frequent or the lowest
    ids.
    """
    special = special_tokens(directory) | set(target.eos_token_ids)
    if not len(special) < draft_vocab_size <= target.vocab_size:
        raise ModelError(
            f"draft_vocab_size: {draft_vocab_size} is outside ({len(special)},"
            f" {target.vocab_size}]: it holds the special tokens, and no more than the target's"
            " vocabulary"
        )
    order = np.arange(target.vocab_size)
    if token_counts is not None:
        if token_counts.shape != (target.vocab_size,):
            raise ModelError(
                f"token_counts: {list(token_counts.shape)} counts, the target's vocabulary has"
                f" {target.vocab_size}"
            )
        order = np.argsort(-token_counts.astype(np.int64), kind="stable")  # equal: lowest id first
    common = [int(token) for token in order if int(token) not in special]
    chosen = sorted([*special, *common[: draft_vocab_size - len(special)]])
    return np.array(chosen, np.int32)


def special_tokens(directory: Path) -> set[int]:
    """Ids of the special tokens in tokenizer.json, which a response may end with."""
    path = directory / "tokenizer.json"
    try:
        added = json.loads(path.read_text(encoding="utf-8")).get("added_tokens") or []
        return {int(token["id"]) for token in added if token.get("special")}
    except FileNotFoundError:
        return set()  # a target without a tokenizer has no special tokens to keep
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: is not readable ({error}); {FETCH_AGAIN}") from error


def warm_config(
    target: TargetConfig, num_layers: int, embedding_in_every_layer: bool, draft_vocab_size: int
) -> HeadConfig:
    """The description of a head of the target's own shape."""
    return HeadConfig(
        layout=MIDLAYER if num_layers == 1 or embedding_in_every_layer else PLAIN,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        num_states=len(target.boundaries),
        feature_kind=FeatureKind.AUX,
        boundaries=target.boundaries,
        has_fc=True,
        fc_bias=False,
        fuse_norm=FuseNorm.NONE,
        embedding_layers=(True,) + (embedding_in_every_layer,) * (num_layers - 1),
        windows=target.windows[-num_layers:],
        attention=target.attention,
        mlp_size=target.mlp_size,
        mlp_bias=target.mlp_bias,
        norm_eps=target.norm_eps,
        norm_before_residual=False,
        norm_output=False,
        rope=target.rope,
        draft_vocab_size=draft_vocab_size,
        target_vocab_size=target.vocab_size,
        embedding_source=TableSource.TARGET,
        lm_head_source=TableSource.HEAD,
        dtype=target.dtype,
    )


def warm_params(
    directory: Path, target: TargetConfig, config: HeadConfig, draft_to_target: Int32Array
) -> Params:
    """Parameters as `load_head` would give them; only the layers used are read from the target."""
    facts, checkpoint = read_target_facts(directory), open_checkpoint(directory)
    leaves: dict[tuple[str, ...], object] = {}
    for path, leaf in flatten(head_shapes(config)):
        host = _warm_leaf(path, tuple(leaf.shape), target, config, checkpoint)
        leaves[path] = jnp.asarray(host.astype(config.dtype))
    table = checkpoint.read(output_table_name(facts, checkpoint))
    leaves[("embedding",)] = jnp.asarray(read_embedding(facts).astype(config.dtype, copy=False))
    leaves[("lm_head",)] = jnp.asarray(table[draft_to_target].astype(config.dtype))
    leaves[("draft_to_target",)] = jnp.asarray(draft_to_target)
    return unflatten(leaves)


def _warm_leaf(
    path: tuple[str, ...],
    shape: tuple[int, ...],
    target: TargetConfig,
    config: HeadConfig,
    checkpoint: Checkpoint,
) -> npt.NDArray[np.floating]:
    """One parameter [in, out] or [n]: the target's of the same role, widened where the head's
    is.
    """
    if path == ("fuse", "fc", "kernel"):
        kernel = np.zeros(shape, np.float32)
        kernel[-config.hidden_size :] = np.eye(config.hidden_size, dtype=np.float32)
        return kernel
    if path[-2] == "embed_norm":
        return np.ones(shape, np.float32)
    source = path
    if path[0] != "final_norm":
        layer = int(path[0].removeprefix("layer_")) + target.num_layers - config.num_layers
        role = "attention_norm" if path[1] == "hidden_norm" else path[1]
        source = (f"layer_{layer}", role, *path[2:])
    stored = checkpoint.read(family_named(target.family).tensor_name(source)).astype(np.float32)
    own: npt.NDArray[np.floating] = stored.T if path[-1] == "kernel" else stored
    if own.shape == shape:
        return own
    widened = np.zeros(shape, np.float32)  # rows of the embedding half stay zero
    widened[-own.shape[0] :] = own
    return widened
