"""A verify that fuses features and a draft that takes them so draft as the two do otherwise: put
together from settings, compared as the router does it, run without services."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_driver import Generated, Tree, generate

import draft_service.assembly
import draft_service.codec
import verify_service.assembly
import verify_service.codec
from benchmarks.tiny_models import VOCAB_SIZE, write_tiny_target
from canopy import library
from common.types import SamplingParams
from draft_service.config import DraftConfig
from draft_service.step import SequenceWork
from models.eagle3 import head_fuse, load_head
from router.handshake import check_pair
from verify_service.config import VerifyConfig

KINDS = ("captured", "fused")
SIZES = (
    "--kv-pool-tokens=64",
    "--max-context-tokens=64",
    "--max-sequences=1",
    f"--compile-cache={os.environ['JAX_COMPILATION_CACHE_DIR']}",
)
VERIFY = (
    *SIZES, "--max-step-tokens=16", "--max-prefill-tokens=8", "--row-buckets=16",
    "--max-tree-nodes=10", "--max-tree-depth=3",
)  # fmt: skip
DRAFT = (
    *SIZES, "--max-step-sequences=1", "--max-extend-tokens=32", "--max-nodes=10", "--max-depth=3",
    "--top-k=3", "--levels=all",
)  # fmt: skip
PROMPT = [72, 101, 108, 108, 111, 32, 116, 104, 101, 114]
NUM_TOKENS = 32


class Pair(NamedTuple):
    verify: dict[str, verify_service.assembly.Assembly]
    draft: dict[str, draft_service.assembly.Assembly]


def verify_of(target: Path, head: Path, features: str) -> verify_service.assembly.Assembly:
    flags = ["--model", str(target), "--head", str(head), "--features", features, *VERIFY]
    return verify_service.assembly.assemble(VerifyConfig.load(flags, environ={}), None)


def draft_of(target: Path, head: Path, features: str) -> draft_service.assembly.Assembly:
    flags = ["--head", str(head), "--target", str(target), "--features", features, *DRAFT]
    return draft_service.assembly.assemble(DraftConfig.load(flags, environ={}), None)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Nine layers: a step's programs have three each, so that one is compiled for all."""
    folder = tmp_path_factory.mktemp("pair")
    target = write_tiny_target(folder / "target", num_hidden_layers=9)
    return target, library.init_head(target, folder / "head", draft_vocab=VOCAB_SIZE)


@pytest.fixture(scope="module")
def in_haste() -> Iterator[None]:
    """XLA compiles in two thirds of the time what then runs slower."""
    update: Any = jax.config.update
    update("jax_disable_most_optimizations", True)
    yield
    update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def pair(directories: tuple[Path, Path], in_haste: None) -> Pair:
    return Pair(
        {kind: verify_of(*directories, kind) for kind in KINDS},
        {kind: draft_of(*directories, kind) for kind in KINDS},
    )


def mismatch(pair: Pair, verify: str, draft: str, **changes: Any) -> str | None:
    return check_pair(
        verify_service.codec.encode_info(pair.verify[verify].info),
        draft_service.codec.encode_info(replace(pair.draft[draft].info, **changes)),
    )


def decode(pair: Pair, kind: str) -> tuple[Generated, list[int]]:
    """The answer, and rows committed in each step."""
    one, draft, fed = Generated(list(PROMPT), len(PROMPT)), pair.draft[kind].engine, 0

    def grow(_: int, tokens: list[int]) -> Tree:
        nonlocal fed
        if not one.features:
            return [], []
        rows, until = np.concatenate(one.features), len(tokens) - 1
        assert rows.shape == (until, draft.row_width)
        for end in [*range(fed + 8, until, 8), until]:
            work = SequenceWork(
                sequence_id=b"s", tokens=np.array(tokens[fed + 1 : end + 1], np.int32),
                features=rows[fed:end], kv_len=fed, page_ids=np.arange(4, dtype=np.int32),
                drafts=end == until,
            )  # fmt: skip
            [outcome] = draft.run([work])
            fed = end
        assert outcome.tree is not None
        return outcome.tree.tokens[1:].tolist(), outcome.tree.parents[1:].tolist()

    engine = pair.verify[kind].engine
    generate(engine, [PROMPT], [SamplingParams()], NUM_TOKENS, grow, resume=[one])
    return one, [len(rows) for rows in one.features]


def test_fused_pair_gives_the_tokens_and_accepted_counts_of_a_captured_one(pair: Pair) -> None:
    for kind in KINDS:
        assert mismatch(pair, kind, kind) is None
    (captured, rounds), (fused, fused_rounds) = (decode(pair, kind) for kind in KINDS)
    assert fused.tokens == captured.tokens
    assert fused_rounds == rounds
    assert captured.accepted > 4


def test_step_gives_what_the_head_makes_of_captured_rows(
    pair: Pair, directories: tuple[Path, Path]
) -> None:
    (captured, _), (fused, _) = (decode(pair, kind) for kind in KINDS)
    head, params = load_head(directories[1], directories[0])
    rows = jnp.asarray(np.concatenate(captured.features))
    assert rows.shape[1] == 96
    expected = np.asarray(head_fuse(head, params, rows))
    np.testing.assert_allclose(np.concatenate(fused.features), expected, rtol=1e-4, atol=1e-5)


def test_pairs_that_disagree_on_fusing_are_refused(pair: Pair) -> None:
    info = pair.verify["fused"].info
    assert (info.row_width, info.fused_by) == (32, pair.draft["fused"].info.fused_by)
    assert (pair.verify["captured"].info.fused_by, len(info.fused_by)) == ("", 64)
    said = mismatch(pair, "fused", "captured") or ""
    assert "start the draft with --features fused, or verify with --features captured" in said
    said = mismatch(pair, "captured", "fused") or ""
    assert "start verify with --features fused and the draft's head" in said
    said = mismatch(pair, "fused", "fused", fused_by="abcdef012345" * 5) or ""
    assert said.startswith(f"fusing head: verify fuses features by {info.fused_by[:12]}")
    assert "the draft's head has abcdef012345;" in said
