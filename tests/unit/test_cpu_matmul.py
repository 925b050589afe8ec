"""The CPU's own product: its numbers, the bits of its rows, its threads, and doing without it."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu_matmul.api import call_packed, packed_matmul
from kernels.cpu_matmul.packing import WIDTH, pack
from models.layers import Linear

llvm = pytest.importorskip("llvmlite.binding")
AVX2 = dict(llvm.get_host_cpu_features()).get("avx2")
pytestmark = pytest.mark.skipif(not AVX2, reason="needs AVX2 or AVX-512")


def product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return np.asarray(packed_matmul(jnp.asarray(x), pack(jnp.asarray(w)), w.shape[1]))


def random_pair(seed: int, m: int, k: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return (
        random.standard_normal((m, k), dtype=np.float32),
        random.standard_normal((k, n), dtype=np.float32),
    )


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 20), st.integers(1, 70), st.integers(1, 2 * WIDTH + 5), st.integers(0, 99))
def test_product_is_that_of_float64(m: int, k: int, n: int, seed: int) -> None:
    x, w = random_pair(seed, m, k, n)
    exact = x.astype(np.float64) @ w
    room = np.abs(x).astype(np.float64) @ np.abs(w)
    assert np.all(np.abs(product(x, w) - exact) <= k * 2.0**-24 * room + 1e-30)


def test_a_row_has_the_same_bits_whatever_stands_beside_it() -> None:
    x, w = random_pair(1, 19, 576, 200)
    together = product(x, w)
    for rows in (1, 2, 7, 8, 9):
        alone = np.concatenate([product(x[i : i + rows], w) for i in range(0, 19, rows)])
        assert np.array_equal(alone, together)


@pytest.mark.parametrize("rows", [1, 4, 8, 13])
def test_int8_weights_give_the_bits_of_the_same_numbers_as_floats(rows: int) -> None:
    x, _ = random_pair(5, rows, 96, 100)
    w = np.random.default_rng(6).integers(-128, 128, (96, 100)).astype(np.int8)
    assert pack(jnp.asarray(w)).dtype == jnp.int8
    assert np.array_equal(product(x, w), product(x, w.astype(np.float32)))


def test_not_a_number_stays_in_its_row() -> None:
    x, w = random_pair(2, 5, 16, 60)
    x[3, 4] = np.nan
    found = np.isnan(product(x, w))
    assert found[3].all()
    assert not np.delete(found, 3, axis=0).any()


def test_products_at_the_same_time_do_not_meet() -> None:
    pairs = [random_pair(seed, 1 + seed % 9, 128, 480) for seed in range(24)]
    run = jax.jit(lambda x, packed: packed_matmul(x, packed, 480))

    def many(pair: tuple[np.ndarray, np.ndarray]) -> bool:
        x, packed = jnp.asarray(pair[0]), pack(jnp.asarray(pair[1]))
        first = np.asarray(run(x, packed))
        same = all(np.array_equal(np.asarray(run(x, packed)), first) for _ in range(40))
        return same and bool(np.allclose(first, pair[0] @ pair[1], atol=1e-3))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(many, pairs))


def test_threads_that_ask_first_at_the_same_time_register_once() -> None:
    program = (
        "import jax.numpy as jnp\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from kernels.cpu_matmul.api import packed_matmul\n"
        "x, w = jnp.ones((1, 2)), jnp.ones((1, 2, 48), jnp.int8)\n"
        "with ThreadPoolExecutor(8) as pool:\n"
        "    ask = lambda _: float(packed_matmul(x, w, 1)[0, 0])\n"
        "    assert list(pool.map(ask, range(8))) == [2.0] * 8\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_avx2_gives_the_same_bits() -> None:
    from kernels.cpu_matmul import build, tile

    x, w = random_pair(3, 11, 96, 100)
    for kind in (np.float32, np.int8):
        name, weights = f"test_packed_matmul_avx2_{kind.__name__}", (w * 40).astype(kind)
        build.register_handler(name, tile.AVX2, int8=kind is np.int8)
        found = call_packed(name, jnp.asarray(x), pack(jnp.asarray(weights)), 100)
        assert np.array_equal(np.asarray(found), product(x, weights))


@pytest.mark.parametrize(
    ("x", "packed", "columns", "message"),
    [
        (jnp.ones((2, 3)), jnp.ones((1, 4, WIDTH)), 5, r"x \(2, 3\), packed \(1, 4, 48\)"),
        (jnp.ones((2, 3)), jnp.ones((1, 3, WIDTH)), WIDTH + 1, "of 49 columns"),
        (jnp.ones((0, 3)), jnp.ones((1, 3, WIDTH)), 5, "nothing empty"),
        (jnp.ones((2, 3), jnp.bfloat16), jnp.ones((1, 3, WIDTH)), 5, "must be float32"),
    ],
)
def test_other_shapes_are_refused(
    x: jax.Array, packed: jax.Array, columns: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        packed_matmul(x, packed, columns)


def test_without_llvmlite_it_is_not_available() -> None:
    program = (
        "import sys; sys.modules['llvmlite'] = None\n"
        "from kernels.cpu_matmul.api import is_available\n"
        "sys.exit(is_available())"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_linear_takes_a_packed_kernel() -> None:
    x, w = random_pair(4, 3, 20, 30)
    bias = np.arange(30, dtype=np.float32)
    linear = Linear(30, use_bias=True, dtype=np.dtype(np.float32))
    plain = linear.apply({"params": {"kernel": w, "bias": bias}}, x)
    packed = {"packed_kernel": pack(jnp.asarray(w)), "bias": bias}
    found = linear.apply({"params": packed}, jnp.asarray(x))
    np.testing.assert_allclose(np.asarray(found), np.asarray(plain), rtol=1e-5, atol=1e-5)
