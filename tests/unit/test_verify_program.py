"""The step as several programs does what the step as one does."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from common.types import SamplingParams
from kernels.cpu_matmul.api import is_available
from models import packing
from models.config import RopeConfig, TargetConfig
from models.target import init_target
from verify_service import step_curve
from verify_service.engine import DeviceEngine, EngineConfig
from verify_service.program import even_spans
from verify_service.step import SequenceOutcome, SequenceWork

WINDOWED = TargetConfig(
    family="llama", vocab_size=61, hidden_size=16, num_layers=5, num_heads=4,
    num_kv_heads=2, head_dim=4, mlp_size=24, norm_eps=1e-5, rope=RopeConfig(theta=10_000.0),
    tied_embeddings=False, max_positions=128, windows=(None, 34, None, 34, None),
    boundaries=(1, 4, 5),
)  # fmt: skip
CONFIG = EngineConfig(
    num_pages=24, page_size=4, max_sequences=4, max_context_len=64, max_tree_nodes=12,
    row_buckets=(), max_rows=32, min_rows=8, max_stop_tokens=4,
)  # fmt: skip


def prefill(slot: int, length: int, kv_len: int, pages: list[int]) -> SequenceWork:
    tokens = np.array([(7 * i) % 61 for i in range(length)], np.int32)
    return SequenceWork(
        slot=slot, tokens=tokens, parents=np.arange(-1, length - 1, dtype=np.int32),
        num_causal=length,
        kv_len=kv_len, page_ids=np.array(pages, np.int32), samples=True, wants_features=True,
        sampling=SamplingParams(temperature=0.0), stop_tokens=(),
    )  # fmt: skip


def tree(slot: int, kv_len: int, root: int, pages: list[int]) -> SequenceWork:
    return dataclasses.replace(
        prefill(slot, 4, kv_len, pages),
        tokens=np.array([root, 5, 9, 11], np.int32), parents=np.array([-1, 0, 0, 1], np.int32),
        num_causal=1, kv_len=kv_len,
    )  # fmt: skip


@functools.cache
def run(layers_per_program: int | None) -> list[SequenceOutcome]:
    params = jax.tree.map(lambda x: x * (8.0 if x.ndim > 1 else 1.0), init_target(WINDOWED, 5))
    config = dataclasses.replace(CONFIG, layers_per_program=layers_per_program)
    engine = DeviceEngine(WINDOWED, params, config)
    pages = list(range(12)), list(range(12, 24))
    first = engine.run([prefill(0, 20, 0, pages[0]), prefill(1, 7, 0, pages[1])])
    second = engine.run([prefill(0, 20, 20, pages[0])])  # beyond the window
    third = engine.run([tree(0, 40, 3, pages[0]), tree(1, 7, 3, pages[1])])
    return [*first, *second, *third]


@pytest.mark.parametrize("layers_per_program", [1, 2])
def test_split_step_gives_tokens_and_features_of_the_whole(layers_per_program: int) -> None:
    for split, whole in zip(run(layers_per_program), run(None), strict=True):
        assert split.tokens.tolist() == whole.tokens.tolist()
        assert split.num_committed == whole.num_committed
        np.testing.assert_allclose(split.features, whole.features, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layers_per_program", [None, 2])
def test_copied_page_is_read_in_its_new_place_and_stays_in_the_old(
    layers_per_program: int | None,
) -> None:
    """Two sequences go on from one page; the one that writes has it copied first."""
    params = jax.tree.map(lambda x: x * (8.0 if x.ndim > 1 else 1.0), init_target(WINDOWED, 5))
    config = dataclasses.replace(CONFIG, layers_per_program=layers_per_program)
    engine = DeviceEngine(WINDOWED, params, config)
    [prefix] = engine.run([prefill(0, 6, 0, [0, 1])])  # page 1 has two rows
    own = tree(0, 6, 3, [0, 1, 2, 3])
    forked = dataclasses.replace(tree(1, 6, 9, [0, 4, 5, 6]), page_copy=(1, 4))
    [fork, original] = engine.run([forked, own])
    alone = DeviceEngine(WINDOWED, params, config)
    alone.run([prefill(0, 6, 0, [0, 1])])
    [expected] = alone.run([own])
    np.testing.assert_allclose(original.features, expected.features, rtol=1e-5, atol=1e-6)
    alone = DeviceEngine(WINDOWED, params, config)
    alone.run([prefill(0, 6, 0, [0, 1])])
    [expected] = alone.run([dataclasses.replace(forked, page_ids=own.page_ids, page_copy=None)])
    np.testing.assert_allclose(fork.features, expected.features, rtol=1e-5, atol=1e-6)
    assert prefix.num_committed == 6
    with pytest.raises(ValueError, match="page_copy: to page 9, which is none of page_ids"):
        engine.run([dataclasses.replace(own, page_copy=(1, 9))])


def test_measured_steps_change_no_later_answer() -> None:
    params = jax.tree.map(lambda x: x * (8.0 if x.ndim > 1 else 1.0), init_target(WINDOWED, 5))
    fresh, measured = (DeviceEngine(WINDOWED, params, CONFIG) for _ in range(2))
    points = step_curve.measure(measured)
    assert {(p.num_tokens, p.num_kv_tokens, p.num_sequences) for p in points} == {
        (32, 0, 1), (32, 32, 1), (32, 0, 4),
    }  # fmt: skip
    assert all(point.seconds > 0 for point in points)
    work = prefill(0, 20, 0, list(range(12)))
    for a, b in zip(fresh.run([work]), measured.run([work]), strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        np.testing.assert_array_equal(a.features, b.features)


@pytest.mark.parametrize(
    ("num_layers", "most", "lengths"),
    [(30, 5, [5] * 6), (32, 5, [4, 5, 4, 5, 4, 5, 5]), (3, 8, [3]), (4, 1, [1, 1, 1, 1])],
)
def test_layers_fall_into_even_groups(num_layers: int, most: int, lengths: list[int]) -> None:
    spans = even_spans(num_layers, most)
    assert [span.stop - span.start for span in spans] == lengths
    assert (spans[0].start, spans[-1].stop) == (0, num_layers)


def test_packed_weights_give_tokens_and_features_of_plain_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not is_available():
        pytest.skip("this machine has no packed product")
    plain = run(2)
    monkeypatch.setattr(packing, "MIN_SIZE", 1)
    packed = run.__wrapped__(2)
    for one, other in zip(packed, plain, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.num_committed == other.num_committed
        np.testing.assert_allclose(one.features, other.features, rtol=1e-4, atol=1e-4)
