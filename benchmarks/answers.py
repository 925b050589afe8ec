"""The target's own answers, replayed: what the benchmarks of a head alone have in common."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.prompts import GOLDENS
from benchmarks.serving import add_model_arguments, model_and_head
from common.errors import StartupError
from common.types import TreeShape
from draft_service.step import FeatureArray
from draft_service.training.replay import Answer, padded

COLUMNS = 64  # answers are padded to a multiple, so that few programs are compiled


def answers_parser(doc: str | None, *, max_depth: int, max_nodes: int) -> argparse.ArgumentParser:
    """A parser with answers, how many of them, the trees to grow, and whose."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--answers", type=Path, default=GOLDENS, help="the target's own answers")
    parser.add_argument("--limit", type=int, help="answers to use [all]")
    parser.add_argument("--max-depth", type=int, default=max_depth, help="of a tree [%(default)s]")
    parser.add_argument("--top-k", type=int, default=4, help="[%(default)s]")
    parser.add_argument("--max-nodes", type=int, default=max_nodes, help="of a tree [%(default)s]")
    add_model_arguments(parser)
    return parser


def tree_of(arguments: argparse.Namespace) -> TreeShape:
    return TreeShape(
        max_depth=arguments.max_depth, top_k=arguments.top_k, max_nodes=arguments.max_nodes
    )


def model_with_head(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """As given; else the demo's, fetched. Raises StartupError for a model without a head."""
    model, head = model_and_head(arguments)
    if head is None:
        raise StartupError("head: not set; give --head with --model")
    return model, head


def read_answers(path: Path, limit: int | None) -> list[Answer]:
    """Those of more than one token. Raises StartupError."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    answers = [Answer(list(r["prompt_ids"]), list(r["response_ids"])) for r in rows]
    answers = [answer for answer in answers if len(answer.response) > 1][:limit]
    if not answers:
        raise StartupError(f"answers: {path} has no row with prompt_ids and response_ids")
    return answers


def features_of(states: Any, answer: Answer, dtype: Any) -> FeatureArray:
    """[n, F]: the target's features of all its tokens. `states`: `make_target_states`'s."""
    features = states(padded(answer.tokens, COLUMNS))[0][0, : len(answer.tokens)]
    return np.ascontiguousarray(features, dtype)
