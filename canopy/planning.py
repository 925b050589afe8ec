"""`canopy plan`: how many slices of each kind a load needs. The formulas are in sizing.py."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from canopy import sizing, step_times
from common.errors import StartupError
from common.types import TreeShape

BYTES = {"bfloat16": 2, "float32": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="target; its config.json is read")
    parser.add_argument("--head", type=Path, required=True, help="head; its config.json is read")
    parser.add_argument("--verify", required=True, metavar="SLICE", help="as v5e-8")
    parser.add_argument("--draft", required=True, metavar="SLICE", help="as v5e-1")
    parser.add_argument("--load", type=float, required=True, help="tokens/s to be served")
    accepted = parser.add_mutually_exclusive_group(required=True)
    accepted.add_argument(
        "--acceptance-length", type=float, help="tokens per round, as measured with these trees"
    )
    accepted.add_argument(
        "--acceptance", help="chance per depth that a node is right, given those above: 0.8,0.7"
    )
    parser.add_argument("--context", type=int, default=2048, help="tokens of a sequence [2048]")
    tree = TreeShape()
    parser.add_argument(
        "--tree-nodes", type=int, default=tree.max_nodes, help="root included [%(default)s]"
    )
    parser.add_argument(
        "--tree-depth", type=int, default=tree.max_depth, help="levels below the root [%(default)s]"
    )
    parser.add_argument(
        "--tree-top-k", type=int, default=tree.top_k, help="nodes kept per level [%(default)s]"
    )
    parser.add_argument(
        "--max-token-ms", type=float, default=50.0, help="per token and reader [50]"
    )
    parser.add_argument(
        "--dtype", choices=BYTES, default="bfloat16", help="of weights and KV [%(default)s]"
    )
    parser.add_argument("--net-ms", type=float, default=0.5, help="on the way, per round [0.5]")
    parser.add_argument("--launch-ms", type=float, default=0.2, help="fixed, per step [0.2]")
    parser.add_argument("--efficiency", type=float, default=0.7, help="of the bounds [0.7]")
    parser.add_argument("--utilisation", type=float, default=0.7, help="of each slice [0.7]")
    curve = "measured SEQUENCES:MS pairs, as 1:5.1,64:8.3, instead of the estimate"
    parser.add_argument("--verify-curve", help=f"with trees; {curve}")
    parser.add_argument("--plain-curve", help=f"of roots alone; {curve}")
    parser.add_argument("--draft-curve", help=curve)
    parser.add_argument("--json", action="store_true", help="one line of JSON")


def run(parsed: argparse.Namespace) -> int:
    """Prints the plan. Raises StartupError for what cannot be planned."""
    try:
        task = _task(parsed)
        plan = sizing.make_plan(task)
    except ValueError as error:
        raise StartupError(str(error)) from None
    if parsed.json:
        print(json.dumps(_as_dict(task, plan)))
    else:
        _show(task, plan, Console(highlight=False))
    return 0


def _task(parsed: argparse.Namespace) -> sizing.Task:
    for name in ("load", "efficiency", "utilisation", "context", "tree_nodes", "tree_depth"):
        if not 0 < getattr(parsed, name) < math.inf:  # also refuses NaN
            raise ValueError(f"{name}: {getattr(parsed, name)} must be a number above 0")
    for name in ("efficiency", "utilisation"):
        if getattr(parsed, name) > 1:
            raise ValueError(f"{name}: {getattr(parsed, name)} must be at most 1")
    verify, draft = step_times.slice_by_name(parsed.verify), step_times.slice_by_name(parsed.draft)
    target = target_weights(read_config(parsed.model), BYTES[parsed.dtype])
    head = head_weights(read_config(parsed.head), read_config(parsed.model), BYTES[parsed.dtype])
    speculation = step_times.Speculation(
        acceptance_length=_acceptance(parsed),
        nodes=parsed.tree_nodes,
        depth=parsed.tree_depth,
        top_k=parsed.tree_top_k,
    )
    estimate = {
        "context": parsed.context,
        "efficiency": parsed.efficiency,
        "launch": parsed.launch_ms / 1000,
    }
    verify_times = [
        _curve(given) or step_times.verify_time(target, verify, nodes=nodes, **estimate)
        for given, nodes in ((parsed.verify_curve, parsed.tree_nodes), (parsed.plain_curve, 1))
    ]
    return sizing.Task(
        verify=verify,
        draft=draft,
        verify_seconds=verify_times[0],
        plain_seconds=verify_times[1],
        draft_seconds=_curve(parsed.draft_curve)
        or step_times.draft_time(head, draft, speculation, **estimate),
        target=target,
        speculation=speculation,
        context=parsed.context,
        net_seconds=parsed.net_ms / 1000,
        load=parsed.load,
        utilisation=parsed.utilisation,
        max_token_seconds=parsed.max_token_ms / 1000,
    )


def _acceptance(parsed: argparse.Namespace) -> float:
    if parsed.acceptance is None:
        length = float(parsed.acceptance_length)
        if not 1 <= length <= parsed.tree_depth + 1:
            raise ValueError(
                f"acceptance_length: {length} is outside [1, {parsed.tree_depth + 1}], what trees"
                f" of depth {parsed.tree_depth} can give"
            )
        return length
    try:
        chances = [float(part) for part in parsed.acceptance.split(",")]
    except ValueError:
        raise ValueError(f"acceptance: {parsed.acceptance!r} must be numbers, as 0.8,0.7") from None
    if not all(0 <= chance <= 1 for chance in chances):
        raise ValueError(f"acceptance: {parsed.acceptance} has a number outside [0, 1]")
    return step_times.acceptance_length(chances[: parsed.tree_depth])


def _curve(text: str | None) -> step_times.StepTime | None:
    if not text:
        return None
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return step_times.curve_time([(int(batch), float(ms) / 1000) for batch, ms in pairs])
    except ValueError:
        raise ValueError(f"curve: {text!r} must be SEQUENCES:MS pairs, as 1:5.1,64:8.3") from None


def read_config(directory: Path) -> Mapping[str, Any]:
    file = directory / "config.json" if directory.is_dir() else directory
    try:
        config: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror or error}; give a model's directory") from None
    except ValueError:
        raise ValueError(f"{file}: not JSON; give a model's directory") from None
    for name in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
        if not isinstance(config.get(name), int):
            raise ValueError(f"{file}: {name} is {config.get(name)!r}; it must be a whole number")
    if any("expert" in name for name in config):
        raise ValueError(f"{file}: mixtures of experts are not planned; give measured curves")
    return config


def _layer(config: Mapping[str, Any], inputs: int) -> tuple[float, float]:
    """Numbers in a layer whose attention reads `inputs` numbers; K and V numbers per token."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    attention = inputs * (heads + 2 * kv_heads) * head_dim + heads * head_dim * hidden
    return attention + 3 * hidden * config["intermediate_size"], 2 * kv_heads * head_dim


