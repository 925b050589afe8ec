"""`canopy plan`: its arithmetic against figures worked out by hand, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from canopy import planning, sizing, step_times
from canopy.cli import main
from common.errors import StartupError
from kernels.chips import CHIPS

ROOT = Path(__file__).resolve().parents[2]
TARGET = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip
HEAD = {**TARGET, "num_hidden_layers": 1, "draft_vocab_size": 32000}


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name, config in (("target", TARGET), ("head", HEAD)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return ["plan", "--model", str(tmp_path / "target"), "--head", str(tmp_path / "head")]


SLICES = ["--verify", "v5e-4", "--draft", "v5e-1"]


@pytest.mark.parametrize(
    ("chip", "teraflops"), [("v4", 275), ("v5e", 197), ("v5p", 459), ("v6e", 918), ("tpu7x", 2307)]
)
def test_peaks_are_the_vendors(chip: str, teraflops: float) -> None:
    one = step_times.slice_by_name(f"{chip}-1")
    assert one.operations_per_second / 1e12 == pytest.approx(teraflops, rel=0.01)
    assert set(step_times.HBM_GIB) == set(CHIPS)


def test_weights_of_an_8b_target() -> None:
    weights = planning.target_weights(TARGET, 2)
    assert weights.held_params == pytest.approx(8.03e9, rel=0.001)  # the model's published size
    assert weights.kv_bytes_per_token == 2 * 8 * 128 * 32 * 2


def test_issue_figures_of_bytes_over_bandwidth() -> None:
    """A one-layer head on one v5e chip: about 0.97 ms a level; an 8B target on four: ~5 ms."""
    head = planning.head_weights(HEAD, TARGET, 2)
    one, four = step_times.slice_by_name("v5e-1"), step_times.slice_by_name("v5e-4")
    bounds = {"num_rows": 1, "kv_tokens": 0, "efficiency": 1.0}
    assert 1000 * step_times.pass_seconds(head, one, **bounds) == pytest.approx(0.97, rel=0.1)
    target = planning.target_weights(TARGET, 2)
    assert 4.5 < 1000 * step_times.pass_seconds(target, four, **bounds) < 5.1


def test_smollm2_weights_are_what_its_file_holds() -> None:
    config = json.loads((ROOT / "canopy/heads/smollm2-135m-instruct/config.json").read_text())
    target = {**config, "num_hidden_layers": 30, "tie_word_embeddings": True}
    assert planning.target_weights(target, 4).held_params == pytest.approx(134.5e6, rel=0.002)


def test_acceptance_length_is_a_sum_of_products() -> None:
    assert step_times.acceptance_length([0.5, 0.5]) == 1 + 0.5 + 0.25
    assert step_times.acceptance_length([]) == 1


def test_curves_are_joined_and_continued() -> None:
    seconds = step_times.curve_time([(64, 8.0), (1, 5.0), (32, 6.0)])
    assert seconds(1) == 5.0
    assert seconds(48) == 7.0
    assert seconds(128) == pytest.approx(12.0)


def task(**changes: object) -> sizing.Task:
    """Steps of 10 ms for 8 sequences whatever the batch, trees of 5 ms; A = 2."""
    weights = step_times.Weights(params=1, held_params=1, kv_bytes_per_token=1, bytes_per_number=2)
    values: dict[str, object] = {
        "verify": step_times.slice_by_name("v5e-4"), "draft": step_times.slice_by_name("v5e-1"),
        "verify_seconds": lambda batch: 0.010 * max(1, batch / 8),
        "plain_seconds": lambda batch: 0.010 * max(1, batch / 8),
        "draft_seconds": lambda batch: 0.005 * max(1, batch / 8), "target": weights,
        "speculation": step_times.Speculation(
            acceptance_length=2.0, nodes=8, depth=4, top_k=4
        ),
        "context": 100, "net_seconds": 0.001, "load": 3200.0, "utilisation": 1.0,
        "max_token_seconds": 1.0,
    }  # fmt: skip
    return sizing.Task(**{**values, **changes})  # type: ignore[arg-type]


def test_plan_by_hand() -> None:
    plan = sizing.make_plan(task())
    assert plan.point.batch == 8  # larger ones serve no more, and make readers wait
    # 3200 tokens/s are 1600 rounds/s; verify does 8 / 10 ms = 800, a draft 8 / 5 ms = 1600
    assert (plan.verify_slices, plan.draft_slices) == (2, 1)
    assert plan.point.drafts_per_verify == 0.5
    assert plan.point.round_seconds == pytest.approx(0.016)
    assert plan.point.token_seconds == pytest.approx(0.008)
    assert plan.point.in_flight == math.ceil(8 * 16 / 10)
    assert plan.per_chip == pytest.approx(3200 / 9)
    assert plan.plain_per_chip == pytest.approx(200)
    assert plan.plain_slices == 4
    assert plan.gain == pytest.approx(3200 / 9 / 200)


def test_both_slices_carry_the_load_they_were_planned_for() -> None:
    for load in (10.0, 1599.0, 1601.0, 123456.0):
        plan = sizing.make_plan(task(load=load))
        rounds = load / 2.0
        assert plan.verify_slices * plan.point.verify_rounds_per_second >= rounds
        assert (plan.verify_slices - 1) * plan.point.verify_rounds_per_second < rounds
        assert plan.draft_slices * plan.point.draft_rounds_per_second >= rounds
        assert plan.tokens_per_second >= load


def test_a_time_per_token_bounds_the_batch(
    capsys: pytest.CaptureFixture[str], files: list[str]
) -> None:
    batches = []
    for limit in ("50", "7"):
        rest = ["--load", "5000", "--acceptance-length", "3", "--max-token-ms", limit, "--json"]
        assert main([*files, *SLICES, *rest]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["token_ms"] <= float(limit)
        batches.append(result["batch"])
    assert batches[0] > batches[1]


def test_measured_curves_are_used(capsys: pytest.CaptureFixture[str], files: list[str]) -> None:
    curves = ["--verify-curve", "1:10,8:10", "--draft-curve", "1:5,8:5", "--plain-curve", "1:9,8:9"]
    rest = [
        "--load",
        "100",
        "--acceptance",
        "0.5,0.5",
        "--net-ms",
        "1",
        "--json",
        "--tree-depth",
        "2",
    ]
    assert main([*files, *SLICES, *curves, *rest]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["verify_ms"], result["draft_ms"], result["round_ms"]) == (10, 5, 16)
    assert result["acceptance_length"] == 1.75


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--verify", "v9-4", "--draft", "v5e-1"], ["v9-4", "v5e-8", "tpu7x"]),
        ([*SLICES, "--acceptance-length", "9"], ["acceptance_length: 9", "[1, 6]"]),
        ([*SLICES, "--acceptance", "0.5,x"], ["0.5,x"]),
        ([*SLICES, "--verify-curve", "1"], ["curve: '1'", "1:5.1"]),
        ([*SLICES, "--efficiency", "2"], ["efficiency: 2.0", "at most 1"]),
        ([*SLICES, "--max-token-ms", "0.1"], ["max_token_ms", "least"]),
        (["--verify", "v5e-1", "--draft", "v5e-1"], ["15.0 GiB", "v5e-1", "larger"]),
    ],
)
def test_refusals_name_value_and_remedy(
    files: list[str], flags: list[str], words: list[str]
) -> None:
    if not any(flag.startswith("--acceptance") for flag in flags):
        flags = [*flags, "--acceptance-length", "3"]
    with pytest.raises(StartupError) as refused:  # which the command prints as one line
        main([*files, "--load", "5000", *flags])
    error = str(refused.value)
    assert "\n" not in error
    assert all(word in error for word in words), error


def test_the_plan_shows_its_formula(capsys: pytest.CaptureFixture[str], files: list[str]) -> None:
    assert main([*files, *SLICES, "--load", "5000", "--acceptance-length", "3"]) == 0
    out = capsys.readouterr().out
    assert "verify slices = ceil(rounds/s / (u B / T_v)) = ceil(1667/s" in out


def test_the_documented_plan_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = (ROOT / "docs/operating.md").read_text(encoding="utf-8")
    block = text.split("<!-- plan: begin -->")[1].split("<!-- plan: end -->")[0]
    command, *shown = [line.removeprefix("    ") for line in block.strip("\n").splitlines()]
    flags = command.split()[command.split().index("--verify") :]
    assert main([*files, *flags]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == shown
