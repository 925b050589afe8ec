"""Run by test_draft_tensor_parallel.py with some forced host devices; prints a line of JSON a head.

Each head is loaded on one device and split over all of them; the same histories, fed in chunks and
several to a step, go through both engines.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from draft_tiny import work

from benchmarks.tiny_models import VOCAB_SIZE, write_tiny_target
from common.types import DraftTree, TreeShape
from draft_service.engine import DeviceEngine, EngineConfig
from draft_service.int8 import quantise
from draft_service.step import NoiseKey
from models.eagle3 import load_head
from models.eagle3.init import init_head
from models.sharding import model_mesh

ENGINE = EngineConfig(
    num_pages=32,
    page_size=4,
    max_context_len=64,
    tree=TreeShape(max_depth=4, top_k=5, max_nodes=24),
    max_sequences=2,
    max_draft_rows=4,
    max_extend_rows=16,
)
HEADS = {
    "odd vocabulary": {"draft_vocab_size": 39},
    "odd vocabulary, int8": {"draft_vocab_size": 39},
    "two layers": {"draft_vocab_size": 64, "num_layers": 2, "embedding_in_every_layer": True},
}


def trees(engine: DeviceEngine, width: int) -> list[DraftTree]:
    """Of two sequences in one step, each with a history of its own, twice."""
    grown = []
    for seed in range(3):
        random = np.random.default_rng(seed)
        tokens = random.integers(0, VOCAB_SIZE, 14).tolist()
        features = random.normal(0.0, 1.0, (14, width)).astype(np.float32)
        engine.run([work(tokens, features, 0, 9, [3, 1, 4, 9], False)])
        other = work(tokens[::-1], features[::-1].copy(), 0, 4, [5, 2], True)
        noise = NoiseKey(seed=7, temperature=0.8, pick_position=4)
        other = replace(other, noise=noise)  # ordered with what the target picks with
        outcomes = engine.run([work(tokens, features, 9, 12, [3, 1, 4, 9], True), other])
        grown += [outcome.tree for outcome in outcomes if outcome.tree is not None]
    return grown


def compare(name: str, num_shards: int, where: Path) -> dict[str, object]:
    target = write_tiny_target(where / "target", num_attention_heads=8, hidden_size=64)
    init_head(target, where / "head", **HEADS[name])  # type: ignore[arg-type]
    mesh = model_mesh(num_shards)
    (head, whole), (split_head, shares) = (
        load_head(where / "head", target, mesh=each) for each in (None, mesh)
    )
    if name.endswith("int8"):
        whole, shares = quantise(whole), quantise(shares, mesh)
    single = DeviceEngine(head, whole, ENGINE)
    split = DeviceEngine(split_head, shares, ENGINE, mesh=mesh)
    alone = trees(single, single.head.feature_size)
    others = trees(split, split.head.feature_size)
    same = [
        a.tokens.tolist() == b.tokens.tolist() and a.parents.tolist() == b.parents.tolist()
        for a, b in zip(alone, others, strict=True)
    ]
    return {
        "name": name,
        "trees": len(alone),
        "same": sum(same),
        "nodes": [tree.num_nodes for tree in alone],
        "scores": max(
            float(np.abs(a.scores - b.scores).max()) if equal else 0.0
            for a, b, equal in zip(alone, others, same, strict=True)
        ),
        "pages": [list(part.data.shape) for part in split._pages.addressable_shards],
        "kernels": {
            str(path): list(leaf.addressable_shards[0].data.shape)
            for path, leaf in split._params["layer_0"]["attention"].items()
            for kind, leaf in leaf.items()
            if kind == "kernel"
        },
        "dtypes": sorted({str(leaf.dtype) for leaf in jax.tree.leaves(split._params)}),
    }


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    for case in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as directory:
            result = compare(case, jax.device_count(), Path(directory))
            print(json.dumps(result), flush=True)
