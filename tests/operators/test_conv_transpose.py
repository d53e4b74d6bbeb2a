"""The gradient of transposed convolution: the reference against the forward, sizes that take chunks, errors."""

import itertools
import math

import numpy as np
import pytest
from graph_cases import call, check_close
from samples import dispatcher

import opgrad
from opgrad.cli.examples import expected as expected_of
from opgrad.cli.examples import listed
from opgrad.cli.examples.arrays import _transposed as transposed
from opgrad.cpu.programs import convolution
from opgrad.ops import graph_operators

OP = graph_operators()["conv_transpose_grad"]
RNG = np.random.default_rng(0)


def conv_transpose(x, w, sizes, strides, begin, dilations, group):
    """The forward, by the definition: each element of x adds a filter to y, the padding is cut off."""
    y, per_group = np.zeros((len(x), w.shape[1] * group, *sizes)), len(w) // group
    for c, m in itertools.product(range(len(w)), range(w.shape[1])):
        channel = c // per_group * w.shape[1] + m
        for i, k in itertools.product(np.ndindex(*x.shape[2:]), np.ndindex(*w.shape[2:])):
            o = tuple(a * s - b + e * d for a, s, b, e, d in zip(i, strides, begin, k, dilations, strict=True))
            if all(0 <= place < size for place, size in zip(o, sizes, strict=True)):
                y[(slice(None), channel, *o)] += x[(slice(None), c, *i)] * w[(c, m, *k)]
    return y


CASES = {
    "one axis": (transposed(RNG, (2, 4, 5), 3, (3,), strides=(2,), pads=(1, 0), output_padding=(1,), group=2), (1,)),
    "same": (transposed(RNG, (1, 2, 3, 4), 2, (3, 4), strides=(2, 3), auto_pad="SAME_LOWER"), (1, 1)),
    "output_shape": (transposed(RNG, (1, 2, 3, 3), 2, (3, 2), strides=(2, 2), output_shape=(4, 8)), (2, 0)),
    "three axes": (transposed(RNG, (1, 2, 2, 3, 2), 1, (2, 1, 3), dilations=(2, 1, 1), group=2), (0, 0, 0)),
}


@pytest.mark.parametrize("case", CASES)
def test_reference_is_the_forwards_derivative(case, rng):
    """The forward is linear in x and in w, so that derivatives along any direction are differences."""
    example, begin = CASES[case]
    given = dict(example.arguments)
    dy, x, w = (given[name] for name in ("dy", "x", "w"))
    ones = (1,) * (x.ndim - 2)
    form = dy.shape[2:], given["strides"] or ones, begin, given["dilations"] or ones, given.get("group", 1)
    x1, w1 = rng.normal(size=x.shape), rng.normal(size=w.shape)
    dx, dw, db = OP.reference(**given)
    assert math.isclose((dx * x1).sum(), (dy * conv_transpose(x1, w, *form)).sum(), rel_tol=1e-12)
    assert math.isclose((dw * w1).sum(), (dy * conv_transpose(x, w1, *form)).sum(), rel_tol=1e-12)
    np.testing.assert_allclose(db, dy.sum((0, *range(2, dy.ndim))))


LARGER = {
    "several chunks": transposed(RNG, (40, 12, 20, 20), 5, (3, 3), strides=(2, 2), pads=(1,) * 4),
    "channels beyond a tile": transposed(RNG, (3, 33, 9, 9), 37, (2, 2), strides=(2, 2)),
    "depthwise": transposed(RNG, (2, 24, 10, 10), 1, (5, 5), group=24, pads=(2,) * 4),
    "wide strides": transposed(RNG, (2, 5, 12, 12), 3, (2, 3), strides=(5, 4), pads=(1, 0, 0, 1)),
    "a long axis": transposed(RNG, (2, 2, 30_000), 3, (25,), dilations=(7,)),
}


@pytest.mark.parametrize("case", LARGER)
def test_larger(case, threads):
    given = single(LARGER[case])
    opgrad.set_num_threads(2)
    found = call(OP, given)
    check_close(found, expected_of(OP, given), LARGER[case].terms)
    opgrad.set_num_threads(1)
    for alone, together in zip(call(OP, given), found, strict=True):
        assert alone.tobytes() == together.tobytes()


def single(example):
    return {k: v.astype("float32") if isinstance(v, np.ndarray) else v for k, v in example.arguments.items()}


def test_chunks_of_any_size_give_the_same_sums(monkeypatch):
    given = single(LARGER["several chunks"])
    expected = expected_of(OP, given)
    for size in (1, 100_000, 1 << 30):
        monkeypatch.setattr(convolution, "CHUNK_BYTES", size)
        check_close(listed(dispatcher(OP)(**given)), expected, 40 * 39 * 39)


@pytest.mark.parametrize("needs", [("dx",), ("dw",), ("db",), ("dw", "db"), ("db", "dx")])
def test_only_what_is_needed(needs):
    given = single(CASES["one axis"][0])
    every = dict(zip(OP.results, call(OP, given), strict=True))
    found = opgrad.conv_transpose_grad(**given, needs=needs)
    found = found if isinstance(found, tuple) else (found,)
    for name, array in zip([name for name in OP.results if name in needs], found, strict=True):
        assert array.tobytes() == every[name].tobytes(), name


def test_the_bias_of_no_channels_has_a_gradient():
    dy, x, w = np.ones((2, 3, 4, 4)), np.zeros((2, 0, 4, 4)), np.zeros((0, 3, 1, 1))
    assert opgrad.conv_transpose_grad(dy, x, w)[2].tolist() == [32] * 3
    assert opgrad.conv_grad(dy, x, w.reshape(3, 0, 1, 1))[2].tolist() == [32] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((2, 4, 6))}, r"w has 4 dimensions, expected 3, as x has"),
        ({"w": np.zeros((6, 3, 2, 2))}, r"w has shape \(6, 3, 2, 2\), expected \(4, 3, 2, 2\)"),
        ({"dy": np.zeros((2, 3, 8, 9))}, r"dy has shape \(2, 3, 8, 9\), expected \(2, 3, 8, 8\)"),
        ({"group": 3}, "group is 3, expected a divisor of the channels of x, 4"),
        ({"kernel_shape": (3, 2)}, r"kernel_shape is \(3, 2\), expected \(2, 2\), as w has"),
        ({"strides": (0, 1)}, r"strides is \(0, 1\), expected numbers of at least 1"),
        ({"output_padding": (1,)}, r"output_padding is \(1,\), expected 2 numbers"),
        ({"output_shape": (1, 2, 3)}, r"output_shape is \(1, 2, 3\), expected 2 numbers"),
        ({"auto_pad": "FULL"}, "auto_pad is 'FULL', expected one of NOTSET"),
    ],
)
def test_errors(change, message):
    given = {"dy": np.zeros((2, 3, 8, 8)), "x": np.zeros((2, 4, 4, 4)), "w": np.zeros((4, 3, 2, 2)), "strides": (2, 2)}
    with pytest.raises((ValueError, TypeError), match=f"^conv_transpose_grad: {message}"):
        opgrad.conv_transpose_grad(**{**given, **change})
