"""`canopy head check` finds the layers that a head was made for, and refuses by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import write_model

from benchmarks.tiny_models import CONFIG, VOCAB_SIZE, write_tiny_target
from canopy.cli import main
from common.entry import run_program
from common.types import TreeShape
from draft_service.training.check import CheckSettings, check_head, readings_of
from models.eagle3 import load_head

pytestmark = pytest.mark.heads

H, INNER = 32, 48
TURNED_AT = 4
"""The layer that turns the residual stream: boundaries up to it carry the plain embedding."""


def tables() -> tuple[Any, Any]:
    """Embedding [V, H], all rows of one length and with the same last number; a rotation [H, H]."""
    rng = np.random.default_rng(4)
    rows = rng.normal(size=(VOCAB_SIZE, H - 1))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    embedding = np.concatenate([rows, np.full((VOCAB_SIZE, 1), 0.5)], axis=1)
    turn = np.eye(H)
    turn[:-1, :-1] = np.linalg.qr(rng.normal(size=(H - 1, H - 1)))[0]
    return embedding.astype(np.float32), turn.astype(np.float32)


def make_counting(weights: dict[str, Any]) -> None:
    """The target counts upward. One layer's MLP is linear (its gate sees a constant) and turns the
    stream; the others add nothing."""
    embedding, turn = tables()
    rms = np.sqrt(np.mean(embedding[0] ** 2))
    gate = 20.0
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value[:] = 0.0
    layer = f"model.layers.{TURNED_AT}.mlp"
    weights[f"{layer}.gate_proj.weight"][:] = 0.0
    weights[f"{layer}.gate_proj.weight"][:, -1] = gate * rms / 0.5
    weights[f"{layer}.up_proj.weight"][:] = np.eye(INNER, H)
    weights[f"{layer}.down_proj.weight"][:] = (turn - np.eye(H)) @ np.eye(H, INNER) * rms / gate
    weights["model.embed_tokens.weight"] = embedding
    weights["lm_head.weight"] = np.roll(embedding @ turn.T, 1, axis=0)  # row i + 1 answers token i


def write_counting_head(directory: Path, **config: Any) -> Path:
    """A head that passes the last captured state on; its lm_head knows the token after the next,
    provided that the state is a turned one."""
    embedding, turn = tables()
    zeros: dict[str, tuple[int, ...]] = {
        "midlayer.self_attn.q_proj.weight": (H, 2 * H),
        "midlayer.self_attn.k_proj.weight": (H // 2, 2 * H),
        "midlayer.self_attn.v_proj.weight": (H // 2, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, H),
        "midlayer.mlp.gate_proj.weight": (INNER, H),
        "midlayer.mlp.up_proj.weight": (INNER, H),
        "midlayer.mlp.down_proj.weight": (H, INNER),
    }
    weights = {name: np.zeros(shape, np.float32) for name, shape in zeros.items()}
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        weights[f"midlayer.{name}.weight"] = np.ones(H, np.float32)
    weights["norm.weight"] = np.ones(H, np.float32)
    weights["fc.weight"] = np.concatenate([np.zeros((H, 2 * H)), np.eye(H)], 1).astype(np.float32)
    weights["lm_head.weight"] = np.roll(embedding @ turn.T, 2, axis=0)
    fields = {**CONFIG, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    fields |= {"draft_vocab_size": VOCAB_SIZE, "tie_word_embeddings": False, **config}
    return write_model(directory, fields, weights)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("check") / "target"
    return write_tiny_target(directory, change=make_counting, tie_word_embeddings=False)


def prompts(directory: Path, *rows: dict[str, Any]) -> Path:
    path = directory / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def check(capsys: pytest.CaptureFixture[str], *flags: object) -> tuple[int, str, str]:
    code = run_program("canopy", lambda: main(["head", "check", *map(str, flags)]))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_reading_that_accepts_more_is_found_where_ids_are_ambiguous(
    target: Path, tmp_path: Path
) -> None:
    """Ids 1, 2, 3 are read as outputs by this layout's habit, boundaries 2, 3, 4; the state that
    the head understands is that of the next layer."""
    report = check_head(
        CheckSettings(
            model=target,
            head=write_counting_head(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
            prompts=prompts(tmp_path, {"prompt": "on"}, {"turns": ["up", "unused"]}),
            max_tokens=16,
            tree=TreeShape(max_depth=1, top_k=2, max_nodes=3),
        ),
        lambda line: None,
    )
    assert (report.answers, report.response_tokens) == (2, 32)
    assert [(reading.name, reading.boundaries) for reading in report.readings] == [
        ("as served", (2, 3, 4)),
        ("one layer earlier", (1, 2, 3)),
        ("one layer later", (3, 4, 5)),
    ]
    served, earlier, later = (reading.acceptance_length or 0.0 for reading in report.readings)
    assert later == 15 / 8  # two tokens a round, but for the last one of each answer
    assert max(served, earlier) < 1.5
    assert report.readings[2].per_depth == [0.875]
    assert report.best.boundaries == (3, 4, 5)
    assert report.as_text().endswith("start verify and draft with --boundaries 3,4,5")


def test_sure_files_are_read_one_way_and_known_answers_are_replayed(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default boundaries' ids leave no doubt, unless all readings are asked for. Of the
    answers, the one that does not count accepts nothing."""
    directory = write_counting_head(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    head, _ = load_head(directory, target)
    assert list(readings_of(head, 8, all_readings=False)) == [("as served", (2, 4, 5))]
    counting = {"prompt_ids": [7, 8], "response_ids": list(range(9, 33)), "temperature": 0.0}
    other = {"prompt_ids": [7, 8], "response_ids": list(range(200, 152, -4))}
    asked = prompts(tmp_path, counting, other)
    flags = ("--all-readings", "--max-depth", 1, "--top-k", 2, "--max-nodes", 3, "--json")
    code, out, _ = check(capsys, "--model", target, "--head", directory, "--prompts", asked, *flags)
    assert code == 0
    report = json.loads(out)
    assert [r["boundaries"] for r in report["readings"]] == [[2, 4, 5], [1, 3, 4], [3, 5, 6]]
    assert report["best"]["name"] == "as served"
    served = report["readings"][0]
    # 23 tokens after the first, two a round, the last round cut short; 11 more one by one
    assert served["rounds"] == 12 + 11
    assert served["acceptance_length"] == round(34 / 23, 4)


@pytest.mark.parametrize(
    ("flags", "row", "message"),
    [
        ((), {"question": "?"}, r"prompts.jsonl:1 has neither prompt, turns nor prompt_ids"),
        ((), {"prompt_ids": [1], "response_ids": [2]}, "gives no answer of two tokens or more"),
        (("--max-prompt-tokens", 2), {"prompt": "far too long"}, "of at most 2 tokens"),
        (("--prompts", "nowhere.jsonl"), {"prompt": "a"}, "nowhere.jsonl"),
        (("--boundaries", "2;4;5"), {"prompt": "a"}, "--boundaries: '2;4;5' must be numbers"),
        (("--boundaries", "2,4"), {"prompt": "a"}, "boundaries [2, 4] are not 3"),
        (
            ("--top-k", 0),
            {"prompt_ids": [1], "response_ids": [2, 3]},
            "top_k: 0 is outside [1, 260]",
        ),
        (("--head", "nowhere"), {"prompt": "a"}, "nowhere"),
    ],
)
def test_what_cannot_be_checked_is_refused_in_one_line(
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[object, ...],
    row: dict[str, Any],
    message: str,
) -> None:
    head = write_counting_head(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    common = ("--model", target, "--head", head, "--prompts", prompts(tmp_path, row))
    code, out, err = check(capsys, *common, *flags)
    assert code != 0
    assert not out
    assert message in err.splitlines()[-1]
