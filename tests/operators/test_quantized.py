"""The gradient of products with quantized weights: every layout around the limits of blocks, and what is refused."""

import itertools

import numpy as np
import pytest
from graph_cases import check_close
from guards import Placed

import opgrad
from opgrad.contract import reference

NAME = "quantized_matmul_grad"
WIDTHS = (2, 4, 8)


def packed(rng, rows, columns, bits):
    """Random bytes for rows of so many integers."""
    return rng.integers(0, 256, (rows, -(-columns * bits // 8))).astype(np.uint8)


def check(given, terms, dtype="float32"):
    given = {**given, "dy": given["dy"].astype(dtype), "scales": given["scales"].astype(dtype)}
    exact = {name: each.astype("f8") if name in ("dy", "scales") else each for name, each in given.items()}
    check_close([opgrad.quantized_matmul_grad(**given)], [reference(NAME)(**exact)], terms)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("block", [16, 32, 128, 256])
def test_blocks_and_ends_of_rows(bits, block, rng):
    """Depths around the limits of chunks, columns around those of vectors, of panels and of a part's columns."""
    for n, k in itertools.product((1, 95, 97, 129), (1, 31, 33, 257)):
        blocks = -(-k // block)
        given = {"b": packed(rng, n, blocks * block, bits), "scales": rng.uniform(0.1, 1, (n, blocks))}
        given |= {"zero_points": packed(rng, n, blocks, bits), "dy": rng.normal(size=(3, n))}
        check({**given, "N": n, "K": k, "bits": bits, "column_block": block}, n)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("blocks", [(0, 0), (0, 1), (1, 0), (1, 32), (32, 1)], ids=str)
def test_weights_in_the_order_of_matmul(bits, blocks, rng):
    for n, k in ((8, 24), (128, 40), (200, 300)):
        down, across = (1 if not b else -(-size // b) for size, b in zip((k, n), blocks, strict=True))
        given = {"b": packed(rng, k, n, bits), "scales": rng.uniform(0.1, 1, (down, across))}
        given |= {"zero_points": rng.uniform(0, 3, (down, across)).astype("f4"), "dy": rng.normal(size=(5, n))}
        given |= {"N": n, "K": k, "bits": bits, "transB": False, "row_block": blocks[0], "column_block": blocks[1]}
        check(given, n)
        check({**given, "signed": True}, n)


def test_integers_of_eight_bits_with_a_sign(rng):
    b, scales = rng.integers(-128, 128, (6, 40)).astype(np.int8), np.array([0.5], np.float32)
    dy, given = rng.normal(size=(2, 3, 6)).astype(np.float32), {"N": 6, "K": 40, "bits": 8, "row_block": 0}
    found = opgrad.quantized_matmul_grad(dy, b, scales, **given)
    np.testing.assert_allclose(found, dy @ (b * scales[0]), rtol=1e-5, atol=1e-4)
    as_bytes = opgrad.quantized_matmul_grad(dy, b.view(np.uint8), scales, **given, signed=True)
    assert as_bytes.tobytes() == found.tobytes()


@pytest.mark.parametrize("rows", [1, 119, 121, 513, 1030])
def test_rows_around_the_limits_of_blocks(rows, rng):
    given = {"b": packed(rng, 40, 320, 4), "scales": rng.uniform(0.1, 1, (40, 10)), "dy": rng.normal(size=(rows, 40))}
    check({**given, "N": 40, "K": 300, "column_block": 32, "zero_point": 8.0}, 40)


def test_reads_and_writes_nothing_outside(rng):
    """Bytes that end where memory does, whose last vector is not whole, and a result between guards."""
    n, k = 5, 34
    for bits in WIDTHS:
        b = Placed((n, -(-k * bits // 8)), "uint8", offset=3)
        b.array[:] = packed(rng, n, k, bits)
        dx, dy = Placed((2, k), "float32", offset=1), rng.normal(size=(2, n)).astype("f4")
        given = {"N": n, "K": k, "bits": bits, "scales": np.ones((n, 1), "f4")}
        opgrad.quantized_matmul_grad(dy, b.array, **given, out=dx.array)
        assert dx.untouched()
        np.testing.assert_allclose(dx.array, reference(NAME)(dy.astype("f8"), b.array, **given), rtol=1e-4, atol=1e-3)


def test_nan_and_infinity_stay_in_their_rows(rng):
    given = {"b": packed(rng, 4, 32, 4), "scales": np.ones((4, 1), "f4"), "N": 4, "K": 32, "column_block": 32}
    dy = rng.normal(size=(3, 4)).astype("f4")
    clean = opgrad.quantized_matmul_grad(dy, **given)
    dy[1, 2], dy[2, 0] = np.nan, -np.inf
    found = opgrad.quantized_matmul_grad(dy, **given)
    assert found[0].tobytes() == clean[0].tobytes()
    assert np.isnan(found[1]).all()
    assert not np.isfinite(found[2]).all()


def test_the_bits_do_not_depend_on_threads(rng, threads):
    given = {"b": packed(rng, 200, 1024, 4), "scales": rng.uniform(0.1, 1, (200, 32)).astype("f4")}
    given |= {"dy": rng.normal(size=(600, 200)).astype("f4"), "N": 200, "K": 1024, "column_block": 32}
    threads(lambda: opgrad.quantized_matmul_grad(**given), (1, 2, 4))