def target_weights(config: Mapping[str, Any], bytes_per_number: int) -> step_times.Weights:
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    layer, kv = _layer(config, hidden)
    table = hidden * config["vocab_size"]
    return step_times.Weights(
        params=layers * layer + table,
        held_params=layers * layer + table * (1 if config.get("tie_word_embeddings") else 2),
        kv_bytes_per_token=layers * kv * bytes_per_number,
        bytes_per_number=bytes_per_number,
    )


def head_weights(
    config: Mapping[str, Any], target: Mapping[str, Any], bytes_per_number: int
) -> step_times.Weights:
    """An EAGLE-3 head: attention over [embedding, feature], three captured streams fused."""
    hidden, layers = config["hidden_size"], config.get("num_hidden_layers") or 1
    layer, kv = _layer(config, 2 * hidden)
    vocabulary = config.get("draft_vocab_size") or config["vocab_size"]
    fusion = 3 * target["hidden_size"] * hidden
    return step_times.Weights(
        params=layers * layer + hidden * vocabulary,
        held_params=layers * layer + hidden * (vocabulary + config["vocab_size"]) + fusion,
        kv_bytes_per_token=layers * kv * bytes_per_number,
        bytes_per_number=bytes_per_number,
        extra_params=fusion,
    )


def _as_dict(task: sizing.Task, plan: sizing.Plan) -> dict[str, object]:
    return {
        "verify_slices": plan.verify_slices,
        "draft_slices": plan.draft_slices,
        "drafts_per_verify": round(plan.point.drafts_per_verify, 4),
        "batch": plan.point.batch,
        "verify_ms": round(1000 * plan.point.verify_seconds, 3),
        "draft_ms": round(1000 * plan.point.draft_seconds, 3),
        "round_ms": round(1000 * plan.point.round_seconds, 3),
        "token_ms": round(1000 * plan.point.token_seconds, 3),
        "in_flight": plan.point.in_flight,
        "acceptance_length": round(task.speculation.acceptance_length, 4),
        "tokens_per_second_per_chip": round(plan.per_chip, 1),
        "plain_tokens_per_second_per_chip": round(plan.plain_per_chip, 1),
        "plain_slices": plan.plain_slices,
        "gain_per_chip": round(plan.gain, 3),
    }


def _show(task: sizing.Task, plan: sizing.Plan, console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    headings = ("B", "T_v ms", "T_d ms", "round ms", "ms/token", "in flight", "KV", "drafts/verify")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in sizing.points(task):
        mark = "bold" if row == plan.point else ("" if row.fits else "dim")
        table.add_row(
            str(row.batch),
            *(
                f"{1000 * value:.2f}"
                for value in (row.verify_seconds, row.draft_seconds, row.round_seconds)
            ),
            f"{1000 * row.token_seconds:.2f}",
            str(row.in_flight),
            f"{row.kv_share:.0%}" if row.kv_share < 100 else "none",
            f"{row.drafts_per_verify:.2f}",
            style=mark,
        )
    console.print(table)
    p, length = plan.point, task.speculation.acceptance_length
    rounds, u = task.load / length, f"{task.utilisation:g}"
    verify_ms, draft_ms = 1000 * p.verify_seconds, 1000 * p.draft_seconds
    lines = (
        f"\nrounds/s = L/A = {task.load:g}/{length:.2f} = {rounds:.0f}",
        f"verify slices = ceil(rounds/s / (u B / T_v)) = ceil({rounds:.0f}/s / ({u} x {p.batch}"
        f" / {verify_ms:.2f} ms)) = [bold]{plan.verify_slices} x {task.verify.name}[/]",
        f"draft slices  = ceil(rounds/s / (u B_d / T_d)) = ceil({rounds:.0f}/s / ({u} x"
        f" {p.draft_batch} / {draft_ms:.2f} ms)) ="
        f" [bold]{plan.draft_slices} x {task.draft.name}[/]",
        f"per chip {plan.per_chip:.0f} tokens/s, {plan.plain_per_chip:.0f} without speculation"
        f" ({plan.plain_slices} x {task.verify.name}): gain {plan.gain:.2f}",
    )
    for line in lines:
        console.print(line, soft_wrap=True)
    if plan.gain < 1:
        console.print("[bold]At this load the same chips serve more without speculation.[/]")
