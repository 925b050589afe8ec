"""How much of a head's trees a target accepts, offline, with a plain target forward.

    python -m benchmarks.draft_acceptance --head DIR --target DIR --responses FILE.jsonl --limit 8

FILE holds answers that the target itself wrote (`prompt_ids`, `response_ids` per line). The target
runs once over each, for its true features; then round after round the head grows a tree and the
path that the answer takes is accepted, just as verify would. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from common.types import DraftTree, TreeShape
from draft_service.engine import DeviceEngine, EngineConfig
from draft_service.step import FeatureArray, SequenceWork
from models.config import TargetConfig
from models.eagle3 import load_head
from models.layers import Params
from models.target import load_target, target_forward

PAGE_SIZE = 16
PAD = 128


def main() -> None:
    arguments = _arguments()
    head, head_params = load_head(arguments.head, arguments.target)
    target, params = load_target(arguments.target, boundaries=head.boundaries)
    engine = DeviceEngine(
        head,
        head_params,
        EngineConfig(
            num_pages=arguments.context // PAGE_SIZE,
            page_size=PAGE_SIZE,
            max_context_len=arguments.context,
            tree=TreeShape(
                max_depth=arguments.max_depth, top_k=arguments.top_k, max_nodes=arguments.max_nodes
            ),
            max_sequences=1,
            max_draft_rows=arguments.max_depth + 2,
            max_extend_rows=512,
        ),
    )
    forward = jax.jit(lambda p, tokens: _features(target, p, tokens))
    emitted: Counter[int] = Counter()
    for number, (prompt, response) in enumerate(_answers(arguments), 1):
        tokens = [*prompt, *response]
        padded = np.zeros(-(-len(tokens) // PAD) * PAD, np.int32)
        padded[: len(tokens)] = tokens
        features = np.asarray(forward(params, padded))[: len(tokens)]
        rounds = list(_rounds(engine, tokens, features, len(prompt)))
        emitted.update(rounds)
        print(
            f"{number:4}: {len(rounds):4} rounds, {sum(rounds) / max(1, len(rounds)):.2f} a round"
        )
    num_rounds, num_emitted = emitted.total(), sum(n * count for n, count in emitted.items())
    report = {
        "benchmark": "draft_acceptance",
        "settings": {name: str(value) for name, value in vars(arguments).items()},
        "rounds": num_rounds,
        "acceptance_length": round(num_emitted / max(1, num_rounds), 3),
        "emitted_histogram": {str(n): emitted[n] for n in sorted(emitted)},
    }
    print(json.dumps(report))


def _rounds(
    engine: DeviceEngine, tokens: list[int], features: FeatureArray, num_prompt: int
) -> Iterator[int]:
    """num_emitted of each round, after the root-only one that prefill carries."""
    pages = np.arange(engine.config.pages_per_sequence, dtype=np.int32)
    fed = 0

    def work(until: int, drafts: bool) -> SequenceWork:
        return SequenceWork(
            sequence_id=b"",
            tokens=np.array(tokens[fed + 1 : until + 1], np.int32),
            features=features[fed:until],
            kv_len=fed,
            page_ids=pages,
            drafts=drafts,
        )

    length = num_prompt + 1
    while length < len(tokens):
        pairs = length - 1
        while pairs - fed > engine.config.max_draft_rows:
            until = min(fed + engine.config.max_extend_rows, pairs - 1)
            engine.run([work(until, False)])
            fed = until
        tree = engine.run([work(pairs, True)])[0].tree
        assert tree is not None
        fed = pairs
        num_emitted = _accepted(tree, tokens[length:]) + 1
        yield min(num_emitted, len(tokens) - length)
        length += num_emitted


def _accepted(tree: DraftTree, truth: list[int]) -> int:
    """Nodes below the root that match what the target wrote."""
    node = depth = 0
    while depth < len(truth):
        children = np.flatnonzero((tree.parents == node) & (tree.tokens == truth[depth]))
        if not children.size:
            break
        node, depth = int(children[0]), depth + 1
    return depth


def _features(target: TargetConfig, params: Params, tokens: jax.Array) -> jax.Array:
    """[T, F] of int32 [T], by causal attention over the whole sequence at once."""
    length = tokens.shape[0]
    positions = jnp.arange(length, dtype=jnp.int32)
    behind = positions[:, None] - positions[None]

    def attend(layer: int, q: jax.Array, block_kv: jax.Array) -> jax.Array:
        window = target.windows[layer]
        seen = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
        keys, values = jnp.split(block_kv, 2, axis=-1)
        grouped = q.reshape(length, target.num_kv_heads, -1, target.head_dim)
        scores = jnp.einsum("qhgd,khd->hgqk", grouped, keys) * target.attention_scale
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("hgqk,khd->qhgd", weights, values).reshape(q.shape)

    return target_forward(target, params, tokens, positions, attend)[2]


def _answers(arguments: argparse.Namespace) -> Iterator[tuple[list[int], list[int]]]:
    taken = 0
    with arguments.responses.open(encoding="utf-8") as lines:
        for line in lines:
            entry: dict[str, Any] = json.loads(line)
            if arguments.greedy_only and entry.get("temperature", 0) != 0:
                continue
            prompt, response = list(entry["prompt_ids"]), list(entry["response_ids"])
            if len(prompt) + len(response) > arguments.context:
                continue
            taken += 1
            if taken > arguments.limit:
                return
            yield prompt, response


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--head", type=Path, required=True, help="head's directory")
    parser.add_argument("--target", type=Path, required=True, help="target's directory")
    parser.add_argument("--responses", type=Path, required=True, help="answers of the target")
    parser.add_argument("--limit", type=int, default=8, help="answers to take")
    parser.add_argument("--greedy-only", action="store_true", help="leave out sampled answers")
    parser.add_argument("--max-depth", type=int, default=5)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--max-nodes", type=int, default=16)
    parser.add_argument("--context", type=int, default=1024, help="longest answer, with its prompt")
    return parser.parse_args()


if __name__ == "__main__":
    main()
