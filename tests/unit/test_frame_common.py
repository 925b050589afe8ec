"""Settings, logs, feature pieces and the one-line errors."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import time
from pathlib import Path
from typing import ClassVar, Literal, get_args, get_origin

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError, field_validator

from common.config import IntList, ServiceConfig
from common.entry import run_program, stoppable
from common.errors import ConfigError, StartupError
from common.log import get_logger, set_up_logging
from common.metrics import Metrics, integer_buckets, power_buckets
from common.tensors import FeatureDtype, FeaturePiece, is_finite, join_piece, split_rows
from common.types import FeatureRows
from draft_service.config import DraftConfig
from router.config import RouterConfig
from verify_service.config import VerifyConfig


class VerifyLike(ServiceConfig):
    """A schema like the services' own."""

    SERVICE: ClassVar[str] = "verify"

    model: Path = Field(description="Directory of the model.")
    max_sequences: int = Field(8, ge=1, le=64, description="Sequences at once.")
    boundaries: IntList = Field((), description="Captured boundaries.")

    @field_validator("boundaries")
    @classmethod
    def _rising(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted(set(value)):
            raise ValueError(f"{value} does not rise; give each boundary once, in order")
        return value


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def message_of(argv: list[str], environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        VerifyLike.load(argv, environ=environ or {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_flags_win_over_environment_and_environment_over_file(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", "model: /file\nmax_sequences: 2\nport: 7\nboundaries: [1, 2]")
    environ = {"CANOPY_VERIFY_MAX_SEQUENCES": "3", "CANOPY_VERIFY_PORT": "8", "OTHER": "x"}
    config = VerifyLike.load(["--config", file, "--port", "9"], environ=environ)
    assert config.model == Path("/file")
    assert config.max_sequences == 3
    assert config.port == 9
    assert config.boundaries == (1, 2)


def test_lists_are_written_with_commas() -> None:
    assert VerifyLike.load(["--model", "m", "--boundaries", "2, 15,27"], environ={}).boundaries == (
        *(2, 15, 27),
    )
    environ = {"CANOPY_VERIFY_BOUNDARIES": "1,2"}
    assert VerifyLike.load(["--model", "m"], environ=environ).boundaries == (1, 2)


def test_switches_can_be_turned_off() -> None:
    assert VerifyLike.load(["--model", "m", "--no-reflection"], environ={}).reflection is False


def test_constructing_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANOPY_VERIFY_MAX_SEQUENCES", "5")
    assert VerifyLike(model=Path("m")).max_sequences == 8


def test_settings_are_frozen() -> None:
    config = VerifyLike(model=Path("m"))
    with pytest.raises(ValidationError):
        config.port = 1  # type: ignore[misc]


def test_missing_setting_names_flag_and_variable() -> None:
    message = message_of([])
    assert message.startswith("model: not set; give --model or CANOPY_VERIFY_MODEL")


def test_value_beyond_its_limit_names_field_value_limit_and_origin() -> None:
    message = message_of(["--model", "m", "--max-sequences", "0"])
    assert message.startswith("max_sequences: '0' (flag) must be greater than or equal to 1")
    message = message_of(["--model", "m"], {"CANOPY_VERIFY_MAX_SEQUENCES": "many"})
    assert "'many' (environment) must be a valid integer" in message


def test_own_rule_keeps_its_words() -> None:
    message = message_of(["--model", "m", "--boundaries", "3,2"])
    assert message == "boundaries: (3, 2) does not rise; give each boundary once, in order (flag)"


def test_unknown_keys_are_refused_with_the_nearest_name(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", "modle: x")
    assert "modle: no such setting" in message_of(["--config", file, "--model", "m"])
    assert "did you mean model?" in message_of(["--config", file, "--model", "m"])
    message = message_of(["--model", "m"], {"CANOPY_VERIFY_MAX_SEQUENCE": "1"})
    assert "did you mean CANOPY_VERIFY_MAX_SEQUENCES?" in message
    assert "--modell" in message_of(["--modell", "m"])


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1\n", "just words"])
def test_broken_file_is_one_line(tmp_path: Path, text: str) -> None:
    file = write(tmp_path / "c.yaml", text)
    assert "is not a YAML mapping" in message_of(["--config", file, "--model", "m"])
    assert "no file" in message_of(["--config", str(tmp_path / "none.yaml"), "--model", "m"])


def test_a_key_twice_in_the_file_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", "port: 1\nmodel: x\nport: 2\n")
    assert message_of(["--config", file]) == (
        f"config: {file} sets port more than once; keep one of each"
    )


def test_a_service_misspelt_in_the_environment_is_refused() -> None:
    message = message_of(["--model", "m"], {"CANOPY_VERFIY_PORT": "1"})
    assert message == (
        "CANOPY_VERFIY_PORT: no service is named verfiy; did you mean CANOPY_VERIFY_PORT?"
    )
    others = {"CANOPY_ROUTER_PORT": "1", "CANOPY_HOME": "/x", "CANOPY_SERVICE_HOST": "10.0.0.1"}
    assert (
        VerifyLike.load(["--model", "m"], environ=others).port == VerifyLike(model=Path("m")).port
    )


@pytest.mark.parametrize("config", [RouterConfig, DraftConfig, VerifyConfig])
def test_every_setting_has_a_help_text_that_names_its_choices(config: type[ServiceConfig]) -> None:
    shown = " ".join(config._parser("canopy serve").format_help().split())
    for name, field in config.model_fields.items():
        assert field.description, name
        assert "--" + name.replace("_", "-") in shown
        for choice in get_args(field.annotation) if get_origin(field.annotation) is Literal else ():
            assert choice in shown


def test_startup_error_becomes_one_line_and_its_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> int:
        raise StartupError("model: no file\n  config.json")

    assert run_program("canopy", fail) == 1
    assert capsys.readouterr().err == "canopy: model: no file config.json\n"


def test_parent_hears_of_a_failure_on_stdout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> int:
        raise ConfigError("port: too high")

    monkeypatch.setattr("sys.argv", ["router", "--parent-pid", "7"])
    assert run_program("canopy serve router", fail) == 2
    said = capsys.readouterr()
    assert json.loads(said.out) == {"event": "failed", "reason": "port: too high"}
    assert said.err == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stoppable_code_gives_back_what_it_has(
    number: signal.Signals, code: int, request: pytest.FixtureRequest
) -> None:
    # Where the suite runs in the background of a script, SIGINT is ignored from the start.
    request.addfinalizer(functools.partial(signal.signal, number, signal.getsignal(number)))
    signal.signal(number, signal.default_int_handler)
    given_back = []

    def run() -> int:
        with stoppable():
            try:
                os.kill(os.getpid(), number)
                time.sleep(10)
            finally:
                given_back.append(True)
        return 0

    before = signal.getsignal(number)
    assert run_program("canopy", run) == code
    assert given_back
    assert signal.getsignal(number) is before


@pytest.fixture
def restored_logging():  # type: ignore[no-untyped-def]
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.mark.usefixtures("restored_logging")
def test_json_log_withholds_what_people_wrote(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("router", "json")
    get_logger("router.api").info("request", prompt="a secret", num_prompt_tokens=3)
    entry = json.loads(capsys.readouterr().err)
    assert entry["event"] == "request"
    assert entry["service"] == "router"
    assert entry["num_prompt_tokens"] == 3
    assert "secret" not in json.dumps(entry)


@pytest.mark.usefixtures("restored_logging")
def test_text_log_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("router", "text", "warning")
    get_logger("x").info("unheard")
    get_logger("x").warning("peer lost", address="127.0.0.1:1")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING x: peer lost address=127.0.0.1:1")


def test_metric_names_carry_prefix_and_service() -> None:
    metrics = Metrics("verify")
    metrics.counter("steps", "Steps.").inc()
    metrics.histogram("tree_nodes", "Nodes.", integer_buckets(2)).observe(1)
    assert metrics.registry.get_sample_value("canopy_verify_steps_total") == 1
    assert metrics.registry.get_sample_value("canopy_verify_tree_nodes_bucket", {"le": "1.0"}) == 1
    assert power_buckets(5) == (1, 2, 4, 8)


@given(
    num_rows=st.integers(1, 9),
    width=st.integers(1, 8),
    max_rows=st.integers(1, 4),
    dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16]),
)
def test_pieces_join_to_the_rows_they_were_cut_from(
    num_rows: int, width: int, max_rows: int, dtype: type
) -> None:
    rows = np.arange(num_rows * width).reshape(num_rows, width).astype(dtype)
    block = FeatureRows(b"s" * 16, 3, 10, rows)
    row_bytes = width * rows.dtype.itemsize
    pieces = list(split_rows(block, max_bytes=max_rows * row_bytes))
    assert all(len(piece.data) <= max_rows * row_bytes for piece in pieces)
    joined = [join_piece(piece, width) for piece in pieces]
    np.testing.assert_array_equal(np.concatenate([part.rows for part in joined]), rows)
    assert joined[0].rows.dtype == rows.dtype
    positions = [part.position + i for part in joined for i in range(part.rows.shape[0])]
    assert positions == list(range(10, 10 + num_rows))


def test_rows_that_cannot_travel_are_refused() -> None:
    with pytest.raises(ValueError, match="must be 1 to 8"):
        list(split_rows(FeatureRows(b"", 0, 0, np.zeros((1, 3), np.float32)), max_bytes=8))
    with pytest.raises(ValueError, match="float64"):
        list(split_rows(FeatureRows(b"", 0, 0, np.zeros((1, 3), np.float64))))


@pytest.mark.parametrize(
    ("num_rows", "row_width", "data", "words"),
    [
        (1, 2, b"\0" * 7, "data: 7 bytes; num_rows and row_width say 8"),
        (0, 2, b"", "num_rows, row_width: 0 x 2"),
        (1, 3, b"\0" * 12, "row_width: 3 does not fit; must be 2"),
        (1 << 20, 2, b"", "at most 1048576"),
    ],
)
def test_malformed_piece_is_refused_by_field(
    num_rows: int, row_width: int, data: bytes, words: str
) -> None:
    piece = FeaturePiece(b"s", 0, 0, num_rows, row_width, FeatureDtype.FLOAT32, data)
    with pytest.raises(ValueError, match=words):
        join_piece(piece, 2)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@given(st.lists(st.floats(width=32), min_size=1, max_size=6))
def test_rows_with_nan_or_infinity_are_told_from_numbers(dtype: type, values: list[float]) -> None:
    with np.errstate(over="ignore"):
        rows = np.array([values, values[::-1]], np.float32).astype(dtype)
    assert is_finite(rows) == bool(np.isfinite(rows).all())
